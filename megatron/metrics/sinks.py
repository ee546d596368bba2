"""Sinks of metrics, for the trainer (train/run_log.py) and for the engine's monitor (zero/api/engine_features.py).

A sink takes records: JSON lines, CSV tables, a CSV file for each scalar, TensorBoard events, Weights & Biases runs.
Errors name the flag or key of the sink. A resumed run appends to the files, after repairing what a kill, a power cut or
a full disk left of the last line; of a repeated step the later row counts. To continue a W&B run after a resume set
WANDB_RUN_ID and WANDB_RESUME=allow; WANDB_MODE=offline writes to ./wandb. `MetricsFileReader` reads the JSON lines. No
torch.
"""

from __future__ import annotations

import atexit
import csv
import errno
import io
import json
import math
import os
import re
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from data.storage import DataError, LockResult, escape_to_one_line, try_lock, unlock
from megatron.config.run_config import check_wandb
from megatron.errors import ConfigError, StorageError, explain_os_error

Warn = Callable[[str], object]
TAIL_BYTES = 1 << 20  # where the end of the last whole line is looked for


class RunConfigRecord(NamedTuple):
    """The configuration of a run that starts after step `start`."""

    start: int
    sections: Mapping[str, Mapping[str, Any]]
    run_header: Mapping[str, Any]
    text: str  # the run header for people


@dataclass(frozen=True)
class MetricsRecord:
    """A step, an evaluation, a save, or scalars of the engine."""

    values: Mapping[str, Any] = field(default_factory=dict)  # for JSON and tables
    table: str | None = None  # the CSV table that has it
    scalars: Mapping[str, float] = field(default_factory=dict)  # for dashboards, by their names there
    # The x of the scalars: iteration and tokens, or samples. The first is the main one.
    axes: Mapping[str, int] = field(default_factory=dict)


class MetricsSink(ABC):
    def write_config(self, config: RunConfigRecord) -> None:
        """Not all sinks have a place for it."""

    @abstractmethod
    def write(self, record: MetricsRecord) -> None: ...

    @abstractmethod
    def close(self, *, failed: bool = False) -> None: ...


def open_sinks(sinks: Iterable[MetricsSink]) -> list[MetricsSink]:
    """The sinks of an iterator that opens them; after an error none stays open."""
    with ExitStack() as opened:
        found = []
        for sink in sinks:
            opened.callback(sink.close)
            found.append(sink)
        opened.pop_all()
    return found


