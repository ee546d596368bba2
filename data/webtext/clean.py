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
from data.webtext.documents import Document, DocumentFunction, DroppedDocument

_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029]")
_BLANK_LINES = re.compile("\n{3,}")
# What ftfy looks for: control characters, entities, mojibake (some of its signs depend on the beginning of a line).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff]")
_ENTITY = re.compile(r"&#?\w{1,24};")
ODD_BEGINNINGS = ("\nÃ ", "\nÂ ")
TYPOGRAPHY = "‘’“”–—…•\xa0"
"""Most non-ASCII characters. Mojibake never consists of these and ASCII alone."""
_NOT_ASCII = re.compile("[^\x00-\x7f]+")
WINDOW = 4
"""ftfy's mojibake patterns have at most five characters, one of them neither ASCII nor typography."""

CHARACTERS_PER_TOKEN = 8
"""English has about 4.5 characters per token: a text of `min_tokens` times this is long enough without counting."""


@dataclass(frozen=True)
class CleanOptions:
    min_tokens: int = 128
    """GPT-2 tokens."""


def make_clean(options: CleanOptions) -> DocumentFunction:
    fix_text = make_text_fixer()
    tokenizer = GPT2BPETokenizer()

    def clean(document: Document) -> Document | DroppedDocument:
        text = fix_text(document.text)
        if " \n" in text or "\t\n" in text:
            text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
        text = _BLANK_LINES.sub("\n\n", text).strip()
        if not text:
            return DroppedDocument("empty")
        if len(text) < CHARACTERS_PER_TOKEN * options.min_tokens and len(tokenizer.encode(text)) < options.min_tokens:
            return DroppedDocument("too short")
        return replace(document, text=text)

    return clean


def make_text_fixer() -> Callable[[str], str]:
    """ftfy, called only for lines that it may change: most need nothing, and a call takes milliseconds."""
    if importlib.util.find_spec("ftfy") is None:
        raise DataError("clean needs a package: pip install ftfy")
    import ftfy
    from ftfy.badness import is_bad

    config = ftfy.TextFixerConfig(uncurl_quotes=False, fix_latin_ligatures=False, fix_character_width=False,
                                  normalization=None, explain=False)

    def may_need_fixing(text: str) -> bool:
        if _CONTROL.search(text) or "&" in text and _ENTITY.search(text):
            return True
        if text.isascii():
            return False
        if any(beginning in text for beginning in ODD_BEGINNINGS):
            return True
        others = text
        for character in TYPOGRAPHY:
            others = others.replace(character, " ")
        return not others.isascii() and any(is_bad(text[max(0, run.start() - WINDOW):run.end() + WINDOW])
                                            for run in _NOT_ASCII.finditer(others))

    def fix_text(text: str) -> str:
        if any(character in text for character in "\r\u2028\u2029"):
            text = _LINE_ENDS.sub("\n", text)
        if not may_need_fixing(text):
            return text
        # In a text about markup, an entity is probably meant literally.
        choice = config._replace(unescape_html="<" not in text)
        return "\n".join(str(ftfy.fix_text(line, choice)) if may_need_fixing(line) else line
                         for line in text.split("\n"))

    return fix_text
