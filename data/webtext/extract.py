"""`extract`: the text of HTML pages. Other documents pass unchanged.

A document is HTML if its source says so (`format` in `meta`, set for .html files), or if it begins like a page.
resiliparse parses it into a browser's tree and writes its text in paragraphs; lists of CSS selectors say what to drop.
resiliparse's own main-content rules are not used: based on link density and depth, they drop lists, tables and
paragraphs of manuals.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from data.parallel import call_within
from data.storage import DataError
from data.webtext.documents import Document, DocumentFunction, DroppedDocument

EXTRACTORS = ("resiliparse", "markup")
"""Both parse like a browser. The first also drops elements whose class or role marks boilerplate."""
HTML_CHOICES = ("detect", "all", "none")
_PAGE = re.compile(r"\ufeff?(?:\s++|<!--(?:-?>|.*?--!?>)|<\?xml[^>]*+>)*+"
                   r"<(!doctype\s+html|html|head|body|title|meta|link|style|script|base)\b", re.IGNORECASE | re.DOTALL)

# Tags that the library renders unlike a browser -> a tag with the same parsing rules ("div dialog": see _HIDDEN).
_RENAMED = {"noscript": "noembed", "menu": "ul", "dir": "ul", "listing": "pre", "dialog": "div dialog",
            **dict.fromkeys(("figure", "figcaption", "summary", "legend", "search"), "div")}
_RENAME = re.compile(rf"(</?)({'|'.join(_RENAMED)})(?=[\s/>])", re.IGNORECASE)
_XML_EMPTY = re.compile(r"""<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)
                            ([a-z][\w.:-]*+) ((?:[^<>"'/]|"[^"<]*"|'[^'<]*')*+) />""", re.IGNORECASE | re.VERBOSE)

_NO_TEXT = tuple("title noembed noframes canvas object svg annotation annotation-xml button select datalist textarea "
                 "input".split())
_HIDDEN = ("[hidden]", "[dialog]:not([open])",
           *(f'[style*="{style}" i]' for style in ("display:none", "display: none", "visibility:hidden",
                                                   "visibility: hidden")))
_NAVIGATION = ("nav", "header", "footer", "aside:not([class*=footnote]):not([role*=note])")
_BOILERPLATE = (
    *(f"[role={role}]" for role in "navigation banner contentinfo complementary search menu menubar toolbar".split()),
    *(f"[class~={name}]" for name in """nav navbar navigation navheader navfooter menu breadcrumb breadcrumbs pagination
        pager related sidebar sphinxsidebar footer site-footer page-footer site-header masthead headerlink skip-link
        cookie cookies cookie-banner cookie-consent cookie-notice consent newsletter social share sharing ad ads advert
        advertisement sponsored banner popup modal""".split()),
    "#footer", "#sidebar", "#nav", "#navbar", "#navigation", "#breadcrumbs")
_MAIN_CONTENT = "body, :has(main, article, [role=main]), main header, article header"
_TAGS, _CHARACTERS = 2000, 100_000
"""Pages within these limits take at most 3 s and 500 MB. The parser's time and memory can be quadratic."""
_SECONDS, _MEMORY = 5, 1_000_000_000
"""Limits of a larger page, in its own process, and again for each 5 MB. A usual page takes 0.1 s per MB."""


@dataclass(frozen=True)
class ExtractOptions:
    extractor: str = EXTRACTORS[0]
    html: str = HTML_CHOICES[0]
    """Which documents are treated as HTML."""


def make_extract(options: ExtractOptions) -> DocumentFunction:
    text_of = make_page_text(drops_boilerplate=options.extractor == "resiliparse")

    def extract(document: Document) -> Document | DroppedDocument:
        is_html = options.html == "all" or options.html == "detect" and (
            document.meta.get("format") == "html" or _PAGE.match(document.text))
        if not is_html:
            return document
        text = text_of(document.text.removeprefix("\ufeff"))
        if text is None:
            return DroppedDocument("too complex to parse")
        meta = {name: value for name, value in document.meta.items() if name != "format"}  # the result is text
        return replace(document, text=text, meta=meta) if text else DroppedDocument("no text in the page")

    return extract


def make_page_text(drops_boilerplate: bool) -> Callable[[str], str | None]:
    """A function page -> text; None if parsing takes too much time or memory."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLParserException, HTMLTree
    except ImportError as error:
        raise DataError("extract needs a package: pip install resiliparse") from error

    names = _NAVIGATION + _BOILERPLATE if drops_boilerplate else _NAVIGATION
    around = f":is({', '.join(names)}):not({_MAIN_CONTENT})"

    def text_of(tree: HTMLTree, *left_out: str) -> str:
        # In forms, only labels are text.
        return str(extract_plain_text(tree, alt_texts=False, form_fields=True, skip_elements=(*_NO_TEXT, *left_out)))

    def text(page: str) -> str:
        # As HTML, of elements that the library supports.
        if page.lstrip().startswith("<?xml"):
            first, *rest = page.split("<![CDATA[")
            sections = (part.partition("]]>") for part in rest)
            page = first + "".join(html.escape(inside) + after for inside, _, after in sections)
            page = _XML_EMPTY.sub(r"<\1\2></\1>", page)
        tree = HTMLTree.parse(_RENAME.sub(lambda tag: tag[1] + _RENAMED[tag[2].lower()], page))
        # If nothing is left, the whole page is in an element like <nav>, or shown by a script.
        texts = (text_of(tree, *left_out) for left_out in ((*_HIDDEN, around), _HIDDEN, ()))
        return next(filter(str.strip, texts), "").strip()

    def text_within(page: str) -> str | None:
        if page.count("<") <= _TAGS and len(page) <= _CHARACTERS:
            return text(page)
        times = 1 + len(page) / 5_000_000
        try:
            return call_within(text, page, times * _SECONDS, int(times * _MEMORY))
        except (MemoryError, HTMLParserException):  # raised when the memory limit is reached
            return None

    return text_within