@contextmanager
def storage_errors(flag: str, path: str) -> Iterator[None]:
    """Convert an OSError to a StorageError that names the flag and the path. ENOMEM is not a storage error and passes
    through."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        why, remedy = explain_os_error(error, Path(path).absolute().parent)
        raise StorageError(f"{flag} {path} cannot be written: {why}; {remedy}, or name another place, and start the "
                           "same command again") from error


class AppendOnlyFile:
    """Appends lines, each complete or absent: in the file when `append` returns, on disk after `close`.

    `flag` is the setting that names the file; `warn` is called if another process writes to it. A partial last line of
    a killed run is completed as a line, or removed with `drops_partial_line`, where readers would take half a number
    for one. The file is unchanged until the first `append`.
    """

    def __init__(self, flag: str, path: str, warn: Warn, *, header: str = "",
                 drops_partial_line: bool = False) -> None:
        self._flag, self._path, self._header, self._drops_partial_line = flag, path, header, drops_partial_line
        self._is_repaired = False
        try:
            os.makedirs(Path(path).absolute().parent, exist_ok=True)
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{flag} {path} cannot be opened for appending: {error.strerror}; name a file in a "
                               "writable folder") from error
        finalize(self, _close_quietly, self._file)  # for engines that are never closed
        # The kernel's lock, without blocking: it is held until the file is closed or the process ends. On file systems
        # without locks, or with locks local to a machine, other writers are not detected.
        is_file = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._holds_lock = not (is_file and try_lock(self._file) is LockResult.HELD_BY_OTHER)
        if not self._holds_lock:  # only a warning: logging must not stop a resumed run
            warn(f"warning: another process, or another part of this one, has {flag} {path} open to write into it: "
                 "lines of two runs cannot be told apart; stop it, or start this run with another place")

    def append(self, lines: str) -> None:
        """Append lines, with their line ends; the header first if the file is empty."""
        with storage_errors(self._flag, self._path):
            begin = b"" if self._is_repaired else self._repair()
            size = os.fstat(self._file.fileno()).st_size
            left = memoryview(begin + ("" if size else self._header).encode() + lines.encode())
            try:
                while left:
                    left = left[self._file.write(left):]
            except OSError:
                if self._holds_lock:  # else truncating would drop another process's lines
                    with suppress(OSError):  # a pipe
                        os.ftruncate(self._file.fileno(), size)
                raise
            self._is_repaired = True

    def _repair(self) -> bytes:
        """Bytes to write before the first line; may truncate a partial last line."""
        if not os.path.isfile(self._path):
            return b""
        with open(self._path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            tail = file.read()
        full_lines_end = tail.rfind(b"\n") + 1
        if full_lines_end == len(tail):
            return b""
        is_foreign = full_lines_end == 0 and (start > 0 or not self._header.encode().startswith(tail))
        if is_foreign or not self._drops_partial_line or not self._holds_lock:
            return b"\n"
        os.ftruncate(self._file.fileno(), start + full_lines_end)
        return b""

    def close(self) -> None:
        if self._file.closed:
            return
        with storage_errors(self._flag, self._path):
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe, a device
                    raise
            finally:
                unlock(self._file)  # a forked process may keep the descriptor, and so the lock
                self._file.close()


def _close_quietly(file: FileIO) -> None:
    with suppress(OSError):
        file.close()


class JsonlSink(MetricsSink):
    def __init__(self, flag: str, path: str, warn: Warn) -> None:
        self._file = AppendOnlyFile(flag, path, warn)

    def write_config(self, config: RunConfigRecord) -> None:
        self.write(MetricsRecord({"config": True, "start": config.start, **config.run_header,
                                  "values": config.sections}))

    def write(self, record: MetricsRecord) -> None:
        self._file.append(json.dumps({  # JSON has no inf or nan: they become null
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.values.items()}) + "\n")

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


# Columns by table; the file of a table is NAME.csv.
TABLES = {
    "steps": ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_samples",
              "step_ms", "tokens_per_s", "tflops", "mfu", "max_memory_bytes", "drive_wait_ms", "drive_read_bytes",
              "drive_written_bytes", "pld_theta", "pld_blocks"),
    "evaluations": ("iteration", "split", "lm_loss", "bits_per_byte")}


class CsvSink(MetricsSink):
    """CSV files in a folder: TABLES, or with `by_scalar` one for each scalar, with `_` for `/` and spaces in its name.
    """

    def __init__(self, flag: str, folder: str, warn: Warn, *, by_scalar: bool = False) -> None:
        self._flag, self._folder, self._warn, self._by_scalar = flag, folder, warn, by_scalar
        self._files: dict[str, AppendOnlyFile] = {}
        with storage_errors(flag, folder):
            os.makedirs(folder, exist_ok=True)
        if not by_scalar:
            with ExitStack() as opened:
                opened.callback(self.close)
                for name, columns in TABLES.items():
                    self._open(name, columns)
                opened.pop_all()

    def _open(self, name: str, columns: Sequence[str]) -> AppendOnlyFile:
        """The file, whose header is written with the first row."""
        path, header = os.path.join(self._folder, f"{name}.csv"), _csv_row(columns)
        with storage_errors(self._flag, path):
            if not self._by_scalar and os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace", newline="") as file:
                    found = file.readline(len(header))
                if not header.startswith(found):  # after a kill the file may have a part of the header
                    raise StorageError(f"{self._flag}: {path} is another table, whose first line is not "
                                       f"{header.strip()}; name another folder")
        self._files[name] = AppendOnlyFile(self._flag, path, self._warn, header=header, drops_partial_line=True)
        return self._files[name]

    def write(self, record: MetricsRecord) -> None:
        if self._by_scalar:
            for tag, value in record.scalars.items():
                name = tag.replace("/", "_").replace(" ", "_")
                file = self._files.get(name) or self._open(name, ("step", tag.rpartition("/")[2]))
                file.append(_csv_row((next(iter(record.axes.values())), value)))
        elif record.table is not None:  # bool as 0 or 1, unknown values and NaN, which differs from itself, as empty
            row = [record.values.get(column) for column in TABLES[record.table]]
            self._files[record.table].append(_csv_row([
                int(value) if isinstance(value, bool) else None if value != value else value for value in row]))

    def close(self, *, failed: bool = False) -> None:
        with ExitStack() as closing:
            for file in self._files.values():
                closing.callback(file.close)
        self._files.clear()


def _csv_row(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(values)
    return text.getvalue()


class TensorboardSink(MetricsSink):
    """A folder of event files. The scalars of a record are one event, written by TensorBoard's thread, whose errors are
    raised by the next call or by `close`."""

    def __init__(self, flag: str, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # slow import
        except ImportError as error:
            raise ConfigError(f"{flag} needs the package tensorboard ({error}); install it, or use CSV") from None
        self._flag, self._folder = flag, folder
        # TensorBoard's writer thread prints no traceback from now on.
        if not (isinstance(threading.excepthook, partial) and threading.excepthook.func is _thread_excepthook):
            threading.excepthook = partial(_thread_excepthook, threading.excepthook)
        with storage_errors(flag, folder):
            self.writer: Any = SummaryWriter(folder)
            self.events: Any = self.writer.file_writer
        atexit.register(self.writer.close)  # else the thread drops the last scalars of an engine that is never closed

    def write_config(self, config: RunConfigRecord) -> None:
        from torch.utils.tensorboard.summary import hparams

        values = {f"{section}.{key}": value for section, fields in config.sections.items()
                  for key, value in fields.items()}
        rows = "\n".join(f"| {name} | {escape_to_one_line(value).replace('|', '&#124;')} |"
                         for name, value in values.items())
        settings = {name: value if isinstance(value, (bool, int, float, str)) else str(value)
                    for name, value in values.items() if value is not None}
        with storage_errors(self._flag, self._folder):
            self.writer.add_text("configuration", f"{config.text}\n\n| | |\n|---|---|\n{rows}",
                                 config.start)
            for summary in hparams(settings, {"train/lm_loss": 0, "validation/lm_loss": 0}):
                self.events.add_summary(summary)

    def write(self, record: MetricsRecord) -> None:
        """Losses also over tokens, if the record has them."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        by_tokens = {f"{tag}_by_tokens": value for tag, value in record.scalars.items() if tag.endswith("/lm_loss")}
        with storage_errors(self._flag, self._folder):
            for axis, x in record.axes.items():
                scalars = by_tokens if axis == "tokens" else record.scalars
                self.events.add_summary(Summary(value=[Summary.Value(tag=tag, simple_value=value)
                                                       for tag, value in scalars.items()]), x)

    def close(self, *, failed: bool = False) -> None:
        atexit.unregister(self.writer.close)
        with storage_errors(self._flag, self._folder):
            self.writer.flush()  # raises the thread's error
            self.writer.close()


