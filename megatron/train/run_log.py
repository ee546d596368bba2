"""The log of a run: console, metrics file (JSONL), and the optional TensorBoard, CSV and Weights & Biases loggers. Rank
0 only.

The metrics file has one JSON object per line. After each start or resume comes the configuration (`"config": true`,
without `iteration`), then a line for every optimizer step, evaluation (`"eval": true`) and complete save (`"save":
true`, without `iteration`). Floats are written with repr, so equal text means equal bits; only times, rates and memory
may differ between two equal runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megatron.checkpoint.writer import SaveReport
from megatron.config.tree import Config, LogConfig
from megatron.errors import StorageError
from megatron.metrics.console import Console
from megatron.metrics.run_loggers import CsvLogger, TensorboardLogger, WandbLogger
from megatron.metrics.scalar_writers import AppendOnlyFile, WandbProject
from megatron.metrics.step_metrics import StepMetrics
from megatron.train.evaluation import perplexity


RunLogger = TensorboardLogger | CsvLogger | WandbLogger


class RunLog:
    """Writes console, metrics file and loggers; `close` it at the end. `extra_line` supplies text after each console
    line."""

    def __init__(self, config: LogConfig, train_iters: int, start: int, *, writes: bool,
                 extra_line: Callable[[], str] = str, survives_closed_stdout: bool = False) -> None:
        self._start, self._seq_length, self._samples = start, 0, 0
        self._write_header: Callable[[], None] | None = None
        self.console = Console(config.log_interval, train_iters, start, writes=writes, extra_line=extra_line,
                               survives_closed_stdout=survives_closed_stdout)
        self.print_line = self.console.print_line

        def warn(text: str) -> None:
            self.print_line(f" {text}")

        self._file: AppendOnlyFile | None = None
        self._loggers: list[RunLogger] = []
        if writes:
            with ExitStack() as opened:
                opened.push(self)  # closes the open ones if a later one fails to open
                if config.metrics_file:
                    self._file = AppendOnlyFile("--metrics-file", config.metrics_file, warn)
                if config.tensorboard_dir:
                    self._loggers.append(TensorboardLogger(config.tensorboard_dir))
                if config.csv_dir:
                    self._loggers.append(CsvLogger(config.csv_dir, warn))
                if config.wandb_project is not None:
                    self._loggers.append(WandbLogger(WandbProject(config.wandb_project, config.wandb_group,
                                                                  config.wandb_team)))
                opened.pop_all()

    def start_run(self, config: Config, run_header: Mapping[str, Any], lines: list[str]) -> None:
        """Print `lines`; write `run_header` and the configuration to the files before their first number, so that a run
        with nothing to do leaves them unchanged."""
        self._seq_length = config.seq_length
        sections = config.as_dict()

        def write_header() -> None:
            self._append({"config": True, "start": self._start, **run_header, "values": sections})
            for sink in self._loggers:
                sink.log_config(sections, "\n\n".join(lines), self._start)

        self._write_header = write_header
        for line in lines:
            self.print_line(line)

    def _write_header_once(self) -> None:
        if self._write_header is not None:
            self._write_header()
            self._write_header = None

    def step(self, metrics: StepMetrics) -> None:
        self._write_header_once()
        self._samples = metrics.consumed_samples
        self._append(metrics.to_json())
        for sink in self._loggers:
            sink.log_step(metrics, self._samples * self._seq_length)
        self.console.log_step(metrics)

    def evaluation(self, name: str, iteration: int, loss: float, bits_per_byte: float | None = None) -> None:
        self._write_header_once()
        text_metrics = {} if bits_per_byte is None else {"bits_per_byte": bits_per_byte}
        self._append({"eval": True, "split": name, "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss),
                      **text_metrics})
        for sink in self._loggers:
            sink.log_evaluation(name, iteration, loss, self._samples * self._seq_length, text_metrics)
        self.print_line(
            f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E}"
            + "".join(f" | bits per byte: {value:.3E}" for value in text_metrics.values()))

    def saved(self, report: SaveReport, step: int, folder: str) -> None:
        """Log that the checkpoint of `step` is complete; training may have advanced since."""
        self._write_header_once()
        self._append({"save": True, "step": step, "tag": report.tag, "bytes": report.bytes,
                      "seconds": report.seconds})
        self.print_line(f" saved {report.tag} to {folder} ({report.bytes / 1e6:.1f} MB in {report.seconds:.2f} s)")

    def check_console(self, saved: str) -> None:
        """Raise a StorageError if the console was lost; `saved` says what was kept."""
        if self.console.write_error is not None:
            raise StorageError(f"cannot write standard output: {self.console.write_error.strerror}; {saved}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        failed = kind is not None
        with suppress(*([StorageError] if failed else [])):  # the first error is the one to report
            self.close(failed=failed)

    def close(self, *, failed: bool = False) -> None:
        self.console.close()
        with ExitStack() as closing:
            for sink in self._loggers:
                closing.callback(sink.close, failed=failed)
            if self._file is not None:
                closing.callback(self._file.close)

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is not None:  # JSON has no inf or nan: they become null
            self._file.append(json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                                          for key, value in record.items()}) + "\n")


def check_log_paths(config: LogConfig) -> None:
    """Raise if the metrics file or a log folder cannot be created, as far as that shows beforehand, so that the run
    fails before its data is built."""
    if config.metrics_file and not (parent := Path(config.metrics_file).absolute().parent).is_dir():
        raise StorageError(f"--metrics-file {config.metrics_file} cannot be opened for appending: {parent} is no "
                           "folder; name a file in a writable folder")
    for flag, folder in (("--tensorboard-dir", config.tensorboard_dir), ("--csv-dir", config.csv_dir)):
        if not folder:
            continue
        path = Path(folder).absolute()
        there = next(place for place in (path, *path.parents) if place.exists() or place == place.parent)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise StorageError(f"{flag} {folder} cannot be written: {there} is not a folder that can be written; name "
                               "one that is")
