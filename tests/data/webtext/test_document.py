"""A line is a document, or says in a word what is wrong with it; a repair is made only where asked for, and named."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from data.webtext.documents import Document, DocumentError, parse_json_line, parse_shard_line

# line, reason of the fault, part of the message, and the document that repairing gives (None: it cannot be repaired)
DIRT: list[tuple[bytes, str, str, Document | None]] = [
    (b'{"text": "cut', "not JSON", "Unterminated string", None),
    (b'{"text": "a"} {}', "not JSON", "Extra data at column 15", None),
    (b"\0\0\0", "not JSON", "Expecting value at column 1", None),
    (b'\xef\xbb\xbf{"text": "a"}', "not JSON", "", None),
    (b'{"text": ' + b"[" * 100_000, "not JSON", "nested too deeply", None),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON", "integer string", None),
    (b"[]", "not an object", "found an array", None),
    (b'"text"', "not an object", "found text", None),
    (b"null", "not an object", "found null", None),
    (b"{}", "no text", "found no keys (see --text-key)", None),
    (b'{"body": "b"}', "no text", "no key 'text'; found 'body'", None),
    (b'{"text": null}', "wrong type", "expected text, found null", None),
    (b'{"text": ["a"]}', "wrong type", "expected text, found an array", None),
    (b'{"text": "a", "url": 7}', "wrong type", "key 'url': expected text, found a number", Document("a")),
    (b'{"text": "a", "text": "b"}', "duplicate key", "key 'text' appears twice", Document("b")),
    (b'{"text": "a", "m": {"x": 1, "x": 2}}', "duplicate key", "'x' appears twice",
     Document("a", None, {"m": {"x": 2}})),
    (b'{"text": "a", "n": NaN}', "not JSON", "NaN is not a number", Document("a", None, {"n": None})),
    (b'{"text": "a", "n": [-Infinity]}', "not JSON", "-Infinity", Document("a", None, {"n": [None]})),
    (b'{"text": "a", "n": 1e999}', "not JSON", "1e999", Document("a", None, {"n": None})),
    (b'{"text": "a\xff"}', "not UTF-8", "byte 0xff at column 12", Document("a\ufffd")),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8", "byte 0xed", Document("\ufffd\ufffd\ufffd")),
    (b'{"text": "a\\ud800"}', "lone surrogate", "U+D800 at character 2", Document("a\ufffd")),
    (b'{"text": "a", "url": "\\uDFFF"}', "lone surrogate", "U+DFFF", Document("a", "\ufffd")),
    (b'{"text": "a", "k\\ud800": ["\\udc00"]}', "lone surrogate", "U+D800",
     Document("a", None, {"k\ufffd": ["\ufffd"]})),
    (b'{"text": "a\0b\tc"}', "not JSON", "Invalid control character", Document("a\0b\tc")),
]


@pytest.mark.parametrize(("line", "reason", "message", "mended"), DIRT, ids=range(len(DIRT)))
def test_dirt_is_named_and_repaired_only_where_that_is_asked_for(line: bytes, reason: str, message: str,
                                                                 mended: Document | None) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_json_line(line)
    assert caught.value.reason == reason and message in str(caught.value)
    if mended is None:
        with pytest.raises(DocumentError):
            parse_json_line(line, repair=True)
    else:
        document, repairs = parse_json_line(line, repair=True)
        assert document == mended and repairs
        assert parse_json_line(document.to_line()) == (mended, ()), "what was repaired is clean"


CLEAN: list[tuple[bytes, Document]] = [
    (b'{"text": "a"}', Document("a")),
    (b'{"text": "", "url": null}', Document("")),
    (b'{"url": "u", "text": "t", "n": 1}\r\n', Document("t", "u", {"n": 1})),
    (b'{"text": "\\ud83d\\ude00\\u0000\\u2028"}', Document("\U0001f600\0\u2028")),
    ('{"text": "\u2028\u0085\x7f\ufeff"}'.encode(), Document("\u2028\u0085\x7f\ufeff")),
    (b'{"text": "\\\\ud800"}', Document("\\ud800")),
    (b'{"text": "a", "meta": {"b": 1}}', Document("a", None, {"b": 1})),
    (b'{"text": "a", "meta": 5}', Document("a", None, {"meta": 5})),
    (b'{"text": "a", "meta": {"b": 1}, "c": 2}', Document("a", None, {"meta": {"b": 1}, "c": 2})),
    (b'{"text": "a", "n": 0.1, "m": [true, null]}', Document("a", None, {"n": 0.1, "m": [True, None]})),
]


@pytest.mark.parametrize(("line", "document"), CLEAN, ids=range(len(CLEAN)))
@pytest.mark.parametrize("mend", [False, True])
def test_clean_lines_are_read_alike_with_and_without_repairs(line: bytes, document: Document, mend: bool) -> None:
    assert parse_json_line(line, repair=mend) == (document, ())


def test_other_keys_can_hold_text_and_address() -> None:
    line = b'{"content": "a", "link": "u", "text": "other"}'
    assert parse_json_line(line, "content", "link")[0] == Document("a", "u", {"text": "other"})


def random_value(rng: random.Random, depth: int = 0) -> Any:
    text = "".join(chr(rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
                   for _ in range(rng.randrange(6)))
    kinds: list[Any] = [text, rng.randrange(-10**9, 10**9), rng.random() * 10 ** rng.randrange(-300, 300), None, True]
    if depth < 3:
        kinds += [[random_value(rng, depth + 1) for _ in range(rng.randrange(3))],
                  {text + str(k): random_value(rng, depth + 1)
                   for k in range(rng.randrange(3))}]
    return rng.choice(kinds)


def test_any_document_comes_back_from_its_line_which_is_one_line_of_utf8() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text, url = str(random_value(rng)), rng.choice([None, "http://a.org/é"])
        meta = {str(random_value(rng, 9)): random_value(rng) for _ in range(rng.randrange(3))}
        document = Document(text, url, meta)
        line = document.to_line()
        assert line.count(b"\n") == 1 and line.endswith(b"\n")
        assert parse_shard_line(line, "x") == document
        assert parse_shard_line(line, "x").to_line() == line
        assert json.loads(line)["text"] == text
