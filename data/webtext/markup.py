"""All visible text of an HTML page, without a parser: tags go, blocks end lines, entities become characters.

Works on anything, in time linear in its length: a tag that is not closed, for instance, is text. Scripts, styles and
what a browser shows around a page (`nav`, `header`, `footer`, `aside`, forms) are left out.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

# No part of a tag may hold a "<": so every attempt ends at the next one, and all of them together read the page once.
_MARK = re.compile(r"""<!--|<(/?)([a-zA-Z][a-zA-Z0-9-]*)(?:[^<>"']++|"[^"<]*"|'[^'<]*')*+>|<[!?][^<>]*+>""")
_SPACES = re.compile(r"[ \t\r\n\f]+")
_BLANK_LINES = re.compile(r"\n{3,}")

RAW = frozenset("script style noscript template svg math iframe object textarea select".split())
"""Everything up to the end tag is not text of the page."""
AROUND = frozenset("nav header footer aside form button head".split())
"""Left out with all that is inside, tags of the same name counted."""
CONTENT = frozenset("body main article".split())
LINES = frozenset("br li tr dt dd option figcaption caption".split())
PARAGRAPHS = frozenset("p div section article main body h1 h2 h3 h4 h5 h6 ul ol dl table pre blockquote hr figure "
                       "details summary address fieldset".split())
CELLS = ("td", "th")


def visible_text(page: str) -> str:
    """Lines of text, a blank one between paragraphs."""
    text = html.unescape("".join(_pieces(page)))
    return _BLANK_LINES.sub("\n\n", "\n".join(line.rstrip(" \t") for line in text.split("\n"))).strip()


def _pieces(page: str) -> Iterator[str]:
    at, around, depth, pre, fresh = 0, "", 0, 0, True
    while mark := _MARK.search(page, at):
        if not around and (text := _text(page[at:mark.start()], pre, fresh)):
            fresh = False
            yield text
        at, name, ends = mark.end(), (mark[2] or "").lower(), mark[1] == "/"
        if mark[0] == "<!--":
            at = _after(page, "-->", at)
        elif name in RAW and not ends:
            at = _after_end(page, name, at)
        elif around:  # left out, with the elements of this name in it; or its end was left to the browser
            depth = 0 if name in CONTENT and not ends else depth + (name == around) * (-1 if ends else 1)
            around = around if depth else ""
        elif name in AROUND and not ends:
            around, depth = name, 1
        elif name == "pre":
            pre = max(0, pre - 1) if ends else pre + 1
        if not around and (gap := _gap(name)):
            fresh = fresh or gap != " "
            yield gap
    if not around:
        yield _text(page[at:], pre, fresh)


def _gap(name: str) -> str:
    """What a tag puts between the texts around it."""
    return "\n\n" if name in PARAGRAPHS else "\n" if name in LINES else " " if name in CELLS else ""


def _text(part: str, pre: int, fresh: bool) -> str:
    """The text between two tags; `fresh`: it begins a line."""
    if pre:
        return part
    text = _SPACES.sub(" ", part)
    return text.lstrip(" ") if fresh else text


def _after(page: str, end: str, at: int) -> int:
    """The place after `end`, or the end of the page."""
    found = page.find(end, at)
    return len(page) if found < 0 else found + len(end)


def _after_end(page: str, name: str, at: int) -> int:
    found = re.compile(f"</{name}[^<>]*>", re.IGNORECASE).search(page, at)
    return found.end() if found else len(page)
