"""A loan: what a user was given of a bucket (`zero.GatheredParameters`), beside what it was before.

The bucket makes its parameters whole, and splits them again. The loan knows what was written to them meanwhile, and
brings the edits that count to the shelves of what lasts.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.homes.shelf import WEIGHT, StoredShard
from megatron.zero.layout import FlatLayout
from megatron.zero.placeholder import set_param_data


@final
class GatheredParamsSession:
    def __init__(self, gathered_params: Tensor, layout: FlatLayout, rank: int, *, was_sharded: bool) -> None:
        """Of `whole`, of which `rank` keeps its part. `was_sharded`: it was split before, and will be again."""
        self._gathered_params, self._layout, self.was_sharded = gathered_params, layout, was_sharded
        start = rank * layout.shard_numel
        self._shard_range = slice(start, start + layout.shard_numel)
        self._before = gathered_params.clone()

    @property
    def shard_before(self) -> Tensor:
        """This rank's part, as it was lent; it is what counts until the loan ends."""
        return self._before[self._shard_range]

    def first_modified(self) -> str | None:
        """The first parameter that is not what it was; by bits: nan is not nan."""
        now, before = self._gathered_params.view(torch.uint8), self._before.view(torch.uint8)
        if torch.equal(now, before):
            return None
        size = self._gathered_params.element_size()
        names = (slot.name for slot in self._layout.slots
                 if not torch.equal(*(flat[slot.offset * size : slot.end * size] for flat in (now, before))))
        return next(names, None)

    def store_modified_shard(self, param_shard: StoredShard, master_state: StoredShard) -> None:
        """This rank's part of what is lent now becomes the weights at work, and what lasts beside them."""
        new, old = self._gathered_params[self._shard_range], self.shard_before
        param_shard.write(WEIGHT, 0, new)
        for chunk in master_state.chunks if master_state is not param_shard else ():
            edited = new[chunk] != old[chunk]
            if edited.any():
                with master_state.open(chunk, [WEIGHT],
                                       writes=True) as opened:  # others keep the bits that `new` has not
                    masters = opened[WEIGHT]
                    there = edited.to(masters.device)
                    masters[there] = new[chunk][edited].to(masters.device, masters.dtype)

    def undo_modifications(self) -> None:
        self._gathered_params.copy_(self._before)


def copy_into_buffer(name: str, parameter: nn.Parameter, view: Tensor) -> None:
    """`p.data = ...` is an edit of what was lent too: its values go where the parameter was, and it goes back there."""
    if (parameter.shape, parameter.dtype) != (view.shape, view.dtype):
        raise ConfigError(f"{name} became a tensor of {parameter.dtype} and shape {list(parameter.shape)} inside "
                          f"GatheredParameters; the engine trains {view.dtype} of shape {list(view.shape)}: give "
                          "it values of that kind")
    view.copy_(parameter.detach())
    set_param_data(parameter, view)
