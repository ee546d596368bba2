"""The records of a run -> its history: one line of steps, whatever was killed and resumed.

A *start* is a time the trainer began to write, with its configuration; one after step 0 is a resume. What was recorded
of later steps until then is given up: the run goes on from there, so each step counts once, and the last time it was
taken. A step back without a start, in a file that has starts, is another run's. Not here: how a file is read (read.py).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from megatron.report.read import Record

COLUMNS = ("lm_loss", "learning_rate", "grad_norm", "loss_scale", "tokens_per_s", "tflops", "mfu", "max_memory_bytes",
           "step_ms", "consumed_samples", "skipped", "drive_wait_ms", "pld_theta")
"""What is kept of a step, by its name in the file; nan where it is not there, or not finite."""

NO_SETTINGS = ("config", "start", "began", "values")
"""In the record of a start."""


@dataclass
class Start:
    step: int
    """The last one before it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its record: facts, and under "values" the configuration by section; empty where the file does not say."""
    given_up: int = 0
    """Steps that had been recorded beyond it."""
    reached: int = 0
    """The last step that it recorded."""

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted name, and the facts beside it."""
        facts = {name: value for name, value in self.config.items() if name not in NO_SETTINGS}
        sections = _object(self.config.get("values"))
        return facts | {f"{section}.{name}": value for section, fields in sections.items()
                        for name, value in _object(fields).items()}


@dataclass(frozen=True)
class Evaluation:
    split: str
    step: int
    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Save:
    step: int
    tag: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Place:
    """A step on every axis; nan where the file does not say."""

    step: int
    tokens: float
    seconds: float


class History:
    """Filled by `read`; steps are in order, and each is there once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = array("q")
        self.columns = {column: array("d") for column in COLUMNS}
        self.tokens, self.seconds = array("d"), array("d")
        """Seen by then, and trained for, with all steps before."""
        self.starts: list[Start] = []
        self.saves: list[Save] = []
        self.out_of_order = 0
        """Steps behind a later one, though the file says where it starts: of another run that writes into it."""
        self._evaluations: dict[tuple[str, int], Evaluation] = {}

    # ---- from records ---------------------------------------------------------------------------------------------

    def read(self, records: Iterable[Record]) -> History:
        for record in records:
            step = _step(record.get("iteration"))
            if record.get("config") is True:
                self._start(Start(_step(record.get("start")) or 0, record))
            elif record.get("save") is True and (saved := _step(record.get("step"))) is not None:
                self.saves.append(Save(saved, str(record.get("tag")), number(record.get("bytes")),
                                       number(record.get("seconds"))))
            elif step is not None and record.get("eval") is True:
                found = Evaluation(str(record.get("split", "validation")), step, number(record.get("lm_loss")),
                                   number(record.get("bits_per_byte")))
                self._evaluations[found.split, step] = found
            elif step:
                self._step(step, record)
        self.seconds = array("d", accumulate(value / 1e3 if math.isfinite(value) else 0.0
                                             for value in self.columns["step_ms"]))
        length = self._sequence_length()
        self.tokens = array("d", (samples * length for samples in self.columns["consumed_samples"]))
        return self

    def _start(self, start: Start) -> None:
        start.given_up, start.reached = self._go_back(start.step), start.step
        self.starts.append(start)

    def _go_back(self, step: int) -> int:
        """The run goes on after `step`: what lies beyond has not happened. So many steps did."""
        kept = bisect_right(self.steps, step)
        beyond = len(self.steps) - kept
        del self.steps[kept:]
        for column in self.columns.values():
            del column[kept:]
        self.saves = [save for save in self.saves if save.step <= step]
        self._evaluations = {key: found for key, found in self._evaluations.items() if found.step <= step}
        return beyond

    def _step(self, step: int, record: Record) -> None:
        is_behind = bool(self.steps) and step <= self.steps[-1]
        if is_behind and self.starts[-1].config:
            self._go_back(step - 1)
            self.out_of_order += 1
        elif is_behind or not self.starts:  # of a file that does not say where it starts
            self._start(Start(step - 1))
        self.starts[-1].reached = max(step, self.starts[-1].reached)
        self.steps.append(step)
        for name, column in self.columns.items():
            value = record.get(name)
            column.append(value if type(value) is float else number(value))  # most are: a call less

    def _sequence_length(self) -> float:
        """Tokens of a sample: as configured, or from what two steps say of tokens and samples."""
        settings = self.settings
        said = settings.get("data.seq_length") or settings.get("model.max_position_embeddings")
        if said is not None:
            return number(said)
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
    def evaluations(self) -> list[Evaluation]:
        return sorted(self._evaluations.values(), key=lambda found: (found.step, found.split))

    @property
    def resumes(self) -> list[Start]:
        """The starts where the line goes on that was there before."""
        lasting, lowest = list[Start](), math.inf
        for start in reversed(self.starts):
            if 0 < start.step < lowest:
                lasting.append(start)
            lowest = min(lowest, start.step)
        return lasting[::-1]

    @property
    def missing(self) -> int:
        """Steps between the first and the last that no record tells of."""
        return self.steps[-1] - self.steps[0] + 1 - len(self.steps) if self.steps else 0

    def place(self, step: int) -> Place:
        """Of the last recorded step until then."""
        index = bisect_right(self.steps, step) - 1
        return Place(step, self.tokens[index], self.seconds[index]) if index >= 0 else Place(step, 0.0, 0.0)

    def finite(self, column: str) -> Iterator[float]:
        return (value for value in self.columns[column] if math.isfinite(value))


def number(value: object) -> float:
    """nan for what is none."""
    if isinstance(value, float | int):
        try:
            return float(value)
        except OverflowError:
            pass
    return math.nan


def _step(value: object) -> int | None:
    """A number of steps, if that is what it is."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
