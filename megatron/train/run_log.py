"""The log of a run: console (a line every --log-interval steps, and a progress bar on a terminal), metrics file
(JSONL), and the optional TensorBoard, CSV and Weights & Biases sinks. Rank 0 only.

The metrics file has one JSON object per line. After each start or resume comes the configuration (`"config": true`,
without `iteration`), then a line for every optimizer step, evaluation (`"eval": true`) and complete save (`"save":
true`, without `iteration`). Floats are written with repr, so equal text means equal bits; only times, rates and memory
may differ between two equal runs.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from tqdm import tqdm

from data.cli import format_count
from data.storage import escape_to_one_line
from data.tokenizer import Tokenizer
from megatron.checkpoint.writer import SaveReport
from megatron.config.tree import Config, LogConfig
from megatron.distributed.exit_codes import discard_stdout
from megatron.errors import StorageError
from megatron.metrics.sinks import (CsvSink, JsonlSink, MetricsFileReader, MetricsRecord, MetricsSink, Record,
                                    RunConfigRecord, TensorboardSink, WandbProject, WandbSink, open_sinks)
from megatron.metrics.step_metrics import NvmeStats, StepMetrics
from megatron.model import count_parameters
from megatron.train.compile import attention_line, compilation_line
from megatron.train.evaluation import perplexity, printable
from mpu.groups import Groups


ROUND_INTERVALS = (100, 50, 20, 10, 5, 2, 1)
MIN_LINES = 10  # minimum number of lines if --log-interval is not given (or one for each step of a shorter run)
ERASE_LINE = "\r\x1b[K"
ECHO_COLUMNS = 8  # free columns right of the bar, so that the terminal's ^C does not start a new line


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


def console_line(window: Sequence[StepMetrics], train_iters: int, *, is_short: bool = False) -> str:
    """Megatron-LM's log line, or one of about 100 columns, averaged over the steps since the last one."""
    last, count = window[-1], len(window)
    seconds = sum(m.step_ms for m in window) / 1e3
    losses = [m.lm_loss for m in window if not m.skipped] or [math.nan]

    def over_time(rates: Iterable[float]) -> float:
        return sum(rate * m.step_ms for rate, m in zip(rates, window, strict=True)) / 1e3 / seconds

    mfus = [m.mfu for m in window if m.mfu is not None]
    drops = [m.dropping for m in window if m.dropping is not None]
    drives = [m.drive for m in window if m.drive is not None]
    skipped = sum(m.skipped for m in window)
    loss, tokens_per_s = sum(losses) / len(losses), over_time(m.tokens_per_s for m in window)
    mfu = [f"MFU {100 * over_time(mfus):.1f}%"] if mfus else []
    if is_short:
        return " | ".join([
            f" step {last.iteration}/{train_iters}", f"loss {loss:.4f}", f"grad norm {last.grad_norm:.3f}",
            f"lr {last.learning_rate:.2E}", f"{seconds * 1e3 / count:.1f} ms", f"{tokens_per_s:.0f} tokens/s", *mfu,
            *([f"skipped {skipped}"] if skipped else [])])
    parts = [
        f" iteration {last.iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {seconds * 1e3 / count:.1f}",
        f"learning rate {last.learning_rate:.3E}",
        f"lm loss {loss:.6E}",
        f"loss scale {last.loss_scale:.1f}",
        f"grad norm {last.grad_norm:.3f}",
        f"tokens/s {tokens_per_s:.0f}",
        f"TFLOP/s {over_time(m.tflops for m in window):.2f}",
        *mfu,
        f"memory {last.max_memory_bytes / 2**30:.2f} GiB"]
    if drops:
        parts.append(f"theta {drops[-1].theta:.3f}, {sum(drop.blocks for drop in drops) / len(drops):.1f} blocks")
    if drives:
        parts.append(sum(drives, NvmeStats()).format_per_step(len(drives)))
    return " | ".join([*parts, f"skipped {skipped}"] if skipped else parts)


