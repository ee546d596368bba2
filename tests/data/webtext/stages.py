"""Small stages for the tests of the runner: functions of a module, since workers import them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data.storage import DataError, staged_file
from data.webtext.documents import Document, DocumentCounts, DocumentFunction, DroppedDocument
from data.webtext.engines import Engine
from data.webtext.runner import GlobalStage, MapStage


def make(drop: str = "drop", fail: str = "fail") -> DocumentFunction:
    def shout(document: Document) -> Document | DroppedDocument:
        if fail in document.text:
            raise ZeroDivisionError("a library gave up")
        if drop in document.text:
            return DroppedDocument("asked for")
        return replace(document, text=document.text.upper())

    return shout


def reverse(inputs: Sequence[Path], output: Path, engine: Engine) -> Iterator[DocumentCounts]:
    """All documents in one shard, the last first."""
    lines = [line for path in inputs for line in path.read_bytes().splitlines(keepends=True)]
    counts = DocumentCounts()
    with staged_file(output / "part-00000.jsonl") as file:
        for line in reversed(lines):
            counts.add_kept(len(line), line)
            file.write(line)
    yield counts


SHOUT = MapStage("shout", make, {})
REVERSE = GlobalStage("reverse", reverse, {})


def square_once(task: tuple[int, Path], killed: int = -1, refused: int = -1) -> int:
    """The square of a number. Leaves a file for each call; dies at `killed` if that is its first call."""
    number, folder = task
    calls = len([*folder.glob(f"{number}.*")])
    (folder / f"{number}.{calls}").touch()
    if number == killed and not calls:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == refused and not calls:
        raise DataError(f"item {number} is refused")
    return number * number