def _thread_excepthook(previous_hook: Callable[..., object], args: Any) -> None:
    if type(args.thread).__name__ != "_AsyncWriterThread":
        previous_hook(args)


class WandbProject(NamedTuple):
    """The project, group and team of a run."""

    name: str
    group: str | None = None
    team: str | None = None


class WandbSink(MetricsSink):
    """A run of Weights & Biases. A lost connection is a warning, not an error."""

    def __init__(self, flag: str, project: WandbProject, step_metric: str) -> None:
        """`step_metric`: the axis of the charts."""
        check_wandb(flag)
        import wandb

        try:
            self._run = wandb.init(project=project.name, group=project.group, entity=project.team)
        except (wandb.errors.Error, OSError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"{flag} {project.name}: wandb cannot start: {why}; log in with `wandb login`, or set "
                              "WANDB_MODE=offline to write to a folder") from error
        self._has_failed = False
        self._run.define_metric("*", step_metric=step_metric)

    def write_config(self, config: RunConfigRecord) -> None:
        self._warn_on_failure(lambda: self._run.config.update(dict(config.sections), allow_val_change=True))

    def write(self, record: MetricsRecord) -> None:
        if record.scalars:
            self._warn_on_failure(lambda: self._run.log({**record.axes, **record.scalars}))

    def close(self, *, failed: bool = False) -> None:
        """Block until all scalars are uploaded (if a server is used)."""
        self._warn_on_failure(lambda: self._run.finish(exit_code=int(failed)))

    def _warn_on_failure(self, action: Callable[[], Any]) -> None:
        """wandb's service may die before the run does; that must not end the job."""
        if self._has_failed:
            return
        try:
            action()
        except Exception as error:
            self._has_failed = True
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"warning: wandb takes no more scalars ({why}); training goes on without it", file=sys.stderr,
                  flush=True)


# ---- what JsonlSink has written ------------------------------------------------------------------------------------

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
