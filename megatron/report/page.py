"""The page: one file of HTML that loads nothing. Tables are in it as text, curves as data for page.js to draw."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from data.storage import escape_to_one_line
from megatron.report import tables
from megatron.report.charts import drawing
from megatron.report.history import History
from megatron.report.tables import Table

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the browser holds the page to: nothing is fetched, from nowhere."""


NO_SCRIPT = '<noscript><p class="note">A script draws the curves, and this browser runs none.</p></noscript>'
BEGINNING = 1 << 16
"""Bytes of a page that hold its head, its style and what stands beside its title."""
AXES = """<form id="axes" aria-label="Horizontal axis">
<label><input type="radio" name="axis" value="step" checked> steps</label>
<label><input type="radio" name="axis" value="tokens"> tokens</label>
<label><input type="radio" name="axis" value="seconds"> training time</label>
</form>
"""


def page(histories: Sequence[History], notes: Iterable[str]) -> str:
    main = f"""{html_notes(notes)}{NO_SCRIPT}
<div id="legend"></div>
<div id="charts"></div>
{_sections(histories)}"""
    scripts = f"""<script type="application/json" id="data">{_data(drawing(histories))}</script>
<script>
{_beside("page.js")}</script>
"""
    return document(", ".join(history.name for history in histories), main, beside_title=AXES, scripts=scripts)


def is_page(path: Path) -> bool:
    """One that `page` has made."""
    with open(path, "rb") as file:
        begin = file.read(BEGINNING)
    return begin.startswith(b"<!DOCTYPE html>") and POLICY.encode() in begin and AXES.splitlines()[0].encode() in begin


def document(title: str, main: str, *, beside_title: str = "", scripts: str = "") -> str:
    """A page of this style; all but the title is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}</title>
<style>
{_beside("page.css")}</style>
</head>
<body>
<header>
<h1>{_text(title)}</h1>
{beside_title}</header>
<main>
{main}</main>
{scripts}</body>
</html>
"""


def _sections(histories: Sequence[History]) -> str:
    parts = [_section("What came of it", tables.summary(histories))]
    if len(histories) > 1:
        parts.append(_section("Settings that differ", tables.differences(histories), "None."))
    parts += [_section(f"Starts of {history.name}", tables.starts(history))
              for history in histories if len(history.starts) > 1]
    parts += [f"<details><summary>All settings of {_text(history.name)}</summary>\n"
              f"{html_table(tables.configuration(history))}</details>\n" for history in histories if history.settings]
    return "".join(parts)


def _section(title: str, table: Table, empty: str = "") -> str:
    shown = html_table(table) if table.rows else f"<p>{_text(empty)}</p>\n"
    return f"<section><h2>{_text(title)}</h2>\n{shown}</section>\n"


def html_table(table: Table) -> str:
    head = "".join(f"<th scope=\"col\">{_text(cell)}</th>" for cell in table.head)
    rows = "".join(f"<tr><th scope=\"row\">{_text(first)}</th>"
                   + "".join(f"<td>{_text(cell)}</td>" for cell in rest) + "</tr>\n" for first, *rest in table.rows)
    return f"<div class=\"wide\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"


def html_notes(notes: Iterable[str]) -> str:
    return "".join(f"<p class=\"note\">{_text(note)}</p>\n" for note in notes)


def _text(text: str) -> str:
    return escape(escape_to_one_line(text))


def _data(value: dict[str, Any]) -> str:
    """JSON in which nothing ends the element that holds it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _beside(name: str) -> str:
    """A file that the page contains."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
