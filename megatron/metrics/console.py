"""Console output of a run: a line every --log-interval steps, and a progress bar on a terminal. Rank 0 only."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from data.cli import format_count
from data.storage import escape_to_one_line
from megatron.distributed.exit_codes import discard_stdout
from megatron.metrics.step_metrics import NvmeStats, StepMetrics

ROUND_INTERVALS = (100, 50, 20, 10, 5, 2, 1)
MIN_LINES = 10  # minimum number of lines if --log-interval is not given (or one for each step of a shorter run)
ERASE_LINE = "\r\x1b[K"
ECHO_COLUMNS = 8  # free columns right of the bar, so that the terminal's ^C does not start a new line


def default_interval(steps: int) -> int:
    """The largest round interval that gives a run of `steps` steps at least MIN_LINES lines."""
    return next((interval for interval in ROUND_INTERVALS if interval * MIN_LINES <= steps), 1)


class _ProgressBar(tqdm):  # type: ignore[misc]
    """tqdm's bar; clearing it also erases what the terminal echoed behind it."""

    def clear(self, nolock: bool = False) -> None:
        if not self.disable:
            self.fp.write(ERASE_LINE)
            self.fp.flush()

    def close(self) -> None:
        if not self.disable:
            super().close()
            self.fp.write(ERASE_LINE)
            self.fp.flush()


class Console:
    """Prints the lines of a run of `train_iters` steps that starts after `start`, each followed by `extra_line()` if
    that is not empty. `interval` 0: no lines; None: a default interval, and a line for the last step. With
    `survives_closed_stdout` a failed write is recorded in `write_error` instead of raised, and the console is silent
    from then on."""

    def __init__(self, interval: int | None, train_iters: int, start: int, *, writes: bool,
                 extra_line: Callable[[], str] = str, survives_closed_stdout: bool = False) -> None:
        self.write_error: OSError | None = None
        self._survives_closed_stdout = survives_closed_stdout
        self._writes, self._extra_line, self._train_iters = writes, extra_line, train_iters
        usual_interval = default_interval(train_iters - start)
        self._interval = usual_interval if interval is None else interval
        self._prints_last_step = interval is None
        self.notes: tuple[str, ...] = ()
        if interval and start < train_iters and train_iters // interval == start // interval:
            self.notes = (
                f" note: no losses are printed: --log-interval is {interval}, and this run ends with step "
                f"{train_iters}; make it smaller, or leave it out for a line every "
                f"{format_count(usual_interval, 'step')}",)
        self._window: list[StepMetrics] = []
        width = shutil.get_terminal_size().columns - ECHO_COLUMNS
        self._bar: Any = _ProgressBar(total=train_iters, initial=start, unit="step", file=sys.stdout, leave=False,
                                      ncols=max(1, width), disable=not (writes and sys.stdout.isatty()))

    def log_step(self, metrics: StepMetrics) -> None:
        if self.write_error is None:
            with self._catch_write_errors():
                self._bar.update()
        if not self._writes or not self._interval:
            return
        self._window.append(metrics)
        if metrics.iteration % self._interval == 0 or self._prints_last_step and metrics.iteration == self._train_iters:
            self.print_line(console_line(self._window, self._train_iters))
            self._window.clear()
            if line := self._extra_line():
                self.print_line(line)

    def print_line(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self._writes:
            with self._catch_write_errors():
                _ProgressBar.write(escape_to_one_line(line), file=sys.stdout)
                sys.stdout.flush()

    def close(self) -> None:
        if self.write_error is None:
            with self._catch_write_errors():
                self._bar.close()

    @contextmanager
    def _catch_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the reader of stdout is gone
            if not self._survives_closed_stdout:
                raise
            self.write_error, self._writes, self._bar.disable = error, False, True
            discard_stdout()


def console_line(window: Sequence[StepMetrics], train_iters: int) -> str:
    """Megatron-LM's log line, averaged over the steps since the last one."""
    last, count = window[-1], len(window)
    seconds = sum(m.step_ms for m in window) / 1e3
    losses = [m.lm_loss for m in window if not m.skipped] or [math.nan]

    def over_time(rates: Iterable[float]) -> float:
        return sum(rate * m.step_ms for rate, m in zip(rates, window, strict=True)) / 1e3 / seconds

    mfus = [m.mfu for m in window if m.mfu is not None]
    drops = [m.dropping for m in window if m.dropping is not None]
    drives = [m.drive for m in window if m.drive is not None]
    skipped = sum(m.skipped for m in window)
    parts = [
        f" iteration {last.iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {seconds * 1e3 / count:.1f}",
        f"learning rate {last.learning_rate:.3E}",
        f"lm loss {sum(losses) / len(losses):.6E}",
        f"loss scale {last.loss_scale:.1f}",
        f"grad norm {last.grad_norm:.3f}",
        f"tokens/s {over_time(m.tokens_per_s for m in window):.0f}",
        f"TFLOP/s {over_time(m.tflops for m in window):.2f}",
        *([f"MFU {100 * over_time(mfus):.1f}%"] if mfus else []),
        f"memory {last.max_memory_bytes / 2**30:.2f} GiB"]
    if drops:
        parts.append(f"theta {drops[-1].theta:.3f}, {sum(drop.blocks for drop in drops) / len(drops):.1f} blocks")
    if drives:
        parts.append(sum(drives, NvmeStats()).format_per_step(len(drives)))
    return " | ".join([*parts, f"skipped {skipped}"] if skipped else parts)
