"""Where a saved run was: the state of its loop, its schedule and the text it read, as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from megatron.checkpoint.strict import Record, sense_of
from megatron.errors import CheckpointError
from megatron.optim.schedule import Schedule
from megatron.train.loop import TrainState

OWN = ("iteration", "consumed_samples", "owes_evaluation", "schedule", "data")
"""Fields of the client state that are of it."""


@dataclass(frozen=True)
class Position:
    state: TrainState
    schedule: Schedule
    data: str
    """The fingerprint of the text."""


def position_in(saved: Mapping[str, Any], where: str) -> Position:
    record = Record({name: saved[name] for name in OWN if name in saved}, where)
    schedule = _schedule(Record(record.take("schedule", dict), f"{where}: schedule"))
    owes = record.take("owes_evaluation", bool) if "owes_evaluation" in record.fields else False
    state = TrainState(record.count("iteration"), record.count("consumed_samples"), owes)
    with sense_of(f"{where}: schedule"):
        schedule(state.iteration)
        schedule.betas(state.iteration)
    return Position(state, schedule, record.take("data", str))


def _schedule(said: Record) -> Schedule:
    """Fields of later versions may be missing; one that is not known would be ignored, and is refused."""
    values: dict[str, Any] = {}
    for item in fields(Schedule):
        if item.name not in said.fields:
            if item.default is MISSING:
                raise CheckpointError(f"{said.where}: field {item.name!r} is missing")
        elif item.type == "str":
            values[item.name] = said.take(item.name, str)
        elif item.type == "int":
            values[item.name] = said.count(item.name)
        elif said.fields[item.name] is None and item.default is None:
            del said.fields[item.name]
        else:
            values[item.name] = said.number(item.name)
    said.done()
    return Schedule(**values)