class RunLog:
    """Console, metrics file and the other sinks of a run of `train_iters` steps that starts after `start`. `close` it
    at the end. Console lines come every --log-interval steps (0: none; None: a default interval, and a line for the
    last step), each followed by `extra_line()` if that is not empty. With `survives_closed_stdout` a failed write to
    the console is recorded in `write_error` instead of raised, and the console is silent from then on."""

    def __init__(self, config: LogConfig, train_iters: int, start: int, *, writes: bool,
                 extra_line: Callable[[], str] = str, survives_closed_stdout: bool = False) -> None:
        self._start, self._seq_length, self._tokens = start, 0, 0
        self._unwritten_config: RunConfigRecord | None = None
        self.write_error: OSError | None = None
        self._survives_closed_stdout = survives_closed_stdout
        self._prints, self._extra_line, self._train_iters = writes, extra_line, train_iters
        self._is_short = config.log_fields == "short" or config.log_fields == "auto" and sys.stdout.isatty()
        usual_interval = next((every for every in ROUND_INTERVALS if every * MIN_LINES <= train_iters - start), 1)
        interval = config.log_interval
        self._interval, self._prints_last_step = usual_interval if interval is None else interval, interval is None
        self.notes: tuple[str, ...] = ()
        if interval and start < train_iters and train_iters // interval == start // interval:
            self.notes = (
                f" note: no losses are printed: --log-interval is {interval}, and this run ends with step "
                f"{train_iters}; make it smaller, or leave it out for a line every "
                f"{format_count(usual_interval, 'step')}",)
        self._window: list[StepMetrics] = []  # since the last console line
        width = shutil.get_terminal_size().columns - ECHO_COLUMNS
        self._bar: Any = _ProgressBar(total=train_iters, initial=start, unit="step", file=sys.stdout, leave=False,
                                      ncols=max(1, width), disable=not (writes and sys.stdout.isatty()))
        self._sinks: list[MetricsSink] = []
        if writes:
            with ExitStack() as opened:
                opened.callback(self._close_bar)
                self._sinks = open_sinks(self._configured_sinks(config))
                opened.pop_all()

    def _configured_sinks(self, config: LogConfig) -> Iterator[MetricsSink]:
        def warn(text: str) -> None:
            self.print_line(f" {text}")

        if config.metrics_file:
            yield JsonlSink("--metrics-file", config.metrics_file, warn)
        if config.tensorboard_dir:
            yield TensorboardSink("--tensorboard-dir", config.tensorboard_dir)
        if config.csv_dir:
            yield CsvSink("--csv-dir", config.csv_dir, warn)
        if config.wandb_project is not None:
            project = WandbProject(config.wandb_project, config.wandb_group, config.wandb_team)
            yield WandbSink("--wandb-project", project, step_metric="iteration")

    def print_line(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self._prints:
            with self._catch_write_errors():
                _ProgressBar.write(escape_to_one_line(line), file=sys.stdout)
                sys.stdout.flush()

    def _close_bar(self) -> None:
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
            self.write_error, self._prints, self._bar.disable = error, False, True
            discard_stdout()

    def start_run(self, config: Config, run_header: Mapping[str, Any], lines: list[str]) -> None:
        """Print `lines`; write `run_header` and the configuration to the files before their first number, so that a run
        with nothing to do leaves them unchanged."""
        self._seq_length = config.seq_length
        self._unwritten_config = RunConfigRecord(self._start, config.as_dict(), run_header, "\n\n".join(lines))
        for line in lines:
            self.print_line(line)

    def _write(self, record: MetricsRecord) -> None:
        config, self._unwritten_config = self._unwritten_config, None
        for sink in self._sinks:
            if config is not None:
                sink.write_config(config)
            sink.write(record)

    def step(self, metrics: StepMetrics) -> None:
        self._tokens = metrics.consumed_samples * self._seq_length
        self._write(MetricsRecord(metrics.to_json(), "steps", metrics.to_scalars(),
                                  {"iteration": metrics.iteration, "tokens": self._tokens}))
        if self.write_error is None:
            with self._catch_write_errors():
                self._bar.update()
        if not self._prints or not self._interval:
            return
        self._window.append(metrics)
        if metrics.iteration % self._interval == 0 or self._prints_last_step and metrics.iteration == self._train_iters:
            self.print_line(console_line(self._window, self._train_iters, is_short=self._is_short))
            self._window.clear()
            if line := self._extra_line():
                self.print_line(line)

    def evaluation(self, name: str, iteration: int, loss: float, bits_per_byte: float | None = None) -> None:
        text_metrics = {} if bits_per_byte is None else {"bits_per_byte": bits_per_byte}
        self._write(MetricsRecord(
            {"eval": True, "split": name, "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss),
             **text_metrics},
            "evaluations", {f"{name}/{key}": value for key, value in {"lm_loss": loss, **text_metrics}.items()},
            {"iteration": iteration, "tokens": self._tokens}))
        self.print_line(
            f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E}"
            + "".join(f" | bits per byte: {value:.3E}" for value in text_metrics.values()))

    def saved(self, report: SaveReport, step: int, folder: str) -> None:
        """Log that the checkpoint of `step` is complete; training may have advanced since."""
        self._write(MetricsRecord({"save": True, "step": step, "tag": report.tag, "bytes": report.bytes,
                                   "seconds": report.seconds}))
        self.print_line(f" saved {report.tag} to {folder} ({report.bytes / 1e6:.1f} MB in {report.seconds:.2f} s)")

    def check_console(self, saved: str) -> None:
        """Raise a StorageError if the console was lost; `saved` says what was kept."""
        if self.write_error is not None:
            raise StorageError(f"cannot write standard output: {self.write_error.strerror}; {saved}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        failed = kind is not None
        with suppress(*([StorageError] if failed else [])):  # the first error is the one to report
            self.close(failed=failed)

    def close(self, *, failed: bool = False) -> None:
        self._close_bar()
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close, failed=failed)


