"""A metrics file -> its records, one JSON object a line, whatever state the file was left in.

A line that a kill has cut is told and left out, and so are the zeros that a power cut can leave; a record that a later
start wrote behind them, on the same line, is found. Not here: what records mean (history.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.storage import DataError

Record = dict[str, Any]

LONGEST = 1 << 20
"""Bytes of a line; the configuration of a run has about 5,000."""
BEGINNING = 5
"""Lines in which a metrics file shows itself as one."""
KNOWN = ("config", "iteration", "save")
"""Every record of a trainer has one of these keys."""

_OBJECT = re.compile(rb'\{"')


class MetricsLines:
    """The records of a file in order, read as they are asked for; what is said of lines is of those read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = 0
        self.damaged = 0
        """Lines that are not one object, and nothing else."""
        self.is_cut = False
        """The last one, which is being written, or was when the run was killed."""

    def __iter__(self) -> Iterator[Record]:
        try:
            with open(self._path, "rb") as file:
                while line := file.readline(LONGEST):
                    if (record := self._record(line)) is not None:
                        self.records += 1
                        yield record
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        if self.damaged and not self.records:
            raise DataError(f"{self._path} is no metrics file: no line of it is a record of a run")

    def _record(self, line: bytes) -> Record | None:
        record = _parsed(line)
        if record is None and line.strip():
            if not line.endswith(b"\n"):
                self.is_cut = True
                return None
            self.damaged += 1
            return _last_of(line)
        return record


def _parsed(text: bytes) -> Record | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and any(key in found for key in KNOWN) else None


def _last_of(line: bytes) -> Record | None:
    """The record at the end of a line that begins with the remains of another, or with zeros."""
    for start in _OBJECT.finditer(line):
        if (record := _parsed(line[start.start():])) is not None:
            return record
    return None


def begins_like_metrics(path: Path) -> bool:
    with open(path, "rb") as file:
        return any(_parsed(file.readline(LONGEST)) for _ in range(BEGINNING))
