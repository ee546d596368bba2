"""The language of a document is that of most of it: what it begins with, markup and ornament do not decide."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest

from data.storage import UsageError
from data.webtext import language
from data.webtext.__main__ import build_language, build_parser, main
from data.webtext.documents import Document, DroppedDocument
from data.webtext.language import (MAX_SAMPLES, SAMPLE_CHARACTERS, WINDOW_CHARACTERS, LanguageOptions, language_scores,
                                   text_samples)
from data.webtext.runner import MapStage

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
             for name, module in language.DETECTORS.items()]
detectors = pytest.mark.parametrize("detector", DETECTORS)


made = cache(language.make_language_filter)
"""A model is loaded once."""


def label(text: str, detector: str) -> tuple[str, float]:
    document = made(LanguageOptions(detector=detector, label_only=True))(Document(text))
    assert isinstance(document, Document) and document.text == text
    return document.meta["language"], document.meta["language_score"]


# ------------------------------------------------------------------------------------------------ what decides

@detectors
@pytest.mark.parametrize("code", TEXTS)
@pytest.mark.parametrize("times", [1, 3, 20, 200])
def test_a_text_has_its_language_however_long_it_is(detector: str, code: str, times: int) -> None:
    found, score = label(TEXTS[code] * times, detector)
    assert found == code and 0.5 < score <= 1


BEGINNINGS = {
    "another language": GERMAN * 2, "another script": RUSSIAN * 2, "stars": "* * * ~~~ " * 60,
    "boxes": "╔══════════╗\n║ ░░▒▒▓▓██ ║\n" * 30, "numbers": "3.14159 | 2,718.28 | 17:45\n" * 30,
    "addresses": "http://www.beispiel.de/verzeichnis/und/seite/der/tochter/index.php?x=1&y=2\n" * 12,
    "markup": '<td class="zelle und nicht" id="der-hafen"><span title="die Boote"></td>&nbsp;\n' * 12,
    "code": "".join(f"int32 x{k}_t = fnc({k}, &ptr->nxt[{k}]); /* ~ */\n" for k in range(20))}


@detectors
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_what_a_page_begins_with_does_not_decide(detector: str, beginning: str) -> None:
    for code, text in (("en", ENGLISH * 12), ("ru", RUSSIAN * 14)):
        if code == "ru" and beginning == "another script":
            continue
        found, score = label(BEGINNINGS[beginning] + "\n" + text, detector)
        assert found == code and score > 0.4
        assert label(text + "\n" + BEGINNINGS[beginning], detector)[0] == code, "nor what it ends with"


@detectors
@pytest.mark.parametrize("text", ["", "\n", "1 2 3", "\0", "\U0001f600" * 100, "--- 4.5 ---",
                                  "www.example.org/a\n" * 50])
def test_a_text_without_words_has_no_language(detector: str, text: str) -> None:
    assert label(text, detector) == ("zxx", 0)


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


@pytest.mark.parametrize(("text", "words"), [
    ('<td class="zelle">one</td>&nbsp;<br/>two &amp; three <!-- vier -->', "one two three"),
    ("x < y and a <b", "x < y and a <b"), ("=-=-=-= one * * * two 3.14 three", "one two three"),
    ("╔═══╗ one ░░▒▒ 🎉🎊 two →→→ three ……", "one two three"), ("one ......... 12\n\n\n| two |\n+----+", "one two"),
    ("see https://a.example.org/b?c=d, www.example.org and me@example.org one", "see and one"),
    ("don't, he said, it’s well-known.", "don't, he said, it’s well-known."),
    ("हिन्दी में, नहीं।", "हिन्दी में, नहीं।"),
    ("「猫」は、屋根。", "「猫」は、屋根。"), ("ภาษาไทยที่นี่", "ภาษาไทยที่นี่"),
])
def test_a_sample_is_without_what_is_no_language(text: str, words: str) -> None:
    assert text_samples(text) == [words]


def test_a_score_is_the_mean_over_samples_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"aaaa": {"en": 1.0}, "bb": {"de": 0.75, "en": 0.25}, "cc": {"de": 0.5, "fr": 0.5}}
    monkeypatch.setattr(language, "text_samples", str.split)
    assert language_scores("aaaa bb cc", said.__getitem__) == {"en": 0.562, "de": 0.312, "fr": 0.125}
    assert language_scores("bb", said.__getitem__) == {"de": 0.75, "en": 0.25}
    assert language_scores("", said.__getitem__) == {"zxx": 0.0}


# -------------------------------------------------------------------------------------------- what is kept, and how

def stage_of(*arguments: str) -> Callable[[Document], Document | DroppedDocument]:
    args = build_parser().parse_args(["language", "in", "--output", "out", "--detector", "py3langid", *arguments])
    stage = build_language(args)
    assert isinstance(stage, MapStage)
    return made(stage.options)


MIXED = ENGLISH * 4 + GERMAN * 4


@pytest.mark.few(4)
@pytest.mark.parametrize(("arguments", "kept", "reasons"), [
    ([], ["en"], {"de": "language de", "ru": "language ru", "": "language zxx"}),
    (["--keep", "en"], ["en"], {"de": "language de"}), (["--keep", "de", "en"], ["en", "de"], {"ru": "language ru"}),
    (["--keep", "en:0.65"], ["en"], {"de": "language de"}), (["--keep", "zxx"], [""], {"en": "language en"}),
    (["--keep", "en:0.2"], ["en", "mixed"], {"de": "language de"}),
    (["--keep", "de:0.9,en:0.9"], ["en", "de"], {"ru": "language ru"}),
    (["--keep", "en:0.65,de:0.65", "ru"], ["en", "de", "ru"], {"": "language zxx"}),
    (["--keep", "en:0.65", "--keep", "de:0.2"], ["en", "de", "mixed"], {"ru": "language ru"}),
    (["--keep", "en:1"], [], {"mixed": None}), (["--label-only"], ["en", "de", "ru", "mixed", ""], {}),
])
def test_languages_are_kept_by_name_or_by_score(arguments: list[str], kept: list[str], reasons: dict[str, str | None]
                                                ) -> None:
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


@pytest.mark.parametrize("keep", ["english", "EN", "en:", "en:0", "en:1.1", "en:x", "en:nan", "en:0.5,", ",", "", "e"])
def test_what_is_no_language_is_refused(keep: str) -> None:
    with pytest.raises(UsageError, match=re.escape("or one with its least score (en:0.65), found ")):
        main(["language", "in", "--output", "out", "--keep", keep])


@pytest.mark.parametrize("detector", language.DETECTORS)
@pytest.mark.parametrize(("keep", "told"), [(["eng"], "'eng'; it knows "), (["en", "ger:0.5"], "'ger'; it knows "),
                                            (["en,jp"], "'jp'; it knows ")])
def test_a_language_that_the_detector_never_finds_is_refused(detector: str, keep: list[str], told: str) -> None:
    """It would leave out everything."""
    pytest.importorskip(language.DETECTORS[detector])
    with pytest.raises(UsageError, match=re.escape(f"{detector} has no language {told}")):
        stage_of("--keep", *keep, "--detector", detector)


@pytest.mark.parametrize("arguments", [["--keep", "en", "en:0.5"], ["--keep", "en:0.5,de", "--keep", "de:0.5"],
                                       ["--keep", "en", "--label-only"]])
def test_flags_that_contradict_each_other_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="--keep"):
        stage_of(*arguments)
