"""`clean`: repaired text, one kind of white space, nothing too short.

ftfy mends what went wrong between encodings, HTML entities and control characters. What is merely unusual stays: curly
quotes, ligatures, wide letters, any normal form. A text with nothing wrong comes out as it went in, to the byte.

White space: lines end in "\\n", without spaces or tabs before it; no more than one blank line in a row; none at the
start and the end of the text.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from data.gpt2_bpe import GPT2BPETokenizer
from data.storage import DataError
from data.webtext.document import Document, Drop, Function

_SUSPECT = re.compile("[^\t\n -~]|&")
"""What ftfy could want to change; a text without it is passed by."""
_BLANK_LINES = re.compile("\n{3,}")

LONG_TOKENS = 8
"""Characters; English has about 4.5 a token. A text of `min_tokens` times as many is long enough without counting."""


@dataclass(frozen=True)
class CleanOptions:
    """Flags of the command line."""

    min_tokens: int = 128
    """GPT-2 tokens."""


def make(options: CleanOptions) -> Function:
    mend = _mender()
    tokenizer = GPT2BPETokenizer()

    def clean(document: Document) -> Document | Drop:
        text = document.text
        if _SUSPECT.search(text):
            text = mend(text)
        text = tidy(text)
        if not text:
            return Drop("empty")
        if len(text) < LONG_TOKENS * options.min_tokens and len(tokenizer.encode(text)) < options.min_tokens:
            return Drop("too short")
        return replace(document, text=text)

    return clean


def tidy(text: str) -> str:
    """White space as the module says. Linear in the text, whatever it holds."""
    if " \n" in text or "\t\n" in text:
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", text).strip()


def _mender() -> Callable[[str], str]:
    if importlib.util.find_spec("ftfy") is None:
        raise DataError("clean needs a package: pip install ftfy")
    import ftfy

    config = ftfy.TextFixerConfig(uncurl_quotes=False, fix_latin_ligatures=False, fix_character_width=False,
                                  normalization=None, explain=False)

    def mend(text: str) -> str:
        return str(ftfy.fix_text(text, config))

    return mend
