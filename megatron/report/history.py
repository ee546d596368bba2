"""Reads a metrics file into the history of a run: one sequence of steps across kills and resumes.

A start is a time at which the trainer began to write; after step 0 it is a resume. Steps recorded beyond a resume
are discarded, so each step counts once. A step back without a start means that two runs wrote to the file.
Incomplete lines and zeros left by a crash are skipped and counted; a record behind them on the same line is found.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from data.storage import DataError

Record = dict[str, Any]

MAX_LINE_BYTES = 1 << 20
"""Bytes of a line; the configuration of a run has about 5,000."""
PROBED_LINES = 5
"""Lines in which a metrics file shows itself as one."""
RECORD_KEYS = ("config", "iteration", "save")
"""Every record of a trainer has one of these keys."""

_OBJECT = re.compile(rb'\{"')


class MetricsFileReader:
    """The records of a file in order, read as they are asked for; what is said of lines is of those read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_records = 0
        self.num_damaged_lines = 0
        """Lines that are not one object, and nothing else."""
        self.last_line_is_incomplete = False
        """The last one, which is being written, or was when the run was killed."""

    def __iter__(self) -> Iterator[Record]:
        try:
            with open(self._path, "rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    if (record := self._record(line)) is not None:
                        self.num_records += 1
                        yield record
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        if self.num_damaged_lines and not self.num_records:
            raise DataError(f"{self._path} is no metrics file: no line of it is a record of a run")

    def _record(self, line: bytes) -> Record | None:
        record = _parse_record(line)
        if record is None and line.strip():
            if not line.endswith(b"\n"):
                self.last_line_is_incomplete = True
                return None
            self.num_damaged_lines += 1
            return _last_record_in(line)
        return record


def _parse_record(text: bytes) -> Record | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and any(key in found for key in RECORD_KEYS) else None


def _last_record_in(line: bytes) -> Record | None:
    """The record at the end of a line that begins with the remains of another, or with zeros."""
    for start in _OBJECT.finditer(line):
        if (record := _parse_record(line[start.start():])) is not None:
            return record
    return None


def looks_like_metrics(path: Path) -> bool:
    with open(path, "rb") as file:
        return any(_parse_record(file.readline(MAX_LINE_BYTES)) for _ in range(PROBED_LINES))


COLUMNS = ("lm_loss", "learning_rate", "grad_norm", "loss_scale", "tokens_per_s", "tflops", "mfu", "max_memory_bytes",
           "step_ms", "consumed_samples", "skipped", "drive_wait_ms", "pld_theta")
"""What is kept of a step, by its name in the file; nan where it is not there, or not finite."""

NON_SETTING_KEYS = ("config", "start", "began", "values")
"""In the record of a start."""


@dataclass
class RunStart:
    step: int
    """The last one before it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its record: facts, and under "values" the configuration by section; empty where the file does not say."""
    discarded_steps: int = 0
    """Steps that had been recorded beyond it."""
    last_step: int = 0
    """The last step that it recorded."""

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted name, and the facts beside it."""
        facts = {name: value for name, value in self.config.items() if name not in NON_SETTING_KEYS}
        sections = _as_mapping(self.config.get("values"))
        return facts | {f"{section}.{name}": value for section, fields in sections.items()
                        for name, value in _as_mapping(fields).items()}


@dataclass(frozen=True)
class EvaluationEvent:
    split: str
    step: int
    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class SaveEvent:
    step: int
    tag: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class RunPosition:
    """A step on every axis; nan where the file does not say."""

    step: int
    tokens: float
    seconds: float


class RunHistory:
    """Filled by `read`; steps are in order, and each is there once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = array("q")
        self.columns = {column: array("d") for column in COLUMNS}
        self.tokens, self.seconds = array("d"), array("d")
        """Seen by then, and trained for, with all steps before."""
        self.starts: list[RunStart] = []
        self.saves: list[SaveEvent] = []
        self.num_out_of_order = 0
        """Steps behind a later one, though the file says where it starts: of another run that writes into it."""
        self._evaluations: dict[tuple[str, int], EvaluationEvent] = {}

    # ---- from records ---------------------------------------------------------------------------------------------

    def add_records(self, records: Iterable[Record]) -> RunHistory:
        for record in records:
            step = _as_step(record.get("iteration"))
            if record.get("config") is True:
                self._add_start(RunStart(_as_step(record.get("start")) or 0, record))
            elif record.get("save") is True and (saved := _as_step(record.get("step"))) is not None:
                self.saves.append(SaveEvent(saved, str(record.get("tag")), as_float(record.get("bytes")),
                                            as_float(record.get("seconds"))))
            elif step is not None and record.get("eval") is True:
                found = EvaluationEvent(str(record.get("split", "validation")), step, as_float(record.get("lm_loss")),
                                        as_float(record.get("bits_per_byte")))
                self._evaluations[found.split, step] = found
            elif step:
                self._add_step(step, record)
        self.seconds = array("d", accumulate(value / 1e3 if math.isfinite(value) else 0.0
                                             for value in self.columns["step_ms"]))
        length = self._sequence_length()
        self.tokens = array("d", (samples * length for samples in self.columns["consumed_samples"]))
        return self

    def _add_start(self, start: RunStart) -> None:
        start.discarded_steps, start.last_step = self._rewind(start.step), start.step
        self.starts.append(start)

    def _rewind(self, step: int) -> int:
        """The run goes on after `step`: what lies beyond has not happened. So many steps did."""
        kept = bisect_right(self.steps, step)
        beyond = len(self.steps) - kept
        del self.steps[kept:]
        for column in self.columns.values():
            del column[kept:]
        self.saves = [save for save in self.saves if save.step <= step]
        self._evaluations = {key: found for key, found in self._evaluations.items() if found.step <= step}
        return beyond

    def _add_step(self, step: int, record: Record) -> None:
        is_behind = bool(self.steps) and step <= self.steps[-1]
        if is_behind and self.starts[-1].config:
            self._rewind(step - 1)
            self.num_out_of_order += 1
        elif is_behind or not self.starts:  # of a file that does not say where it starts
            self._add_start(RunStart(step - 1))
        self.starts[-1].last_step = max(step, self.starts[-1].last_step)
        self.steps.append(step)
        for name, column in self.columns.items():
            value = record.get(name)
            column.append(value if type(value) is float else as_float(value))  # most are: a call less

    def _sequence_length(self) -> float:
        """Tokens of a sample: as configured, or from what two steps say of tokens and samples."""
        settings = self.settings
        said = settings.get("data.seq_length") or settings.get("model.max_position_embeddings")
        if said is not None:
            return as_float(said)
        samples, rates, times = (self.columns[name] for name in ("consumed_samples", "tokens_per_s", "step_ms"))
        if len(samples) < 2 or not samples[-1] > samples[-2]:
            return math.nan
        tokens = rates[-1] * times[-1] / 1e3 / (samples[-1] - samples[-2])
        return round(tokens) if math.isfinite(tokens) else math.nan

    # ---- for those who show it ------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Of the last start."""
        return self.starts[-1].settings if self.starts else {}

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def evaluations(self) -> list[EvaluationEvent]:
        return sorted(self._evaluations.values(), key=lambda found: (found.step, found.split))

    @property
    def resumes(self) -> list[RunStart]:
        """The starts where the line goes on that was there before."""
        lasting, lowest = list[RunStart](), math.inf
        for start in reversed(self.starts):
            if 0 < start.step < lowest:
                lasting.append(start)
            lowest = min(lowest, start.step)
        return lasting[::-1]

    @property
    def num_missing(self) -> int:
        """Steps between the first and the last that no record tells of."""
        return self.steps[-1] - self.steps[0] + 1 - len(self.steps) if self.steps else 0

    def position(self, step: int) -> RunPosition:
        """Of the last recorded step until then."""
        index = bisect_right(self.steps, step) - 1
        return RunPosition(step, self.tokens[index], self.seconds[index]) if index >= 0 else RunPosition(step, 0.0, 0.0)

    def finite_values(self, column: str) -> Iterator[float]:
        return (value for value in self.columns[column] if math.isfinite(value))


def as_float(value: object) -> float:
    """nan for what is none."""
    if isinstance(value, float | int):
        try:
            return float(value)
        except OverflowError:
            pass
    return math.nan


def _as_step(value: object) -> int | None:
    """A number of steps, if that is what it is."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
