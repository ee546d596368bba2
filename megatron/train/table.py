"""Steps and evaluations as two tables of CSV, for spreadsheets: a row each, the columns always the same.

A resumed run appends to them; of a step that is there twice the later row counts.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping
from typing import Any

from megatron.errors import StorageError
from megatron.train.metrics import StepMetrics
from megatron.zero.api.curves import storing

STEPS = ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_samples", "step_ms",
         "tokens_per_s", "tflops", "mfu", "max_memory_bytes", "drive_wait_ms", "drive_read_bytes",
         "drive_written_bytes", "pld_theta", "pld_blocks")
EVALUATIONS = ("iteration", "split", "lm_loss", "bits_per_byte")


class Tables:
    """`steps.csv` and `evaluations.csv` of a folder."""

    def __init__(self, folder: str) -> None:
        with storing("--csv-dir", folder):
            os.makedirs(folder, exist_ok=True)
        self._steps = _Table(os.path.join(folder, "steps.csv"), STEPS)
        self._evaluations = _Table(os.path.join(folder, "evaluations.csv"), EVALUATIONS)

    def configuration(self, sections: Mapping[str, Mapping[str, Any]], facts: str, iteration: int) -> None:
        """Tables have no place for it."""

    def step(self, metrics: StepMetrics, tokens: int) -> None:
        self._steps.append(metrics.record())

    def evaluation(self, name: str, iteration: int, loss: float, tokens: int, of_text: Mapping[str, float]) -> None:
        self._evaluations.append({"iteration": iteration, "split": name, "lm_loss": loss, **of_text})

    def close(self, *, failed: bool = False) -> None:
        """Nothing is held open."""


class _Table:
    """A file that gets its head with its first row; it is not held open."""

    def __init__(self, path: str, columns: tuple[str, ...]) -> None:
        self._path, self._columns, self._head = path, columns, _line(columns)
        with storing("--csv-dir", path), open(path, "a+b") as file:
            file.seek(0)
            found = file.readline()
        if found not in (b"", self._head):
            raise StorageError(f"--csv-dir: {path} is another table, whose first line is not "
                               f"{self._head.decode().strip()}; name another folder")

    def append(self, values: Mapping[str, Any]) -> None:
        """A row; empty where a value is not known, or no number."""
        row = _line(tuple(_told(values.get(column)) for column in self._columns))
        with storing("--csv-dir", self._path), open(self._path, "ab", buffering=0) as file:
            file.write(row if file.tell() else self._head + row)


def _told(value: Any) -> Any:
    """A float with all its digits."""
    return int(value) if isinstance(value, bool) else None if isinstance(value, float) and math.isnan(value) else value


def _line(values: tuple[Any, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow(values)
    return text.getvalue().encode()
