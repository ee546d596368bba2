"""What autograd saves of gathered weights for the backward: which view of which parameter it was, and not its memory.

Weights are released between a unit's forward and its backward, and gathered again into other memory. A view of a weight
that autograd saved, such as the transposed one of a linear layer, would keep the first memory alive: the gradients
would be right, and stage 3 would save nothing. So after the forward of a unit its graph is searched for such views, and
each is replaced by a reference to the parameter, which is looked up in the buffer of the backward's gather. Everything
else that autograd saves stays as it is, and gradients do not depend on the search.

A backward must find its weights unchanged. A parameter's version counter, which autograd keeps for that, also tells
whether it is gathered: it is one higher while the parameter is split (edits.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.gradients import STAGE3_OUTPUT_RULE

INPLACE_CHANGE_TEXT = "has been modified by an inplace operation"
"""What autograd says of a saved tensor of another version."""

_SEARCHED_KEY = "zero_searched"
"""Marks the nodes at which a search ended: those of a unit's outputs."""

_saved_fields: dict[type[Node], list[str]] = {}
"""Kind of node -> the attributes with what it has saved."""


class SavedParamView(NamedTuple):
    """A view of a gathered parameter."""

    bucket: FlatBucket
    parameter: Tensor
    version: int
    dtype: torch.dtype
    offset: int
    """In the storage of the gathered buffer, in elements of this dtype."""
    size: torch.Size
    stride: tuple[int, ...]

    def resolve(self) -> Tensor:
        if self.parameter._version != self.version:
            raise ConfigError(f"a backward came to {self.bucket.describe(self.parameter)} while it was split over the "
                              f"ranks, or after it was written to: {STAGE3_OUTPUT_RULE}")
        storage = self.bucket.gathered_params.untyped_storage()
        nothing = torch.empty(0, dtype=self.dtype, device=storage.device)
        return nothing.set_(storage, self.offset, self.size, self.stride)


def save_params_by_reference(outputs: Iterable[Tensor], buckets: Sequence[FlatBucket]) -> None:
    """Of the graph that a unit's forward has made, from its `outputs` back to those of the units before it."""
    # What was written to within the forward is left to autograd, which knows the versions it saved, and refuses it.
    of_storage = {
        bucket.gathered_params.untyped_storage()._cdata: bucket
        for bucket in buckets if not bucket.has_user_writes
    }
    ends = [output.grad_fn for output in outputs if output.grad_fn is not None]
    nodes, seen = [*ends], set[Node]()
    while nodes:
        node = nodes.pop()
        if node in seen or _SEARCHED_KEY in _metadata(node):
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions if before is not None]
        for saved in _iter_saved_tensors(node):
            if saved.unpack_hook is None and (weight := _find_param_view(saved.data, of_storage)) is not None:
                saved.register_hooks(partial(_pack, weight), SavedParamView.resolve)
    for node in ends:
        _metadata(node)[_SEARCHED_KEY] = True


def _metadata(node: Node) -> dict[str, Any]:
    found: Any = node.metadata  # torch's annotation says that it is a function
    return found  # type: ignore[no-any-return]


def _pack(saved: SavedParamView, tensor: Tensor) -> SavedParamView:
    return saved


def _iter_saved_tensors(node: Node) -> Iterator[Any]:
    kind = type(node)
    if kind not in _saved_fields:
        _saved_fields[kind] = [name for name in dir(kind) if name.startswith("_raw_saved")]
    for name in _saved_fields[kind]:
        found = getattr(node, name)
        yield from found if isinstance(found, tuple | list) else () if found is None else (found,)


def _find_param_view(saved: object, of_storage: Mapping[int, FlatBucket]) -> SavedParamView | None:
    """`saved` is what autograd holds: a tensor, or what other saved-tensor hooks made of one. (A parameter itself is
    without memory while it is split. A view that negates has more than a size and strides.)"""
    if type(saved) is not Tensor or not torch._C._has_storage(saved) or saved.is_neg() or saved.is_conj():
        return None
    bucket = of_storage.get(saved.untyped_storage()._cdata)
    if bucket is None:
        return None
    place = saved.storage_offset() * saved.element_size() // bucket.gathered_params.element_size()
    index = bisect_right(bucket.layout.slots, place, key=lambda slot: slot.offset) - 1
    parameter = bucket.parameters[index]
    return SavedParamView(bucket, parameter, parameter._version, saved.dtype, int(saved.storage_offset()), saved.shape,
                          saved.stride())