def check_log_paths(config: LogConfig) -> None:
    """Raise if the metrics file or a log folder cannot be created, as far as that shows beforehand, so that the run
    fails before its data is built."""
    parent = Path(config.metrics_file or ".").parent
    for flag, folder in (("--metrics-file", None if parent.is_dir() else parent),
                         ("--tensorboard-dir", config.tensorboard_dir), ("--csv-dir", config.csv_dir)):
        path = Path(folder or ".").absolute()
        existing = next(place for place in (path, *path.parents) if place.exists() or place == place.parent)
        if folder and not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            raise StorageError(f"{flag} {folder} cannot be written: {existing} is not a folder that can be written; "
                               "name one that is")


# ---- the header of a run --------------------------------------------------------------------------------------------


def header_record(config: Config, groups: Groups, device: torch.device) -> dict[str, Any]:
    """Fields of the metrics file's header that the configuration does not contain."""
    return {"began": datetime.now(UTC).isoformat(timespec="seconds"), "world_size": groups.world.size,
            "device": _device_name(device), "torch": torch.__version__, "parameters": count_parameters(config.model)[0]}


def header_lines(config: Config, groups: Groups, device: torch.device, tokenizer: Tokenizer) -> list[str]:
    """Console lines: model, devices, batch, precision, data, save folder."""
    lines, tp, dp = list[str](), groups.tp.size, groups.dp.size
    if config.log.verbose:
        names = {f"{section}.{key}": value for section, values in config.as_dict().items()
                 for key, value in values.items()}
        lines += ["configuration", *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in names.items())]
    where = _device_name(device)
    if device.type == "cpu" or config.offload.offload_optimizer_device != "none":
        threads = torch.get_num_threads()
        where += f", {threads}{' host' * (device.type != 'cpu')} thread{'s' if threads > 1 else ''}"
    batch, (parameters, _) = config.global_batch_size(dp), count_parameters(config.model)
    lines.append(
        f"GPT-2 with {parameters:,} parameters in {config.precision.name} on {tp * dp} x {where}: "
        f"tensor parallel {tp}, data parallel {dp}, ZeRO stage {config.zero.zero_stage}; global batch "
        f"{batch} = {config.train.batch_size} x {config.accumulation(dp)} x {dp}")
    lines += filter(None, (compilation_line(config, dp, device), attention_line(config, device)))
    source = "random tokens" if config.data.mock_data else " ".join(config.data.train_data)
    lines.append(f" data: {source}, with the {tokenizer.vocab_size:,} tokens of {tokenizer.name}; "
                 f"{format_count(config.train.train_iters, 'iteration')} of {batch} x {config.seq_length} tokens")
    every = f"every {config.save.save_interval:,} iterations and " if config.save.save_interval else ""
    lines.append(" evaluates and saves nothing: --skip-train" if config.train.skip_train else
                 " saves nothing: --save is not given" if config.save.save is None else
                 f" saves to {config.save.save} {every}at the end")
    return lines


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# ---- the last lines of a run ----------------------------------------------------------------------------------------

