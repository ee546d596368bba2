"""The report of a corpus: a table for the terminal, JSON for programs, a page with bars and samples of the texts.

All three come from the stage records only, without times or paths: the same corpus gives the same report.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from data.html_page import escape_html, html_document
from data.storage import escape_to_one_line, staged_file, write_json_atomic
from data.webtext.documents import KEPT, DocumentCounts
from data.webtext.runner import StageRecord

REPORTS = ("report.txt", "report.json", "report.html")


def summary_line(record: StageRecord) -> str:
    counts = record.counts
    dropped = ", ".join(f"{reason} {number}" for reason, number in _drops_by_count(counts))
    repaired = ", ".join(f"{reason} {number}" for reason, number in sorted(counts.repaired.items()))
    parts = [f"{record.stage}: {counts.documents_in} documents ({_format_bytes(counts.bytes_in)}) in, "
             f"{counts.documents_kept} ({_format_bytes(counts.bytes_kept)}) kept",
             *([f"dropped: {dropped}"] if dropped else []), *([f"repaired: {repaired}"] if repaired else []),
             *record.notes]
    return escape_to_one_line("; ".join(parts))


def write_report(folder: Path, records: Sequence[StageRecord], corpora: Sequence[dict[str, Any]]) -> None:
    write_json_atomic(folder / "report.json", {
        "stages": [{"stage": record.stage, **record.counts.to_json(), "notes": list(record.notes)}
                   for record in records], "corpora": list(corpora)})
    with staged_file(folder / "report.txt", "w") as file:
        file.write(text_table(records, corpora))
    with staged_file(folder / "report.html", "w") as file:
        file.write(html_page(records, corpora))


def text_table(records: Sequence[StageRecord], corpora: Sequence[dict[str, Any]]) -> str:
    """A row per stage, with its reasons below."""
    rows = [("stage", "in", "kept", "", "bytes kept")]
    for record in records:
        counts = record.counts
        rows.append((record.stage, f"{counts.documents_in:,}", f"{counts.documents_kept:,}",
                     _percentage(counts.documents_kept, counts.documents_in), _format_bytes(counts.bytes_kept)))
        rows += [(f"  {reason}", "", f"-{number:,}", _percentage(number, counts.documents_in),
                  f"-{_format_bytes(counts.dropped_bytes[reason])}") for reason, number in _drops_by_count(counts)]
        rows += [(f"  repaired: {reason}", "", f"{number:,}", "", "")
                 for reason, number in sorted(counts.repaired.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
             for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, *map(_corpus_line, corpora)]) + "\n"


def _corpus_line(corpus: dict[str, Any]) -> str:
    return escape_to_one_line(f"{corpus['name']}: {corpus['documents']:,} documents, {corpus['tokens']:,} tokens of "
                              f"{corpus['tokenizer']}")


def html_page(records: Sequence[StageRecord], corpora: Sequence[dict[str, Any]]) -> str:
    first, last = records[0].counts, records[-1].counts
    stages = [("input", first.documents_in), *((record.stage, record.counts.documents_kept) for record in records)]
    drops = [(record, reason, number) for record in records for reason, number in _drops_by_count(record.counts)]
    sizes = [(f"{_format_bytes(1 << power - 1)} to {_format_bytes(1 << power)}" if power else "0 B", number)
             for power, number in sorted(last.sizes.items())]
    summary = [f"{first.documents_in:,} documents in, {last.documents_kept:,} kept "
               f"({_percentage(last.documents_kept, first.documents_in)}).", *map(_corpus_line, corpora)]
    samples = [("Kept", last.samples.get(KEPT, {})),
               *((f"Dropped: {record.stage}, {reason}", record.counts.samples.get(reason, {}))
                 for record, reason, _ in drops)]
    return html_document("Web text report", (), [
        *(f"<p>{escape_html(line)}</p>\n" for line in summary),
        _html_bars("Documents after each stage", stages),
        _html_bars("Dropped, by reason", [(f"{record.stage}: {reason}", number) for record, reason, number in drops],
                   "dropped"),
        _html_bars("Size of the documents kept", sizes),
        "<section><h2>Samples</h2>\n<p class=\"hint\">The beginnings of a few random texts: kept ones, and dropped "
        "ones by reason.</p>\n",
        *(f"<h3>{escape_html(title)}</h3>\n"
          + "".join(f"<blockquote>{escape_html(text)}</blockquote>\n" for text in texts.values())
          for title, texts in samples), "</section>\n",
        f"<section><h2>Figures</h2>\n<pre>{escape(text_table(records, corpora))}</pre></section>\n"])


def _html_bars(title: str, bars: Sequence[tuple[str, int]], kind: str = KEPT) -> str:
    """Horizontal bars: (label, number)."""
    most = max((number for _, number in bars), default=0) or 1
    shown = "".join(f"<span>{escape_html(label)}</span><span><i class=\"{kind}\" "
                    f"style=\"width:{70 * number / most:.1f}%\"></i>{number:,}</span>\n" for label, number in bars)
    return f"<section><h2>{title}</h2>\n<div class=\"bars\">\n{shown}</div></section>\n"


def _drops_by_count(counts: DocumentCounts) -> list[tuple[str, int]]:
    return sorted(counts.dropped.items(), key=lambda item: (-item[1], item[0]))


def _percentage(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
