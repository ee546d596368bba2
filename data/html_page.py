"""HTML pages of the commands: each is one file that loads nothing, with the stylesheet that all share (page.css)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from data.storage import escape_to_one_line

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def style_sheet() -> str:
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def html_document(title: str, notes: Iterable[str], sections: Iterable[str]) -> str:
    """A page; `sections` are HTML."""
    name, shown = escape_html(title), "".join(f"<p class=\"note\">{escape_html(note)}</p>\n" for note in notes)
    return (f"<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n<title>{name}</title>\n"
            f"<style>\n{style_sheet()}</style>\n</head>\n<body>\n<header><h1>{name}</h1></header>\n"
            f"<main>\n{shown}{''.join(sections)}</main>\n</body>\n</html>\n")


def html_section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_folded: bool = False) -> str:
    """A title and a table; the first cell of a row is its header."""
    columns = "".join(f"<th scope=\"col\">{escape_html(cell)}</th>" for cell in head)
    body = "".join(f"<tr><th scope=\"row\">{escape_html(first)}</th>"
                   + "".join(f"<td>{escape_html(cell)}</td>" for cell in rest) + "</tr>\n" for first, *rest in rows)
    table = "<p>None.</p>" if not rows else (
        f"<div class=\"wide\"><table>\n<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>")
    outer, heading = ("details", "summary") if is_folded else ("section", "h2")
    return f"<{outer}><{heading}>{escape_html(title)}</{heading}>\n{table}\n</{outer}>\n"


def escape_html(text: str) -> str:
    """Any text as one line of HTML."""
    return escape(escape_to_one_line(text))
