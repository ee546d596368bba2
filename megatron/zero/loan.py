"""A loan: what a user was given of a bucket (`zero.GatheredParameters`), beside what it was before.

The bucket makes its parameters whole, and splits them again. The loan knows what was written to them meanwhile, and
brings the edits that count to the shelves of what lasts.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.homes.shelf import WEIGHT, Shelf
from megatron.zero.layout import FlatLayout
from megatron.zero.placeholder import fill


@final
class Loan:
    def __init__(self, whole: Tensor, layout: FlatLayout, rank: int, *, came_for_it: bool) -> None:
        """Of `whole`, of which `rank` keeps its part. `came_for_it`: it was split before, and will be again."""
        self._whole, self._layout, self.came_for_it = whole, layout, came_for_it
        start = rank * layout.shard_numel
        self._own = slice(start, start + layout.shard_numel)
        self._before = whole.clone()

    @property
    def own_before(self) -> Tensor:
        """This rank's part, as it was lent; it is what counts until the loan ends."""
        return self._before[self._own]

    def first_edited(self) -> str | None:
        """The first parameter that is not what it was; by bits: nan is not nan."""
        now, before = self._whole.view(torch.uint8), self._before.view(torch.uint8)
        if torch.equal(now, before):
            return None
        size = self._whole.element_size()
        names = (slot.name for slot in self._layout.slots
                 if not torch.equal(*(flat[slot.offset * size : slot.end * size] for flat in (now, before))))
        return next(names, None)

    def keep_edits(self, work: Shelf, kept: Shelf) -> None:
        """This rank's part of what is lent now becomes the weights at work, and what lasts beside them."""
        new, old = self._whole[self._own], self.own_before
        work.write(WEIGHT, 0, new)
        for part in kept.parts if kept is not work else ():
            edited = new[part] != old[part]
            if edited.any():
                with kept.open(part, [WEIGHT], writes=True) as opened:  # others keep the bits that `new` has not
                    masters = opened[WEIGHT]
                    there = edited.to(masters.device)
                    masters[there] = new[part][edited].to(masters.device, masters.dtype)

    def undo(self) -> None:
        self._whole.copy_(self._before)


def bring_home(name: str, parameter: nn.Parameter, view: Tensor) -> None:
    """`p.data = ...` is an edit of what was lent too: its values go where the parameter was, and it goes back there."""
    if (parameter.shape, parameter.dtype) != (view.shape, view.dtype):
        raise ConfigError(f"{name} became a tensor of {parameter.dtype} and shape {list(parameter.shape)} inside "
                          f"GatheredParameters; the engine trains {view.dtype} of shape {list(view.shape)}: give "
                          "it values of that kind")
    view.copy_(parameter.detach())
    fill(parameter, view)
