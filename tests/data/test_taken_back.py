"""A long document is tokenized in parts; if one of them is malformed and may be skipped, the others are taken back."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from data import plain_text, preprocess
from data.indexed import IndexedCorpus
from data.parallel import ordered_map
from data.plain_text import Separator
from data.preprocess import EncodedChunk, TextReadOptions, build_corpus
from data.tokenizer import ByteLevelTokenizer, GPT2BPETokenizer, Tokenizer

BYTE, GPT2 = ByteLevelTokenizer(), GPT2BPETokenizer()
SIZE = 300
SEPARATED = TextReadOptions(separator=Separator.parse("<|end|>"), append_eod=False)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text.read_text_chunks, "__defaults__", (None, "", SIZE))


def words(seed: int, count: int) -> bytes:
    rng = random.Random(seed)
    return b" ".join(b"%s%d" % (rng.choice([b"cat", b"roof", b"day"]), rng.randrange(99)) for _ in range(count))


def is_text(document: bytes) -> bool:
    try:
        return bool(document.decode())
    except UnicodeDecodeError:
        return False


def spoiled(document: bytes, places: list[float]) -> bytes:
    for place in places:
        at = int(len(document) * place)
        document = document[:at] + b"\xff" + document[at + 1:]
    return document


LONG = words(1, 1000)
CASES = {
    "first part": [spoiled(LONG, [0.0])], "middle": [spoiled(LONG, [0.5])], "last byte": [spoiled(LONG, [0.99999])],
    "several": [spoiled(LONG, [0.1, 0.5, 0.51, 0.9])], "all over": [spoiled(LONG, [k / 100 for k in range(100)])],
    "between good ones": [words(2, 800), spoiled(LONG, [0.3]), words(3, 900), b"short", spoiled(LONG, [0.9])],
    "after a short bad one": [b"a\xffb", spoiled(LONG, [0.4]), b"c\xff", words(4, 500)],
    "highest letter in it": [b"plain", LONG + "\u00ff \U0001f600 ".encode() + spoiled(words(5, 400), [0.7]), b"plain"],
    "letter cut in two": [LONG + b" \xc3", b"\xa9 and on", words(6, 300)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokenizer", [BYTE, GPT2], ids=["byte", "gpt2"])
@pytest.mark.parametrize("ending", [".txt", ".txt.gz"])
def test_what_is_left_is_the_corpus_of_the_good_documents(tmp_path: Path, case: str, tokenizer: Tokenizer, ending: str
                                                          ) -> None:
    """Also in what is recorded: the largest token, the checksum, the sizes."""
    documents = CASES[case]
    good = [document for document in documents if is_text(document)]
    compress = gzip.compress if ending.endswith("gz") else bytes
    for reading, together in ((SEPARATED, True), (TextReadOptions(), False)):
        paths = {}
        for name, some in (("all", documents), ("good", good)):
            contents = [b"<|end|>".join(some)] if together else some
            paths[name] = [tmp_path / f"{name}{k}{ending}" for k in range(len(contents))]
            for path, content in zip(paths[name], contents):
                path.write_bytes(compress(content))
        (tmp_path / "after.txt").write_text("after")
        for name, bad in (("all", len(documents) - len(good)), ("good", 0)):
            _, skipped = build_corpus([*paths[name], tmp_path / "after.txt"], tmp_path / name, tokenizer, reading,
                                      skip_malformed=True)
            assert skipped == bad, "a document counts once"
        for suffix in (".bin", ".idx", ".json"):
            assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"good{suffix}").read_bytes()


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("bad", [[], [0.0], [0.15]], ids=["good", "bad at its start", "bad later"])
def test_a_document_with_the_damage_in_it_goes_in_all_its_parts(tmp_path: Path, cut: float, bad: list[float]) -> None:
    path, after = tmp_path / "a.txt.gz", tmp_path / "b.txt"
    whole = gzip.compress(spoiled(LONG, bad), compresslevel=0)
    path.write_bytes(whole[:int(len(whole) * cut)])
    after.write_text("after")
    _, skipped = build_corpus([path, after], tmp_path / "c", BYTE, skip_malformed=True)
    corpus = IndexedCorpus(tmp_path / "c")
    assert [BYTE.decode(corpus.document(0).tolist()[:-1])] == ["after"] and corpus.num_documents == skipped == 1


def test_a_document_too_long_to_be_cut_goes_in_all_its_parts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(LONG + bytes(5000) + LONG)
    (tmp_path / "b.txt").write_text("after")
    reading = TextReadOptions(max_document_bytes=1000)
    _, skipped = build_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "c", BYTE, reading,
                              skip_malformed=True)
    assert skipped == 1 and IndexedCorpus(tmp_path / "c").sizes.tolist() == [6]


@pytest.mark.parametrize("case", ["several", "between good ones", "highest letter in it"])
@pytest.mark.parametrize("stop", [1, 4, 8, 11])
def test_it_can_be_interrupted_before_and_after_it_takes_back(tmp_path: Path, case: str, stop: int,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "RESUME_POINT_BYTES", 1)
    (tmp_path / "a.txt").write_bytes(b"<|end|>".join([*CASES[case], b"after"]))

    def build(name: str) -> int:
        return build_corpus([tmp_path / "a.txt"], tmp_path / name, BYTE, SEPARATED, skip_malformed=True)[1]

    def stopping(*arguments: Any) -> Iterator[EncodedChunk]:
        yield from islice(ordered_map(*arguments), stop)
        raise KeyboardInterrupt

    expected = build("whole")
    with monkeypatch.context() as meanwhile, pytest.raises(KeyboardInterrupt):
        meanwhile.setattr(preprocess, "ordered_map", stopping)
        build("c")
    assert (tmp_path / ".c.mark.tmp").exists()
    assert build("c") == expected
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"c{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
