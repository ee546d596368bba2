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

MAX_LINE_BYTES = 1 << 20
"""Bytes of a line; the configuration of a run has about 5,000."""
PROBED_LINES = 5
"""Lines in which a metrics file shows itself as one."""
RECORD_KEYS = ("config", "iteration", "save")
"""Every record of a trainer has one of these keys."""

_OBJECT = re.compile(rb'\{"')


class MetricsFileReader:
    """The records of a file in order, read as they are asked for; what is said of lines is of those read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_records = 0
        self.num_damaged_lines = 0
        """Lines that are not one object, and nothing else."""
        self.last_line_is_incomplete = False
        """The last one, which is being written, or was when the run was killed."""

    def __iter__(self) -> Iterator[Record]:
        try:
            with open(self._path, "rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    if (record := self._record(line)) is not None:
                        self.num_records += 1
                        yield record
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        if self.num_damaged_lines and not self.num_records:
            raise DataError(f"{self._path} is no metrics file: no line of it is a record of a run")

    def _record(self, line: bytes) -> Record | None:
        record = _parse_record(line)
        if record is None and line.strip():
            if not line.endswith(b"\n"):
                self.last_line_is_incomplete = True
                return None
            self.num_damaged_lines += 1
            return _last_record_in(line)
        return record


def _parse_record(text: bytes) -> Record | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and any(key in found for key in RECORD_KEYS) else None


def _last_record_in(line: bytes) -> Record | None:
    """The record at the end of a line that begins with the remains of another, or with zeros."""
    for start in _OBJECT.finditer(line):
        if (record := _parse_record(line[start.start():])) is not None:
            return record
    return None


def looks_like_metrics(path: Path) -> bool:
    with open(path, "rb") as file:
        return any(_parse_record(file.readline(MAX_LINE_BYTES)) for _ in range(PROBED_LINES))
