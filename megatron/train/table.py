"""Steps and evaluations as two tables of CSV, for spreadsheets: a row each, the columns always the same.

A resumed run appends to them; of a step that is there twice the later row counts. What a kill has left of a row is
taken away: half a number would pass for one.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from megatron.errors import StorageError
from megatron.train.metrics import StepMetrics
from megatron.zero.api.curves import storage_errors
from megatron.zero.api.lines import AppendOnlyFile, format_csv_row

STEP_COLUMNS = ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_samples",
                "step_ms", "tokens_per_s", "tflops", "mfu", "max_memory_bytes", "drive_wait_ms", "drive_read_bytes",
                "drive_written_bytes", "pld_theta", "pld_blocks")
EVALUATION_COLUMNS = ("iteration", "split", "lm_loss", "bits_per_byte")
MAX_HEADER_CHARS = 4096
"""Characters of the first line."""


class CsvLogger:
    """`steps.csv` and `evaluations.csv` of a folder."""

    def __init__(self, folder: str, warn: Callable[[str], object]) -> None:
        with storage_errors("--csv-dir", folder):
            os.makedirs(folder, exist_ok=True)
        with ExitStack() as opened:
            self._steps = _CsvTable(os.path.join(folder, "steps.csv"), STEP_COLUMNS, warn)
            opened.callback(self._steps.close)
            self._evaluations = _CsvTable(os.path.join(folder, "evaluations.csv"), EVALUATION_COLUMNS, warn)
            opened.pop_all()

    def log_config(self, sections: Mapping[str, Mapping[str, Any]], run_header: str, iteration: int) -> None:
        """Tables have no place for it."""

    def log_step(self, metrics: StepMetrics, tokens: int) -> None:
        self._steps.append(metrics.to_json())

    def log_evaluation(self, name: str, iteration: int, loss: float, tokens: int, text_metrics: Mapping[str,
                                                                                                        float]) -> None:
        self._evaluations.append({"iteration": iteration, "split": name, "lm_loss": loss, **text_metrics})

    def close(self, *, failed: bool = False) -> None:
        with ExitStack() as closing:
            closing.callback(self._steps.close)
            closing.callback(self._evaluations.close)


class _CsvTable:
    """A file that gets its head with its first row."""

    def __init__(self, path: str, columns: tuple[str, ...], warn: Callable[[str], object]) -> None:
        self._columns, head = columns, format_csv_row(columns)
        with storage_errors("--csv-dir", path):
            if os.path.exists(path) and not _has_header(head, path):
                raise StorageError(f"--csv-dir: {path} is another table, whose first line is not {head.strip()}; name "
                                   "another folder")
        self._lines = AppendOnlyFile("--csv-dir", path, warn, header=head, drops_partial_line=True)

    def append(self, values: Mapping[str, Any]) -> None:
        """A row; empty where a value is not known, or no number."""
        self._lines.append(format_csv_row(tuple(_csv_value(values.get(column)) for column in self._columns)))

    def close(self) -> None:
        self._lines.close()


def _has_header(header: str, path: str) -> bool:
    """Or with what a kill has left of it; a spreadsheet may have written it, with other line ends and quotes."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        found = file.readline(MAX_HEADER_CHARS)
    if not found.endswith("\n"):
        return header.startswith(found)
    return next(csv.reader([found])) == next(csv.reader([header]))


def _csv_value(value: Any) -> Any:
    """A float with all its digits."""
    return int(value) if isinstance(value, bool) else None if isinstance(value, float) and math.isnan(value) else value
