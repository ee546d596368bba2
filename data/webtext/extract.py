"""HTML pages: their character set, and `extract`, their text. Both as browsers do.

The encoding of a page is, in order: byte order mark; `--charset`; the first `<meta>` of the first 1,024 bytes or of the
head, or `<?xml encoding>`; UTF-8 if valid; else windows-1252. webencodings knows the labels, and Python decodes.
Malformed bytes, and characters that Python's decoder lacks, become U+FFFD and are counted. A `DocumentError` is raised
for pages that are not text, use a charset that no browser reads, or name none and look like none.

A document is HTML if its source says so (`format` in `meta`, set for .html files), or if it begins like a page; others
pass `extract` unchanged. resiliparse parses it into a browser's tree and writes its text in paragraphs; lists of CSS
selectors say what to drop. resiliparse's own main-content rules are not used: based on link density and depth, they
drop lists, tables and paragraphs of manuals.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from html import escape
from itertools import chain

from webencodings import Encoding, lookup

from data.parallel import call_within
from data.storage import DataError
from data.webtext.documents import Document, DocumentError, DocumentFunction, DroppedDocument

REPLACEMENT = "\ufffd"
# Bytes at the start of a page that are searched for any `<meta>`, and for one in the head.
PRESCAN_BYTES, HEAD_BYTES = 1024, 1 << 15
BYTE_ORDER_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xfe\xff", "utf-16be"), (b"\xff\xfe", "utf-16le"))
# UTF-16 without a mark; no other page begins like this.
UTF16_STARTS = ((b"<\0", "utf-16le"), (b"\0<", "utf-16be"))
UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
_XML = re.compile(rb"<\?xml[^>]*?encoding[\0-\x20]*=[\0-\x20]*([\"'])([^\"'\0-\x20>]*)\1")
_IN_CONTENT = re.compile("charset\\s*=\\s*(?:\"([^\"]*)\"|'([^']*)'|([^\\s;\"'][^\\s;]*))", re.IGNORECASE)
# A label that was read as ASCII cannot mean these.
MEANT_BY_META = {"utf-16le": "utf-8", "utf-16be": "utf-8", "x-user-defined": "windows-1252"}

# Encodings of the standard that are larger than Python's codec of the name.
PYTHON_CODECS = {"gbk": "gb18030", "iso-2022-jp": "iso2022_jp_ext"}
NO_CHARSET, NOT_TEXT, REFUSED_CHARSET = "no character set", "not text", "refused character set"
SNIFFED_BYTES = 1445  # bytes searched for binary data, as in browsers' MIME sniffing
_BINARY = re.compile(b"[\0-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_RUNS = re.compile(b"[\x80-\xff]+")
_BEYOND_ASCII = re.compile("[^\0-\x7f\ufffd]")
MAX_WESTERN_RUN = 2  # average length of runs of non-ASCII bytes, at most, in languages that use windows-1252


def decode_page(page: bytes, charset: str | None, repair: bool) -> tuple[str, tuple[str, ...]]:
    """(text, repairs). `charset` comes from the server. A page without declaration is UTF-8 if most of it is valid,
    else windows-1252 if plausible or with `repair`."""
    if page.startswith(UTF32):
        raise DocumentError(REFUSED_CHARSET, "begins like UTF-32, which no browser reads; convert it to UTF-8 (iconv)")
    mark, named = next((bom for bom in BYTE_ORDER_MARKS if page.startswith(bom[0])), (b"", charset))
    if encoding := lookup(named) if named else declared_encoding(page):
        if encoding.name == "replacement":
            raise DocumentError(REFUSED_CHARSET, "its character set is one that no browser reads (HZ, ISO-2022-CN or "
                                "ISO-2022-KR); convert it to UTF-8 (iconv), or say what it is in truth (--charset)")
        text, malformed = decode_as(page.removeprefix(mark), encoding)
        return text, ("not UTF-8" if encoding.name == "utf-8" else f"not {encoding.name}",) if malformed else ()
    text, malformed = decode_as(page, lookup("utf-8"))
    if not malformed:
        return text, ()
    if binary := _BINARY.search(page[:SNIFFED_BYTES]):
        raise DocumentError(NOT_TEXT, f"expected a page, found byte 0x{binary[0][0]:02x} at {binary.start()}: not text")
    if text.count(REPLACEMENT) <= len(_BEYOND_ASCII.findall(text)):  # damaged, or truncated within a character
        return text, ("not UTF-8",)
    runs = _RUNS.findall(page)
    if not repair and sum(map(len, runs)) > MAX_WESTERN_RUN * len(runs):
        raise DocumentError(NO_CHARSET, "names no character set that browsers know, is not UTF-8, and does not look "
                            "like windows-1252; say what it is (--charset), or leave it out (--on-error skip)")
    return decode_as(page, lookup("windows-1252"))[0], (NO_CHARSET,)


def declared_encoding(page: bytes) -> Encoding | None:
    """The encoding that a page without a mark declares; None if it declares none we know."""
    for start, name in UTF16_STARTS:
        if page.startswith(start):
            return lookup(name)
    xml = _XML.match(page[:PRESCAN_BYTES])
    # All labels in the order in which browsers try them:
    for label in chain(_meta_labels(page[:PRESCAN_BYTES], "meta"), [xml[2].decode("latin-1")] if xml else [],
                       _meta_labels(page[:HEAD_BYTES], "head meta")):
        if encoding := lookup(label):
            return lookup(MEANT_BY_META.get(encoding.name, encoding.name))
    return None


def _meta_labels(page: bytes, selector: str) -> Iterator[str]:
    try:
        from resiliparse.parse.html import HTMLTree
    except ImportError as error:
        raise DataError("reading HTML needs a package: pip install resiliparse") from error

    document = HTMLTree.parse(page.decode("latin-1")).document
    for meta in document.query_selector_all(selector) if document else ():
        label = meta.getattr("charset")
        if label is None and (meta.getattr("http-equiv") or "").lower() == "content-type":
            content = _IN_CONTENT.search(meta.getattr("content") or "")
            label = content and next(filter(None, content.groups()), None)
        if label:
            yield label


def decode_as(raw: bytes, encoding: Encoding) -> tuple[str, bool]:
    """(text, whether some of it was malformed)."""
    name = encoding.name
    decode = (codecs.lookup(PYTHON_CODECS[name]) if name in PYTHON_CODECS else encoding.codec_info).decode
    try:
        return str(decode(raw, "strict")[0]), False
    except UnicodeDecodeError:
        return str(decode(raw, "replace")[0]), True


# Both parse like a browser. The first also drops elements whose class or role marks boilerplate.
EXTRACTORS = ("resiliparse", "markup")
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
# Pages within these limits take at most 3 s and 500 MB. The parser's time and memory can be quadratic.
_TAGS, _CHARACTERS = 2000, 100_000
# Limits of a larger page, in its own process, and again for each 5 MB. A usual page takes 0.1 s per MB.
_SECONDS, _MEMORY = 5, 1_000_000_000


def make_extract(extractor: str = EXTRACTORS[0], html: str = HTML_CHOICES[0]) -> DocumentFunction:
    """`html` says which documents are treated as HTML."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLParserException, HTMLTree
    except ImportError as error:
        raise DataError("extract needs a package: pip install resiliparse") from error

    names = _NAVIGATION + _BOILERPLATE if extractor == "resiliparse" else _NAVIGATION
    around = f":is({', '.join(names)}):not({_MAIN_CONTENT})"

    def page_text(page: str) -> str:
        # As HTML, of elements that the library supports.
        if page.lstrip().startswith("<?xml"):
            first, *rest = page.split("<![CDATA[")
            sections = (part.partition("]]>") for part in rest)
            page = first + "".join(escape(inside) + after for inside, _, after in sections)
            page = _XML_EMPTY.sub(r"<\1\2></\1>", page)
        tree = HTMLTree.parse(_RENAME.sub(lambda tag: tag[1] + _RENAMED[tag[2].lower()], page))
        # If nothing is left, the whole page is in an element like <nav>, or shown by a script. In forms, only labels
        # are text.
        texts = (str(extract_plain_text(tree, alt_texts=False, form_fields=True, skip_elements=(*_NO_TEXT, *left_out)))
                 for left_out in ((*_HIDDEN, around), _HIDDEN, ()))
        return next(filter(str.strip, texts), "").strip()

    def extract(document: Document) -> Document | DroppedDocument:
        is_html = html == "all" or html == "detect" and (
            document.meta.get("format") == "html" or _PAGE.match(document.text))
        if not is_html:
            return document
        page = document.text.removeprefix("\ufeff")
        text: str | None = None
        if page.count("<") <= _TAGS and len(page) <= _CHARACTERS:
            text = page_text(page)
        else:
            times = 1 + len(page) / 5_000_000
            with suppress(MemoryError, HTMLParserException):  # raised when the memory limit is reached
                text = call_within(page_text, page, times * _SECONDS, int(times * _MEMORY))
        if text is None:
            return DroppedDocument("too complex to parse")
        meta = {name: value for name, value in document.meta.items() if name != "format"}  # the result is text
        return replace(document, text=text, meta=meta) if text else DroppedDocument("no text in the page")

    return extract
