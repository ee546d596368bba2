"""Reads the records of a metrics file (--metrics-file), as the trainer's JsonlSink (sinks.py) writes them. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.storage import DataError

Record = dict[str, Any]

RECORD_KEYS = ("config", "iteration", "save")  # every record of a trainer has one of these keys
MAX_LINE_BYTES = 1 << 20  # the configuration of a run has about 5,000
PROBED_LINES = 5  # a metrics file has a record within these lines


class MetricsFileReader:
    """The records of a file in order, read lazily; the counters cover the lines read so far. Incomplete lines and zeros
    left by a crash are skipped and counted; a record behind them on the same line counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_records = 0
        self.num_damaged_lines = 0  # lines that are not exactly one record
        # The last line is being written, or the run was killed while writing it.
        self.last_line_is_incomplete = False

    def __iter__(self) -> Iterator[Record]:
        try:
            with open(self._path, "rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    record = _parse_record(line)
                    if record is None and line.strip():
                        if not line.endswith(b"\n"):
                            self.last_line_is_incomplete = True
                            continue
                        self.num_damaged_lines += 1
                        # there may be a record behind the beginning of another one, or behind zeros
                        parsed = (_parse_record(line[start.start():]) for start in re.finditer(rb'\{"', line))
                        record = next((one for one in parsed if one is not None), None)
                    if record is not None:
                        self.num_records += 1
                        yield record
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        if self.num_damaged_lines and not self.num_records:
            raise DataError(f"{self._path} is no metrics file: no line of it is a record of a run")


def _parse_record(text: bytes) -> Record | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and any(key in record for key in RECORD_KEYS) else None


def looks_like_metrics(path: Path) -> bool:
    with open(path, "rb") as file:
        return any(_parse_record(file.readline(MAX_LINE_BYTES)) for _ in range(PROBED_LINES))
