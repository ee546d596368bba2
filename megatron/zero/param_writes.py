"""User writes to parameters: those inside `GatheredParameters` are kept, those the next step would undo are refused.

`InPlaceWriteGuard` compares torch's version counters (0.1 ms for 1,200 parameters). Writes to `p.data` do not count
there; they are found by comparing values at some steps (`compare_values`). While a parameter is sharded its counter
is one higher, so that a backward that saved it before is refused (hooks.py).
`GatheredParamsSession` is the state of one bucket inside the context: it keeps the old values, and stores the
modifications of `modifier_rank` into the masters and the parameter shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.layout import FlatLayout
from megatron.zero.offload.storage import WEIGHT, StoredShard
from megatron.zero.partitioned_param import set_param_data

MasterRounding = Callable[[slice, Tensor], Tensor]
"""(chunk, masters) -> the parameter values of the chunk; the caller casts."""

ELEMENTS_PER_COMPARISON = 1 << 24
"""Elements that are compared at a time."""


class InPlaceWriteGuard:
    def __init__(self, layout: FlatLayout, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self._layout, self._parameters, self._rank = layout, parameters, rank
        self._lost_write: str | None = None  # a parameter written to while gathered; reported by `take_writes`
        self.accept_writes()

    def accept_writes(self) -> None:
        """Take the current version counters as the reference: earlier writes have been handled."""
        with torch._C.DisableTorchFunctionSubclass():  # placeholders have version counters too
            self._versions = self._current_versions()

    def take_writes(self) -> bool:
        """For parameters whose sharded data users may write to (FSDP): whether they wrote since the last call. Raises
        ConfigError for a write to gathered parameters, which the reshard has lost."""
        if self._lost_write is not None:
            name, self._lost_write = self._lost_write, None
            raise ConfigError(
                f"{name} was written to while all of it was here, in a forward or between that and its backward, and "
                "that is lost: change weights after the backward, or inside summon_full_params()")
        counts = self._versions
        self.accept_writes()
        return counts != self._versions

    def before_reshard(self) -> None:
        """Record writes to the gathered parameters, which are about to be lost."""
        if self._lost_write is None:
            self._lost_write = self.first_written()
        self.shift_versions(+1)

    def first_written(self) -> str | None:
        """The first parameter that was written to since `accept_writes`."""
        counts = self._current_versions()
        if counts == self._versions:
            return None
        return next(slot.name for slot, now, before in zip(self._layout.slots, counts, self._versions) if now != before)

    def shift_versions(self, by: int) -> None:
        """Shift the version counters for a reshard (+1) or a gather (-1), without counting it as a write."""
        shift_version_counters(self._parameters, by)
        self._versions = [count + by for count in self._versions]

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def refuse_writes(self, param_shard: Tensor | None, master_state: StoredShard, round_masters: MasterRounding, *,
                      compare_values: bool) -> None:
        """Raise ConfigError for writes since `accept_writes`. Call it with `__torch_function__` switched off.

        `param_shard` is given if the parameters are never sharded; its values are then compared with the rounded
        masters if a version counter has changed, or always with `compare_values`. On a single shard a write that was
        undone does not count."""
        counts = self._current_versions()
        if counts == self._versions and (param_shard is None or not compare_values):  # the common case
            return
        written, modified = self.first_written(), None
        if param_shard is not None and (written is not None or compare_values):
            modified = self._first_modified(param_shard, master_state, round_masters)
        if modified is None:
            self._versions = counts
            if param_shard is None or self._layout.shards > 1:
                modified = written
        if modified is not None:
            raise ConfigError(
                f"{modified} was written to in place since the last step (copy_(), `p.data.mul_()`, nn.init and the "
                "like), and that would not last: the engine keeps fp32 masters or shards beside it. Write inside "
                "zero.GatheredParameters(parameters, modifier_rank=0), or call engine.load_module_state_dict(state)")

    def _first_modified(self, param_shard: Tensor, master_state: StoredShard,
                        round_masters: MasterRounding) -> str | None:
        """The first parameter that differs from its masters."""
        for chunk in master_state.chunks:
            with master_state.open(chunk, [WEIGHT]) as opened:
                master = round_masters(chunk, opened[WEIGHT])
                if not any(map(_values_differ, param_shard[chunk].split(ELEMENTS_PER_COMPARISON),
                               master.split(ELEMENTS_PER_COMPARISON))):
                    continue
                for segment in self._layout.segments(self._rank, chunk):
                    start, stop = segment.shard_offset, segment.shard_offset + segment.count
                    if _values_differ(param_shard[start:stop], master[start - chunk.start : stop - chunk.start]):
                        return segment.slot.name  # if none differs, it was padding
        return None


def shift_version_counters(parameters: Sequence[Tensor], by: int) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple([one._version + by for one in parameters]))


def _values_differ(params: Tensor, master: Tensor) -> bool:
    wanted = master.to(params.device, params.dtype)
    if torch.equal(params, wanted):
        return False
    return bool((params != wanted).logical_and(params.eq(params) | wanted.eq(wanted)).any())  # nan equals nan


@final
class GatheredParamsSession:
    def __init__(self, gathered_params: Tensor, layout: FlatLayout, rank: int, *, was_sharded: bool) -> None:
        """`rank` owns its shard of `gathered_params`. `was_sharded`: sharded before the session, and again after it."""
        self._gathered_params, self._layout, self.was_sharded = gathered_params, layout, was_sharded
        self._shard_range = layout.shard_slice(rank)
        self._before = gathered_params.clone()
        self.shard_before = self._before[self._shard_range]
        """This rank's shard at the start of the session; it counts until the session ends."""

    def first_modified(self) -> str | None:
        """The first parameter whose bits have changed."""
        now, before = self._gathered_params.view(torch.uint8), self._before.view(torch.uint8)
        if torch.equal(now, before):
            return None
        size = self._gathered_params.element_size()
        names = (slot.name for slot in self._layout.slots
                 if not torch.equal(*(flat[slot.offset * size : slot.end * size] for flat in (now, before))))
        return next(names, None)

    def store_modified_shard(self, param_shard: StoredShard, master_state: StoredShard) -> None:
        """Store this rank's part of the gathered parameters in its parameter shard and masters."""
        new, old = self._gathered_params[self._shard_range], self.shard_before
        param_shard.write(WEIGHT, 0, new)
        for chunk in master_state.chunks if master_state is not param_shard else ():
            edited = new[chunk] != old[chunk]
            if edited.any():  # unedited elements keep their fp32 bits
                with master_state.open(chunk, [WEIGHT], writes=True) as opened:
                    masters = opened[WEIGHT]
                    masters[edited.to(masters.device)] = new[chunk][edited].to(masters.device, masters.dtype)

    def undo_modifications(self) -> None:
        self._gathered_params.copy_(self._before)


def copy_into_buffer(name: str, parameter: nn.Parameter, view: Tensor) -> None:
    """`p.data = ...` counts as an edit too: copy its values into `view`, and make the parameter that view again."""
    if (parameter.shape, parameter.dtype) != (view.shape, view.dtype):
        raise ConfigError(f"{name} became a tensor of {parameter.dtype} and shape {list(parameter.shape)} inside "
                          f"GatheredParameters; the engine trains {view.dtype} of shape {list(view.shape)}: give "
                          "it values of that kind")
    view.copy_(parameter.detach())
    set_param_data(parameter, view)
