"""The report of a corpus: a table for the terminal, and JSON with samples of the texts.

Both come from the stage records only, without times or paths: the same corpus gives the same report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.storage import escape_to_one_line, staged_file, write_json_atomic
from data.webtext.documents import DocumentCounts
from data.webtext.runner import StageRecord

REPORTS = ("report.txt", "report.json")


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
