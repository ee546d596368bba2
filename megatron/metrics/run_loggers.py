"""The trainer's loggers for TensorBoard, Weights & Biases and CSV: configuration, steps and evaluations.

All scalars of a step are one TensorBoard event, written by its thread. CSV tables (`steps.csv`, `evaluations.csv`) have
fixed columns; a resumed run appends, and of a repeated step the later row counts. To continue a W&B run after a resume
set WANDB_RUN_ID and WANDB_RESUME=allow.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from data.storage import escape_to_one_line
from megatron.errors import StorageError
from megatron.metrics.scalar_writers import (AppendOnlyFile, TensorboardWriter, WandbProject, WandbRun, format_csv_row,
                                             storage_errors)
from megatron.metrics.step_metrics import StepMetrics

STEP_SCALARS = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "step_ms", "tokens_per_s", "tflops", "mfu")
GIB = 2**30


def step_scalars(metrics: StepMetrics) -> dict[str, float]:
    """By their names on a dashboard, without unknown values."""
    values = {**{key: getattr(metrics, key) for key in STEP_SCALARS}, "memory_gib": metrics.max_memory_bytes / GIB,
              **metrics.nvme_values(), **metrics.layer_drop_values()}
    return {f"train/{key}": value for key, value in values.items() if value is not None}


def evaluation_scalars(name: str, loss: float, text_metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/lm_loss": loss, **{f"{name}/{key}": value for key, value in text_metrics.items()}}


class TensorboardLogger:
    """A folder of event files; a resumed run appends to it."""

    def __init__(self, folder: str) -> None:
        self._writer = TensorboardWriter("--tensorboard-dir", folder)

    def log_config(self, sections: Mapping[str, Mapping[str, Any]], run_header: str, iteration: int) -> None:
        from torch.utils.tensorboard.summary import hparams

        values = {f"{section}.{key}": value for section, fields in sections.items() for key, value in fields.items()}
        rows = "\n".join(f"| {name} | {escape_to_one_line(value).replace('|', '&#124;')} |"
                         for name, value in values.items())
        settings = {name: value if isinstance(value, (bool, int, float, str)) else str(value)
                    for name, value in values.items() if value is not None}
        with self._writer.storage_errors():
            self._writer.writer.add_text("configuration", f"{run_header}\n\n| | |\n|---|---|\n{rows}", iteration)
            for summary in hparams(settings, {"train/lm_loss": 0, "validation/lm_loss": 0}):
                self._writer.events.add_summary(summary)

    def log_step(self, metrics: StepMetrics, tokens: int) -> None:
        """`tokens`: consumed by the run so far, the second x axis of the loss."""
        self._add_scalars(step_scalars(metrics), metrics.iteration)
        self._add_scalars({"train/lm_loss_by_tokens": metrics.lm_loss}, tokens)

    def log_evaluation(self, name: str, iteration: int, loss: float, tokens: int,
                       text_metrics: Mapping[str, float]) -> None:
        self._add_scalars(evaluation_scalars(name, loss, text_metrics), iteration)
        self._add_scalars({f"{name}/lm_loss_by_tokens": loss}, tokens)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()

    def _add_scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        with self._writer.storage_errors():
            self._writer.events.add_summary(Summary(value=scalars), step)


class WandbLogger:
    def __init__(self, project: WandbProject) -> None:
        self._run = WandbRun("--wandb-project", project, step_metric="iteration")

    def log_config(self, sections: Mapping[str, Mapping[str, Any]], run_header: str, iteration: int) -> None:
        self._run.configure(sections)

    def log_step(self, metrics: StepMetrics, tokens: int) -> None:
        self._run.log({"iteration": metrics.iteration, "tokens": tokens, **step_scalars(metrics)})

    def log_evaluation(self, name: str, iteration: int, loss: float, tokens: int,
                       text_metrics: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration, "tokens": tokens, **evaluation_scalars(name, loss, text_metrics)})

    def close(self, *, failed: bool = False) -> None:
        self._run.close(failed=failed)


STEP_COLUMNS = ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_samples",
                "step_ms", "tokens_per_s", "tflops", "mfu", "max_memory_bytes", "drive_wait_ms", "drive_read_bytes",
                "drive_written_bytes", "pld_theta", "pld_blocks")
EVALUATION_COLUMNS = ("iteration", "split", "lm_loss", "bits_per_byte")
MAX_HEADER_CHARS = 4096
"""Limit for the first line of an existing table."""


class CsvLogger:
    """`steps.csv` and `evaluations.csv` in a folder."""

    def __init__(self, folder: str, warn: Callable[[str], object]) -> None:
        with storage_errors("--csv-dir", folder):
            os.makedirs(folder, exist_ok=True)
        with ExitStack() as opened:
            self._steps = _CsvTable(os.path.join(folder, "steps.csv"), STEP_COLUMNS, warn)
            opened.callback(self._steps.close)
            self._evaluations = _CsvTable(os.path.join(folder, "evaluations.csv"), EVALUATION_COLUMNS, warn)
            opened.pop_all()

    def log_config(self, sections: Mapping[str, Mapping[str, Any]], run_header: str, iteration: int) -> None:
        """Not written to CSV."""

    def log_step(self, metrics: StepMetrics, tokens: int) -> None:
        self._steps.append(metrics.to_json())

    def log_evaluation(self, name: str, iteration: int, loss: float, tokens: int,
                       text_metrics: Mapping[str, float]) -> None:
        self._evaluations.append({"iteration": iteration, "split": name, "lm_loss": loss, **text_metrics})

    def close(self, *, failed: bool = False) -> None:
        with ExitStack() as closing:
            closing.callback(self._steps.close)
            closing.callback(self._evaluations.close)


class _CsvTable:
    """A CSV file; its header is written with the first row."""

    def __init__(self, path: str, columns: tuple[str, ...], warn: Callable[[str], object]) -> None:
        self._columns, header = columns, format_csv_row(columns)
        with storage_errors("--csv-dir", path):
            if os.path.exists(path) and not _has_header(header, path):
                raise StorageError(f"--csv-dir: {path} is another table, whose first line is not {header.strip()}; "
                                   "name another folder")
        self._lines = AppendOnlyFile("--csv-dir", path, warn, header=header, drops_partial_line=True)

    def append(self, values: Mapping[str, Any]) -> None:
        """Write a row: bool as 0 or 1, unknown values and NaN as empty."""
        row = [values.get(column) for column in self._columns]
        self._lines.append(format_csv_row(  # only NaN differs from itself
            int(value) if isinstance(value, bool) else None if value != value else value for value in row))

    def close(self) -> None:
        self._lines.close()


def _has_header(header: str, path: str) -> bool:
    """Whether the file starts with the header or, after a kill, a part of it. A spreadsheet may have changed line ends
    and quotes."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        first_line = file.readline(MAX_HEADER_CHARS)
    if not first_line.endswith("\n"):
        return header.startswith(first_line)
    return next(csv.reader([first_line])) == next(csv.reader([header]))
