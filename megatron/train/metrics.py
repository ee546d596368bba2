"""What a run tells: the console line, the progress bar, the metrics file and tensorboard. Rank 0 only; other ranks
hold a mute one.

`StepMetrics` is one line of the metrics file. Its floats are written with repr, so equal text is equal bits; times,
rates and memory are the only fields that may differ between two equal runs.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch
from tqdm import tqdm

from megatron.config.tree import LogConfig
from megatron.errors import StorageError
from megatron.train.evaluation import perplexity


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step."""

    iteration: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    consumed_samples: int
    samples_digest: str
    step_ms: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    max_memory_bytes: int


@dataclass(frozen=True)
class Rates:
    """What turns a step's time into rates."""

    tokens_per_step: int
    flops_per_token: float
    devices: int
    peak_tflops: float | None

    def of(self, seconds: float) -> tuple[float, float, float | None]:
        """(tokens/s over all devices, TFLOP/s of one device, MFU)."""
        tokens = self.tokens_per_step / seconds
        tflops = tokens * self.flops_per_token / self.devices / 1e12
        return tokens, tflops, tflops / self.peak_tflops if self.peak_tflops else None


class MetricsLog:
    """Writes what happened; `close` when the run ends. After each console line it says what `aside` has to say."""

    def __init__(self, config: LogConfig, train_iters: int, start: int, *, writes: bool,
                 aside: Callable[[], str] = str) -> None:
        self._config, self._train_iters, self._writes, self._aside = config, train_iters, writes, aside
        self._window: list[StepMetrics] = []
        self._file = _open_for_append(config.metrics_file) if writes and config.metrics_file else None
        self._board = _tensorboard(config.tensorboard_dir) if writes and config.tensorboard_dir else None
        self._bar = tqdm(total=train_iters, initial=start, unit="step", file=sys.stdout,
                         disable=not (writes and sys.stdout.isatty()), leave=False)

    def step(self, metrics: StepMetrics) -> None:
        if not self._writes:
            return
        self._append(asdict(metrics))
        if self._board is not None:
            for key in ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "tokens_per_s", "tflops"):
                self._board.add_scalar(f"train/{key}", getattr(metrics, key), metrics.iteration)
        self._bar.update()
        self._window.append(metrics)
        if self._config.log_interval and metrics.iteration % self._config.log_interval == 0:
            self.say(console_line(self._window, self._train_iters))
            self._window.clear()
            if line := self._aside():
                self.say(line)

    def evaluation(self, name: str, iteration: int, loss: float) -> None:
        if not self._writes:
            return
        self._append({"eval": True, "split": name, "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss)})
        if self._board is not None:
            self._board.add_scalar(f"{name}/lm_loss", loss, iteration)
        self.say(
            f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E}"
        )

    def say(self, line: str) -> None:
        """One line on the console, above the progress bar."""
        if self._writes:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({key: _finite(value) for key, value in record.items()}) + "\n")
            self._file.flush()


def console_line(window: list[StepMetrics], train_iters: int) -> str:
    """The classic line, averaged over the steps since the last one."""
    last, count = window[-1], len(window)
    seconds = sum(m.step_ms for m in window) / 1e3
    losses = [m.lm_loss for m in window if not m.skipped] or [math.nan]
    rate = sum(m.tokens_per_s * m.step_ms for m in window) / 1e3 / seconds
    parts = [
        f" iteration {last.iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {seconds * 1e3 / count:.1f}",
        f"learning rate {last.learning_rate:.3E}",
        f"lm loss {sum(losses) / len(losses):.6E}",
        f"loss scale {last.loss_scale:.1f}",
        f"grad norm {last.grad_norm:.3f}",
        f"tokens/s {rate:.0f}",
        f"TFLOP/s {sum(m.tflops * m.step_ms for m in window) / 1e3 / seconds:.2f}",
        *([f"MFU {100 * last.mfu:.1f}%"] if last.mfu is not None else []),
        f"memory {last.max_memory_bytes / 2**30:.2f} GiB",
        *([f"skipped {skipped}"] if (skipped := sum(m.skipped for m in window)) else []),
    ]
    return " | ".join(parts)


def max_memory_bytes(device: torch.device) -> int:
    """Peak of the device's allocator, or of the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Stopwatch:
    """Seconds since the last reading."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def _finite(value: Any) -> Any:
    """JSON has no inf and no nan: a value that is neither a number nor anything else is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_for_append(path: str) -> IO[str]:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"--metrics-file {path} cannot be opened for appending: {error.strerror}; name a file in a writable folder"
        ) from error


def _tensorboard(folder: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # heavy: only where asked for

    try:
        return SummaryWriter(folder)
    except OSError as error:
        raise StorageError(
            f"--tensorboard-dir {folder} cannot be written: {error.strerror}; name a writable folder"
        ) from error
