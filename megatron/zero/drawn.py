"""A parameter whose initial values are not there yet: whoever takes it over draws the elements it keeps.

The layers have marked it with a source (mpu/draws.py), which gives any run of its values. Nothing is drawn twice, no
rank draws what it does not keep, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from megatron.zero.holders import holder_of
from megatron.zero.layout import FlatLayout
from megatron.zero.waiting import Building, Waiting
from mpu.collectives import broadcast_into
from mpu.draws import Source, source_of
from mpu.groups import Group


@final
class Drawn(Waiting):
    def __init__(self, parameter: nn.Parameter, source: Source, dp: Group, building: Building = Building()) -> None:
        super().__init__(parameter, parameter.dtype, dp, building)
        self.source = source
        self._edited: Tensor | None = None
        self._hold()

    @property
    def is_edited(self) -> bool:
        """The values are no longer those of the source."""
        return self._edited is not None

    def whole(self, device: torch.device | None = None) -> Tensor:
        """All elements, drawn here."""
        if self._edited is not None:
            return self._edited.to(device)
        flat = torch.empty(self._shape.numel(), device=device)
        self.source(flat, 0)
        return flat.view(self._shape).to(self._dtype)

    def _is_unedited(self, value: Tensor) -> bool:
        return torch.equal(value, self.whole(value.device))

    def take_back(self, editor: int | None) -> None:
        value = self._parameter.detach()
        if editor is not None:
            self._edited = value.contiguous()
            broadcast_into(self._edited, editor, self._dp).wait()
        self._vacate()

    def _twin(self) -> None:
        """Edited values are never written to."""


def is_unfilled(parameter: nn.Parameter) -> bool:
    """There is no room for its values: it has a source, or will have one (mpu/draws.py)."""
    return parameter.is_meta or parameter.untyped_storage().nbytes() < parameter.nbytes


def draw_later(parameters: Iterable[nn.Parameter], dp: Group) -> None:
    """Leave placeholders where there is a source."""
    for parameter in parameters:
        if (source := source_of(parameter)) is not None and holder_of(parameter) is None:
            Drawn(parameter, source, dp)


def sources_of(parameters: Sequence[nn.Parameter]) -> list[Source] | None:
    """Where all these parameters are still to be drawn: from what."""
    holders = [holder_of(parameter) for parameter in parameters]
    found = [holder.source for holder in holders if isinstance(holder, Drawn) and not holder.is_edited]
    return found if len(found) == len(holders) else None


def draw_run(out: Tensor, layout: FlatLayout, rank: int, part: slice, sources: Sequence[Source]) -> None:
    """Fill a part of a shard of a flat buffer, in fp32; padding is left alone."""
    of = dict(zip((slot.name for slot in layout.slots), sources, strict=True))
    for segment in layout.segments(rank, part):
        run = out[segment.shard_offset - part.start : segment.shard_offset - part.start + segment.count]
        of[segment.slot.name](run, segment.slot_offset)
