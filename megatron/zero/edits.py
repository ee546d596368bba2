"""Edits: whether somebody wrote to the parameters of a bucket where nothing lasts, so that the next step would undo it.

torch counts the writes to a parameter (`_version`): in-place operations on it and on what `detach()` gives, functions
of `nn.init` and the like. Looking at the counts costs 0.1 ms for 1,200 parameters. Writes to `p.data` are not counted:
those are found where values are compared, now and then (`Edits.check`, `thoroughly`). The engine itself writes to its
flat buffers, which have other counts. While a parameter is split its count is one higher than before, so that a
backward that comes to it then is refused (saved_weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.homes.shelf import WEIGHT, Shelf
from megatron.zero.layout import FlatLayout

OfMasters = Callable[[slice, Tensor], Tensor]
"""A part of the masters -> the weights at work that it is, in the precision of either."""

AT_A_TIME = 1 << 24
"""Elements that are compared at a time."""


class Edits:
    """Of the parameters of one bucket."""

    def __init__(self, layout: FlatLayout, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self._layout, self._parameters, self._rank = layout, parameters, rank
        self._lost: str | None = None  # a parameter that was written to where it did not last; for `heed` alone
        self.note()

    def note(self) -> None:
        """What has been written so far has been dealt with."""
        with torch._C.DisableTorchFunctionSubclass():  # placeholders have counts too
            self._counts = self._count()

    def heed(self) -> bool:
        """Where writes to what is left of the parameters last: whether there were any since `note`. They have been
        dealt with; those to a whole that has left since are lost, and refused."""
        if self._lost is not None:
            name, self._lost = self._lost, None
            raise ConfigError(
                f"{name} was written to while all of it was here, in a forward or between that and its backward, and "
                "that is lost: change weights after the backward, or inside summon_full_params()")
        counts = self._counts
        self.note()
        return counts != self._counts

    def leave(self) -> None:
        """The whole parameters leave, with what was written to them."""
        if self._lost is None:
            self._lost = self.first_touched()
        self.shift(+1)

    def first_touched(self) -> str | None:
        """The first parameter that was written to since `note`."""
        counts = self._count()
        if counts == self._counts:
            return None
        return next(slot.name for slot, now, before in zip(self._layout.slots, counts, self._counts) if now != before)

    def shift(self, by: int) -> None:
        """Let the parameters leave (+1) or come back (-1), which is no write."""
        count_versions(self._parameters, by)
        self._counts = [count + by for count in self._counts]

    def _count(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def check(self, work: Tensor | None, masters: Shelf, of_masters: OfMasters, *, thoroughly: bool) -> None:
        """Refuse writes since `note`. `work`, where the parameters are whole, is this rank's part of them, made
        `of_masters`: where no rank has another part, a write that was undone does not count. `thoroughly` compares
        them in any case. (The caller has switched `__torch_function__` off.)"""
        counts = self._count()
        if counts == self._counts and (work is None or not thoroughly):  # nearly always
            return
        touched = [slot.name for slot, *pair in zip(self._layout.slots, counts, self._counts) if pair[0] != pair[1]]
        if work is not None and (touched or thoroughly):
            if (edited := self._edited(work, masters, of_masters)) is not None:
                self._refuse(edited)
        self._counts = counts
        if touched and (work is None or self._layout.shards > 1):
            self._refuse(touched[0])

    def _edited(self, work: Tensor, masters: Shelf, of_masters: OfMasters) -> str | None:
        """The first parameter that is not what was made of the masters."""
        for part in masters.parts:
            with masters.open(part, [WEIGHT]) as kept:
                master = of_masters(part, kept[WEIGHT])
                if not any(map(_differ, work[part].split(AT_A_TIME), master.split(AT_A_TIME))):
                    continue
                for segment in self._layout.segments(self._rank, part):
                    run = slice(segment.shard_offset, segment.shard_offset + segment.count)
                    if _differ(work[run], master[run.start - part.start : run.stop - part.start]):
                        return segment.slot.name  # else it is padding
        return None

    def _refuse(self, name: str) -> None:
        raise ConfigError(
            f"{name} was written to in place since the last step (copy_(), `p.data.mul_()`, nn.init and the like), and "
            "that would not last: the engine keeps fp32 masters or shards beside it. Write inside "
            "zero.GatheredParameters(parameters, modifier_rank=0), or call engine.load_module_state_dict(state)")


def count_versions(parameters: Sequence[Tensor], by: int) -> None:
    """Add `by` to the counters."""
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple([one._version + by for one in parameters]))


def _differ(work: Tensor, master: Tensor) -> bool:
    wanted = master.to(work.device, work.dtype)
    if torch.equal(work, wanted):
        return False
    return bool((work != wanted).logical_and(work.eq(work) | wanted.eq(wanted)).any())  # nan is nan