CHART_COLUMNS, CHART_ROWS, TEXT_COLUMNS = 64, 10, 88
_SCRIPTS = next(folder for parent in Path(__file__).parents if (folder := parent / "scripts").is_dir())


def closing_lines(config: Config, samples: Sequence[str]) -> list[str]:
    """The samples of text; with --summary, a chart of the losses and what to do next as well."""
    if not config.log.summary:
        return [f" sample: {printable(sample)}" for sample in samples]
    lines = loss_chart(MetricsFileReader(Path(config.log.metrics_file))) if config.log.metrics_file else []
    for sample in samples:
        lines += ["", *(f"  {line}" for text in sample.splitlines() for line in textwrap.wrap(text, TEXT_COLUMNS))]
    if config.save.save is not None:
        relative = {path: os.path.relpath(path) for path in (str(_SCRIPTS), config.save.save)}
        scripts, folder = (quote(path if short.startswith("..") else short) for path, short in relative.items())
        lines += ["", f" The checkpoint is in {folder}. Next:",
                  f'   bash {scripts}/generate_text.sh --load {folder} "It was"', "     continues your own words",
                  f"   bash {scripts}/evaluate_gpt2.sh --load {folder}", "     scores it on text that it has not seen",
                  f"   RUNS=runs/mine bash {scripts}/pretrain_gpt2.sh --train-data my_texts",
                  "     trains on your own text"]
    return lines


def loss_chart(records: Iterable[Record]) -> list[str]:
    """Training loss (the mean of each column's steps) and validation losses by step. The vertical axis leaves out the
    steep beginning: higher losses are drawn at its top."""
    training, validation = dict[int, float](), dict[int, float]()
    for record in records:
        step, loss = record.get("iteration"), record.get("lm_loss")
        if isinstance(step, int) and isinstance(loss, float) and math.isfinite(loss):
            if not record.get("eval"):
                training[step] = loss
            elif record.get("split") == "validation":
                validation[step] = loss
    if len(training) < 2:
        return []
    last = max(training)
    columns: list[list[float]] = [[] for _ in range(CHART_COLUMNS)]
    for step, loss in training.items():
        columns[(step - 1) * CHART_COLUMNS // last].append(loss)
    marks = [(column, sum(losses) / len(losses), "*") for column, losses in enumerate(columns) if losses]
    marks += [((step - 1) * CHART_COLUMNS // last, loss, "o") for step, loss in validation.items() if 0 < step <= last]
    low = min(loss for _, loss, _ in marks)
    high = max(loss for column, loss, _ in marks if column >= CHART_COLUMNS // 16 or loss == low)
    grid = [[" "] * CHART_COLUMNS for _ in range(CHART_ROWS)]
    for column, loss, mark in marks:
        row = round((high - min(loss, high)) / ((high - low) or 1) * (CHART_ROWS - 1))
        grid[row][column] = mark
    labels = {0: f"{high:.2f}", CHART_ROWS - 1: f"{low:.2f}"}
    return [*(f" {labels.get(row, ''):>6} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)),
            f"        +{'-' * CHART_COLUMNS}",
            f"         1{last:>{CHART_COLUMNS - 1},}",
            "         loss of training (*) and validation (o) in nats a token, by step"]
