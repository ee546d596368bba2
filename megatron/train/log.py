"""Where a run reports: the console, the metrics file and tensorboard. Rank 0 only; the log of another rank is mute.

The metrics file holds one JSON object per line. A run begins with its configuration (`"config": true`, and no
`iteration`), again after each resume; then every optimizer step is a line, and every evaluation (`"eval": true`).
Floats are written with repr, so equal text is equal bits; times, rates and memory are the only fields of a step that
may differ between two equal runs.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megatron.config.tree import Config, LogConfig
from megatron.errors import StorageError
from megatron.train.board import Board
from megatron.train.console import Console
from megatron.train.evaluation import perplexity
from megatron.train.metrics import StepMetrics
from megatron.zero.api.curves import storing


class RunLog:
    """Records what happens; `close` when the run ends. After each console line it says what `aside` has to say."""

    def __init__(self, config: LogConfig, train_iters: int, start: int, *, writes: bool,
                 aside: Callable[[], str] = str, outlives_reader: bool = False) -> None:
        self._start, self._seq_length, self._samples = start, 0, 0
        self._introduction: Callable[[], None] | None = None
        self.console = Console(config.log_interval, train_iters, start, writes=writes, aside=aside,
                               outlives_reader=outlives_reader)
        self._file = MetricsFile(config.metrics_file) if writes and config.metrics_file else None
        self._board = Board(config.tensorboard_dir) if writes and config.tensorboard_dir else None
        self.say = self.console.say

    def begin(self, config: Config, facts: Mapping[str, Any], lines: list[str]) -> None:
        """What the run is: `lines` for the reader of the console, `facts` beside the configuration for programs. The
        files get it before their first number: a run with nothing to do leaves them as they are."""
        self._seq_length = config.seq_length
        sections = config.as_dict()

        def introduce() -> None:
            self._append({"config": True, "start": self._start, **facts, "values": sections})
            if self._board is not None:
                self._board.configuration(sections, "\n\n".join(lines), self._start)

        self._introduction = introduce
        for line in lines:
            self.say(line)

    def _introduce(self) -> None:
        if self._introduction is not None:
            self._introduction()
            self._introduction = None

    def step(self, metrics: StepMetrics) -> None:
        self._introduce()
        self._samples = metrics.consumed_samples
        self._append(metrics.record())
        if self._board is not None:
            self._board.step(metrics, self._samples * self._seq_length)
        self.console.step(metrics)

    def evaluation(self, name: str, iteration: int, loss: float, bits_per_byte: float | None = None) -> None:
        self._introduce()
        of_text = {} if bits_per_byte is None else {"bits_per_byte": bits_per_byte}
        self._append({"eval": True, "split": name, "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss),
                      **of_text})
        if self._board is not None:
            self._board.evaluation(name, iteration, loss, self._samples * self._seq_length, of_text)
        self.say(
            f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E}"
            + "".join(f" | bits per byte: {value:.3E}" for value in of_text.values())
        )

    @property
    def is_lost(self) -> bool:
        """The console cannot be written any more; the files go on."""
        return self.console.lost is not None

    def check_reader(self, saved: str) -> None:
        """The error of a lost console, once `saved` says what was kept."""
        if self.console.lost is not None:
            raise StorageError(f"cannot write standard output: {self.console.lost.strerror}; {saved}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        with suppress(*([StorageError] if kind is not None else [])):  # the first error is the one to report
            self.close()

    def close(self) -> None:
        self.console.close()
        with ExitStack() as closing:
            for file in (self._board, self._file):
                if file is not None:
                    closing.callback(file.close)

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.append(json.dumps({key: _finite(value) for key, value in record.items()}))


class MetricsFile:
    """Lines, each whole or absent, that are in the file when `append` returns and on the disk when it is closed."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(f"--metrics-file {path} cannot be opened for appending: {error.strerror}; name a file "
                               "in a writable folder") from error

    def append(self, line: str) -> None:
        left = memoryview(f"{line}\n".encode())
        with storing("--metrics-file", self._path):
            size = os.fstat(self._file.fileno()).st_size
            try:
                while left:
                    left = left[self._file.write(left):]
            except OSError:
                with suppress(OSError):  # a pipe
                    os.ftruncate(self._file.fileno(), size)
                raise

    def close(self) -> None:
        with storing("--metrics-file", self._path):
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe, a device
                    raise
            finally:
                self._file.close()


def _finite(value: Any) -> Any:
    """JSON has no inf and no nan: a value that is neither a number nor anything else is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_places(config: LogConfig) -> None:
    """The metrics file and the tensorboard folder can be made, as far as that shows without making them: a run that
    cannot report ends before its data is built."""
    if config.metrics_file and not (folder := Path(config.metrics_file).absolute().parent).is_dir():
        raise StorageError(f"--metrics-file {config.metrics_file} cannot be opened for appending: {folder} is no "
                           "folder; name a file in a writable folder")
    if config.tensorboard_dir:
        board = Path(config.tensorboard_dir).absolute()
        there = next(path for path in (board, *board.parents) if path.exists() or path == path.parent)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise StorageError(f"--tensorboard-dir {config.tensorboard_dir} cannot be written: {there} is not a "
                               "folder that can be written; name one that is")
