"""`extract`: the text of HTML pages. What is not HTML passes unchanged.

A document is HTML when its source says so (`format` in `meta`, which that of an .html file has), or when it begins like
a page. resiliparse (`pip install resiliparse`) finds the main content and leaves menus and footers out; `markup`, in
this package, keeps all visible text. The one used is a parameter of the stage, never "whichever is there".
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from data.storage import DataError
from data.webtext.document import Document, Drop, Function
from data.webtext.markup import visible_text

EXTRACTORS = ("resiliparse", "markup")
HTML = ("detect", "all", "none")
_PAGE = re.compile(r"\ufeff?\s{0,100}(<\?xml[^>]{0,200}>\s{0,100})?<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ExtractOptions:
    """Flags of the command line."""

    extractor: str = "markup"
    html: str = HTML[0]
    """Which documents are HTML."""


def choose(wanted: str) -> str:
    """The extractor that `auto` means here."""
    installed = importlib.util.find_spec("resiliparse") is not None
    if wanted == "resiliparse" and not installed:
        raise DataError("--extractor resiliparse needs a package: pip install resiliparse")
    return wanted if wanted != "auto" else EXTRACTORS[0] if installed else EXTRACTORS[1]


def make(options: ExtractOptions) -> Function:
    text_of = _resiliparse() if choose(options.extractor) == "resiliparse" else visible_text

    def extract(document: Document) -> Document | Drop:
        if options.html == "none" or options.html == "detect" and not is_page(document):
            return document
        text = text_of(document.text.removeprefix("\ufeff")).strip()
        meta = {name: value for name, value in document.meta.items() if name != "format"}  # it is text now
        return replace(document, text=text, meta=meta) if text else Drop("no text in the page")

    return extract


def is_page(document: Document) -> bool:
    return document.meta.get("format") == "html" or _PAGE.match(document.text) is not None


def _resiliparse() -> Callable[[str], str]:
    from resiliparse.extract.html2text import extract_plain_text

    return lambda page: str(extract_plain_text(page, main_content=True, alt_texts=False))
