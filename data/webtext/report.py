"""The report of a corpus: a table for the terminal, JSON for programs, a page with plots.

All three have the same content, from the stage records only, without times or paths: the same corpus gives the same
report.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from data.storage import escape_to_one_line, staged_file, write_json_atomic
from data.webtext.documents import DocumentCounts
from data.webtext.runner import StageRecord

REPORTS = ("report.txt", "report.json", "report.html")

LABEL_WIDTH, BAR_WIDTH, ROW_HEIGHT = 320, 360, 18  # sizes of a plot in pixels
KEPT_COLOUR, DROPPED_COLOUR = "#2a7", "#c54"
STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
         "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
         "td:first-child,th:first-child{text-align:left}svg text{font-size:12px}")


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
    """A self-contained HTML file."""
    first, last = records[0].counts, records[-1].counts
    bars = [(record.stage, record.counts.documents_kept, KEPT_COLOUR) for record in records]
    reasons = [(f"{record.stage}: {reason}", number, DROPPED_COLOUR)
               for record in records for reason, number in _drops_by_count(record.counts)]
    sizes = [(f"{_format_bytes(1 << power - 1)} to {_format_bytes(1 << power)}" if power else "0 B", number,
              KEPT_COLOUR) for power, number in sorted(last.sizes.items())]
    tokens = "".join(f"<p>{escape(_corpus_line(corpus))}</p>" for corpus in corpora)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>Web text report</title><style>{STYLE}</style>"
            f"<h1>Web text report</h1><p>{first.documents_in:,} documents in, {last.documents_kept:,} kept "
            f"({_percentage(last.documents_kept, first.documents_in)}).</p>{tokens}"
            f"<h2>Documents after each stage</h2>{svg_bars([('input', first.documents_in, KEPT_COLOUR), *bars])}"
            f"<h2>Dropped, by reason</h2>{svg_bars(reasons)}<h2>Size of the documents kept</h2>{svg_bars(sizes)}"
            f"<h2>Figures</h2><pre>{escape(text_table(records, corpora))}</pre></html>\n")


def svg_bars(bars: Sequence[tuple[str, int, str]]) -> str:
    """Horizontal bars (label, number, colour) as SVG."""
    most = max((number for _, number, _ in bars), default=0) or 1
    drawn = []
    for place, (label, number, colour) in enumerate(bars):
        y, length = ROW_HEIGHT * place, BAR_WIDTH * number / most
        drawn.append(f'<text x="{LABEL_WIDTH - 6}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
                     f'<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{ROW_HEIGHT - 4}" fill="{colour}"/>'
                     f'<text x="{LABEL_WIDTH + length + 6:.1f}" y="{y + 13}">{number:,}</text>')
    return f'<svg width="{LABEL_WIDTH + BAR_WIDTH + 100}" height="{ROW_HEIGHT * len(bars)}">{"".join(drawn)}</svg>'


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
