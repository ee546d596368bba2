"""Reads a metrics file into the history of a run: one sequence of steps across kills and resumes.

A start is a time at which the trainer began to write; after step 0 it is a resume. Steps recorded beyond a resume
are discarded, so each step counts once. A step back without a start means that two runs wrote to the file.
Incomplete lines and zeros left by a crash are skipped and counted; a record behind them on the same line counts.
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
"""The configuration of a run has about 5,000."""
PROBED_LINES = 5
"""A metrics file has a record within these lines."""
RECORD_KEYS = ("config", "iteration", "save")
"""Every record of a trainer has one of these keys."""

_OBJECT = re.compile(rb'\{"')


class MetricsFileReader:
    """The records of a file in order, read lazily; the counters cover the lines read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_records = 0
        self.num_damaged_lines = 0
        """Lines that are not exactly one record."""
        self.last_line_is_incomplete = False
        """The last line is being written, or the run was killed while writing it."""

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
                        parsed = (_parse_record(line[start.start():]) for start in _OBJECT.finditer(line))
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


COLUMNS = ("lm_loss", "learning_rate", "grad_norm", "loss_scale", "tokens_per_s", "tflops", "mfu", "max_memory_bytes",
           "step_ms", "consumed_samples", "skipped", "drive_wait_ms", "pld_theta")
"""Values of a step, by their names in the file; nan if missing or not finite."""

NON_SETTING_KEYS = ("config", "start", "began", "values")
"""In the record of a start."""


@dataclass
class RunStart:
    step: int
    """The last step before it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its record, with the configuration by section under "values"; empty if the file has none."""
    discarded_steps: int = 0
    """Earlier recorded steps beyond `step`."""
    last_step: int = 0
    """The last step that it recorded."""

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted name, and the other fields of the record."""
        fields = {name: value for name, value in self.config.items() if name not in NON_SETTING_KEYS}
        sections = _as_mapping(self.config.get("values"))
        return fields | {f"{section}.{name}": value for section, values in sections.items()
                         for name, value in _as_mapping(values).items()}


@dataclass(frozen=True)
class EvaluationEvent:
    split: str
    step: int
    loss: float
    bits_per_byte: float


class RunHistory:
    """Each step occurs once, in order."""

    def __init__(self, name: str, records: Iterable[Record] = ()) -> None:
        self.name = name
        self.steps = array("q")
        self.columns = {column: array("d") for column in COLUMNS}
        self.starts: list[RunStart] = []
        self.saves: list[int] = []
        """Their steps."""
        self.num_out_of_order = 0
        """Steps after a later one without a start between them: another run writes to the file."""
        self._evaluations: dict[tuple[str, int], EvaluationEvent] = {}
        for record in records:
            self._add(record)
        self.seconds = array("d", accumulate(value / 1e3 if math.isfinite(value) else 0.0
                                             for value in self.columns["step_ms"]))
        """Cumulative at each step, as are the tokens."""
        length = as_float(self.settings.get("data.seq_length") or self.settings.get("model.max_position_embeddings"))
        self.tokens = array("d", (samples * length for samples in self.columns["consumed_samples"]))

    # ---- from records ---------------------------------------------------------------------------------------------

    def _add(self, record: Record) -> None:
        step = _as_step(record.get("iteration"))
        if record.get("config") is True:
            self._add_start(RunStart(_as_step(record.get("start")) or 0, record))
        elif record.get("save") is True and (saved := _as_step(record.get("step"))) is not None:
            self.saves.append(saved)
        elif step is not None and record.get("eval") is True:
            event = EvaluationEvent(str(record.get("split", "validation")), step, as_float(record.get("lm_loss")),
                                    as_float(record.get("bits_per_byte")))
            self._evaluations[event.split, step] = event
        elif step:
            self._add_step(step, record)

    def _add_start(self, start: RunStart) -> None:
        start.discarded_steps, start.last_step = self._rewind(start.step), start.step
        self.starts.append(start)

    def _rewind(self, step: int) -> int:
        """Discard everything after `step`; returns the number of discarded steps."""
        kept = bisect_right(self.steps, step)
        discarded = len(self.steps) - kept
        del self.steps[kept:]
        for column in self.columns.values():
            del column[kept:]
        self.saves = [save for save in self.saves if save <= step]
        self._evaluations = {key: event for key, event in self._evaluations.items() if event.step <= step}
        return discarded

    def _add_step(self, step: int, record: Record) -> None:
        is_behind = bool(self.steps) and step <= self.steps[-1]
        if is_behind and self.starts[-1].config:
            self._rewind(step - 1)
            self.num_out_of_order += 1
        elif is_behind or not self.starts:  # the file has no record of this start
            self._add_start(RunStart(step - 1))
        self.starts[-1].last_step = max(step, self.starts[-1].last_step)
        self.steps.append(step)
        for name, column in self.columns.items():
            value = record.get(name)
            column.append(value if type(value) is float else as_float(value))  # the common case without a call

    # ---- for the report -------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the last start."""
        return self.starts[-1].settings if self.starts else {}

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def evaluations(self) -> list[EvaluationEvent]:
        return sorted(self._evaluations.values(), key=lambda event: (event.step, event.split))

    @property
    def resumes(self) -> list[RunStart]:
        """The starts after step 0 that no later start has discarded."""
        return [start for index, start in enumerate(self.starts)
                if 0 < start.step < min((later.step for later in self.starts[index + 1:]), default=math.inf)]

    @property
    def num_missing(self) -> int:
        """Steps between the first and the last without a record."""
        return self.steps[-1] - self.steps[0] + 1 - len(self.steps) if self.steps else 0

    def position(self, step: int) -> dict[str, float]:
        """A step on every axis, as of the last recorded step up to it; nan if unknown."""
        index = bisect_right(self.steps, step) - 1
        return {"step": step, "tokens": self.tokens[index] if index >= 0 else 0.0,
                "seconds": self.seconds[index] if index >= 0 else 0.0}

    def finite_values(self, column: str) -> Iterator[float]:
        return (value for value in self.columns[column] if math.isfinite(value))


def as_float(value: object) -> float:
    """nan if it is not a number."""
    if isinstance(value, float | int):
        try:
            return float(value)
        except OverflowError:
            pass
    return math.nan


def _as_step(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
