"""The page: one file of HTML that loads nothing. Tables are in it as text, curves as data for page.js to draw."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from data.storage import escape_to_one_line
from megatron.report import tables
from megatron.report.charts import chart_data
from megatron.report.history import RunHistory
from megatron.report.tables import ReportTable

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the browser holds the page to: nothing is fetched, from nowhere."""


NO_SCRIPT = '<noscript><p class="note">A script draws the curves, and this browser runs none.</p></noscript>'
HEADER_BYTES = 1 << 16
"""Bytes of a page that hold its head, its style and what stands beside its title."""
AXES = """<form id="axes" aria-label="Horizontal axis">
<label><input type="radio" name="axis" value="step" checked> steps</label>
<label><input type="radio" name="axis" value="tokens"> tokens</label>
<label><input type="radio" name="axis" value="seconds"> training time</label>
</form>
"""


def report_page(histories: Sequence[RunHistory], notes: Iterable[str]) -> str:
    main = f"""{html_notes(notes)}{NO_SCRIPT}
<div id="legend"></div>
<div id="charts"></div>
{_sections(histories)}"""
    scripts = f"""<script type="application/json" id="data">{_embedded_json(chart_data(histories))}</script>
<script>
{_read_asset("page.js")}</script>
"""
    return html_document(", ".join(history.name for history in histories), main, beside_title=AXES, scripts=scripts)


def is_report_page(path: Path) -> bool:
    """One that `page` has made."""
    with open(path, "rb") as file:
        begin = file.read(HEADER_BYTES)
    return begin.startswith(
        b"<!DOCTYPE html>") and CONTENT_SECURITY_POLICY.encode() in begin and AXES.splitlines()[0].encode() in begin


def html_document(title: str, main: str, *, beside_title: str = "", scripts: str = "") -> str:
    """A page of this style; all but the title is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<meta name="color-scheme" content="light dark">
<title>{_escaped(title)}</title>
<style>
{_read_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{_escaped(title)}</h1>
{beside_title}</header>
<main>
{main}</main>
{scripts}</body>
</html>
"""


def _sections(histories: Sequence[RunHistory]) -> str:
    parts = [_section("What came of it", tables.summary_table(histories))]
    if len(histories) > 1:
        parts.append(_section("Settings that differ", tables.differences_table(histories), "None."))
    parts += [_section(f"Starts of {history.name}", tables.starts_table(history))
              for history in histories if len(history.starts) > 1]
    parts += [f"<details><summary>All settings of {_escaped(history.name)}</summary>\n"
              f"{html_table(tables.settings_table(history))}</details>\n" for history in histories if history.settings]
    return "".join(parts)


def _section(title: str, table: ReportTable, empty: str = "") -> str:
    shown = html_table(table) if table.rows else f"<p>{_escaped(empty)}</p>\n"
    return f"<section><h2>{_escaped(title)}</h2>\n{shown}</section>\n"


def html_table(table: ReportTable) -> str:
    head = "".join(f"<th scope=\"col\">{_escaped(cell)}</th>" for cell in table.head)
    rows = "".join(f"<tr><th scope=\"row\">{_escaped(first)}</th>"
                   + "".join(f"<td>{_escaped(cell)}</td>" for cell in rest) + "</tr>\n" for first, *rest in table.rows)
    return f"<div class=\"wide\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"


def html_notes(notes: Iterable[str]) -> str:
    return "".join(f"<p class=\"note\">{_escaped(note)}</p>\n" for note in notes)


def _escaped(text: str) -> str:
    return escape(escape_to_one_line(text))


def _embedded_json(value: dict[str, Any]) -> str:
    """JSON in which nothing ends the element that holds it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _read_asset(name: str) -> str:
    """A file that the page contains."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
