"""What happened to a corpus: a table for the terminal, JSON for programs, a page with plots for people.

All three say the same, from the records of the stages alone, and hold neither times nor paths: the same corpus gives
the same report.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from data.storage import one_line, staged_file, write_json_atomic
from data.webtext.counts import Counts
from data.webtext.record import Record

REPORTS = ("report.txt", "report.json", "report.html")

LABEL, BAR, ROW = 320, 360, 18
"""Of a plot, in pixels: room for the labels, length of the longest bar, height of a row."""
KEPT, DROPPED = "#2a7", "#c54"
STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
         "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
         "td:first-child,th:first-child{text-align:left}svg text{font-size:12px}")


def line(record: Record) -> str:
    """One stage in a line."""
    counts = record.counts
    dropped = ", ".join(f"{reason} {number}" for reason, number in _largest(counts))
    repaired = ", ".join(f"{reason} {number}" for reason, number in sorted(counts.repaired.items()))
    return one_line(
        f"{record.stage}: {counts.documents_in} documents ({_size(counts.bytes_in)}) in, {counts.documents_kept} "
        f"({_size(counts.bytes_kept)}) kept" + (f"; dropped: {dropped}" if dropped else "") +
        (f"; repaired: {repaired}" if repaired else "") + "".join(f"; {note}" for note in record.notes))


def write_report(folder: Path, records: Sequence[Record], corpora: Sequence[dict[str, Any]]) -> None:
    """`report.txt`, `report.json` and `report.html`."""
    write_json_atomic(folder / "report.json", {
        "stages": [{"stage": record.stage, **record.counts.to_json(), "notes": list(record.notes)}
                   for record in records], "corpora": list(corpora)})
    with staged_file(folder / "report.txt", "w") as file:
        file.write(table(records, corpora))
    with staged_file(folder / "report.html", "w") as file:
        file.write(page(records, corpora))


def table(records: Sequence[Record], corpora: Sequence[dict[str, Any]]) -> str:
    """A row for each stage, the reasons under it."""
    rows = [("stage", "in", "kept", "", "bytes kept")]
    for record in records:
        counts = record.counts
        rows.append((record.stage, f"{counts.documents_in:,}", f"{counts.documents_kept:,}",
                     _share(counts.documents_kept, counts.documents_in), _size(counts.bytes_kept)))
        rows += [(f"  {reason}", "", f"-{number:,}", _share(number, counts.documents_in),
                  f"-{_size(counts.dropped_bytes[reason])}") for reason, number in _largest(counts)]
        rows += [(f"  repaired: {reason}", "", f"{number:,}", "", "")
                 for reason, number in sorted(counts.repaired.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
             for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, *map(_of_corpus, corpora)]) + "\n"


def _of_corpus(corpus: dict[str, Any]) -> str:
    return one_line(f"{corpus['name']}: {corpus['documents']:,} documents, {corpus['tokens']:,} tokens of "
                    f"{corpus['tokenizer']}")


def page(records: Sequence[Record], corpora: Sequence[dict[str, Any]]) -> str:
    """One HTML file that needs no other."""
    first, last = records[0].counts, records[-1].counts
    bars = [(record.stage, record.counts.documents_kept, KEPT) for record in records]
    reasons = [(f"{record.stage}: {reason}", number, DROPPED)
               for record in records for reason, number in _largest(record.counts)]
    sizes = [(f"{_size(1 << power - 1)} to {_size(1 << power)}" if power else "0 B", number, KEPT)
             for power, number in sorted(last.sizes.items())]
    tokens = "".join(f"<p>{escape(_of_corpus(corpus))}</p>" for corpus in corpora)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>Web text report</title><style>{STYLE}</style>"
            f"<h1>Web text report</h1><p>{first.documents_in:,} documents in, {last.documents_kept:,} kept "
            f"({_share(last.documents_kept, first.documents_in)}).</p>{tokens}"
            f"<h2>Documents after each stage</h2>{plot([('input', first.documents_in, KEPT), *bars])}"
            f"<h2>Dropped, by reason</h2>{plot(reasons)}<h2>Size of the documents kept</h2>{plot(sizes)}"
            f"<h2>Figures</h2><pre>{escape(table(records, corpora))}</pre></html>\n")


def plot(bars: Sequence[tuple[str, int, str]]) -> str:
    """Horizontal bars (label, number, colour) as SVG."""
    most = max((number for _, number, _ in bars), default=0) or 1
    drawn = []
    for place, (label, number, colour) in enumerate(bars):
        y, length = ROW * place, BAR * number / most
        drawn.append(f'<text x="{LABEL - 6}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
                     f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{ROW - 4}" fill="{colour}"/>'
                     f'<text x="{LABEL + length + 6:.1f}" y="{y + 13}">{number:,}</text>')
    return f'<svg width="{LABEL + BAR + 100}" height="{ROW * len(bars)}">{"".join(drawn)}</svg>'


def _largest(counts: Counts) -> list[tuple[str, int]]:
    return sorted(counts.dropped.items(), key=lambda item: (-item[1], item[0]))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
