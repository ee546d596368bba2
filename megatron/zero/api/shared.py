"""What the shared state of a checkpoint must be to be used: every field by its type and range, before anything changes.

Its bytes are known to be those that were saved; whether they mean something is another question. A field that does not
is an error of the checkpoint that names it, and not whatever the code that uses it happens to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.checkpoint.part import SHARED_STATE_FILE
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.strict import StrictRecord
from megatron.errors import CheckpointError

COUNTERS = ("global_steps", "skipped_steps", "micro_steps", "optimizer_steps", "clean_steps", "hysteresis_left")
LOOP_COUNTERS = ("global_samples", "train_batch_size", "epoch")


def shared_state_label(found: Checkpoint) -> str:
    return f"tag {found.tag}: file {SHARED_STATE_FILE}"


def check_shared_state(found: Checkpoint) -> None:
    """All of it but the client's own, and what a scheduler or an optimizer makes of its part."""
    where = shared_state_label(found)
    state = StrictRecord(found.shared_state, where)
    state.take_field("run_id", str)
    engine = StrictRecord(state.take_field("engine", dict), f"{where}: field 'engine'")
    if engine.fields:  # imported weights come from no engine
        for name in COUNTERS:
            engine.take_count(name)
        engine.take_number("loss_scale", above=0)
        engine.take_field("rule", dict)
        if "quantisation" in engine.fields:
            _check_quantisation(StrictRecord(engine.take_field("quantisation", dict), f"{where}: field 'quantisation'"))
        engine.check_all_taken()
    if state.fields.get("optimizer") is not None:
        state.take_field("optimizer", str)
    if not all(isinstance(kind, str) for kind in (state.take_field("owed", list) if "owed" in state.fields else ())):
        raise CheckpointError(f"{where}: field 'owed': expected names of kinds of state")
    for index, group in enumerate(state.take_field("param_groups", list) if "param_groups" in state.fields else ()):
        StrictRecord(group, f"{where}: param_groups[{index}]")
    if state.fields.get("lr_scheduler") is not None:
        state.take_field("lr_scheduler", dict)
    for name, value in state.take_field("buffers", dict).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{where}: buffer {name!r:.80}: expected a tensor, found {type(value).__name__}")
    if not all(
            isinstance(name, str)
            for name in (state.take_field("tied", dict) if "tied" in state.fields else {}).values()):
        raise CheckpointError(f"{where}: field 'tied': expected names of tensors")
    loop = StrictRecord(state.take_field("loop", dict) if "loop" in state.fields else {}, f"{where}: field 'loop'")
    for name in LOOP_COUNTERS:
        if loop.fields.get(name) is not None:
            loop.take_count(name)
    state.take_field("client_state", dict)
    state.fields = {name: value for name, value in state.fields.items() if value is not None}
    state.check_all_taken()


def _check_quantisation(state: StrictRecord) -> None:
    """Its counter, and one name, and one number of each kind, for every block; and the names of what is rounded."""
    state.take_count("counter")
    if not all(
            isinstance(name, str) for name in (state.take_field("rounded", list) if "rounded" in state.fields else ())):
        raise CheckpointError(f"{state.where}: field 'rounded': expected names of parameters")
    counts = {len(state.take_counts(name)) for name in ("bits", "periods", "fell_at", "factors")}
    counts.add(len([name for name in state.take_field("blocks", list) if isinstance(name, str)]))
    if len(counts) != 1 or 0 in counts:
        raise CheckpointError(f"{state.where}: bits, periods, fell_at and factors are not of the same blocks")
    state.check_all_taken()


def check_hyper_parameters(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Hyper-parameters are what those of the groups are: numbers, texts, pairs of numbers."""
    for index, (values, group) in enumerate(zip(saved, groups, strict=True)):
        for name, value in values.items():
            if name in group and not _is_same_kind(group[name], value):
                raise CheckpointError(f"{where}: param_groups[{index}]: field {name!r:.80}: {value!r:.80} in the place "
                                      f"of {group[name]!r:.80}")


def _is_same_kind(current: Any, value: Any) -> bool:
    if current is None or value is None:
        return True
    if isinstance(current, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(current) and all(map(
            _is_same_kind, current, value))
    if isinstance(current, str):
        return isinstance(value, str)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")
