"""Small stages for the tests of the runner: functions of a module, since workers import them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.storage import staged_file
from data.webtext.documents import Document, DocumentCounts, DocumentFunction, DroppedDocument
from data.webtext.runner import GlobalStage, MapStage


@dataclass(frozen=True)
class Options:
    """What the stages below do."""

    drop: str = "drop"
    """Texts with this word go."""
    fail: str = "fail"


def make(options: Options) -> DocumentFunction:
    def shout(document: Document) -> Document | DroppedDocument:
        if options.fail in document.text:
            raise ZeroDivisionError("a library gave up")
        if options.drop in document.text:
            return DroppedDocument("asked for")
        return replace(document, text=document.text.upper())

    return shout


def reverse(inputs: Sequence[Path], output: Path, options: Options, workers: int,
            share: tuple[int, int]) -> Iterator[DocumentCounts]:
    """All documents in one shard, the last first."""
    lines = [line for path in inputs for line in path.read_bytes().splitlines(keepends=True)]
    counts = DocumentCounts()
    with staged_file(output / "part-00000.jsonl") as file:
        for line in reversed(lines):
            counts.add_kept(len(line), len(line))
            file.write(line)
    yield counts


SHOUT = MapStage("shout", make, Options())
REVERSE = GlobalStage("reverse", reverse, Options())
