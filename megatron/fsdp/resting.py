"""Before parameters are used as shards: what a forward without a backward has left whole is split again.

A forward with gradients leaves the outermost module whole, since its backward is next. Where none comes, an optimizer,
a clip or a state dict may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import Tensor

from megatron.fsdp.gradients import check_summed
from megatron.fsdp.root import Root
from megatron.zero.hooks import before_every_step

_ROOTS: WeakSet[Root] = WeakSet()


def know(root: Root) -> None:
    _ROOTS.add(root)


def rest_around(parameters: Iterable[Tensor]) -> None:
    """Of all models that have one of these."""
    wanted = {id(one) for one in parameters} if _ROOTS else set()
    for root in list(_ROOTS):
        if root.residency.live and any(id(one) in wanted for bucket in root.buckets for one in bucket.parameters):
            root.rest_between()


def _before_step(parameters: list[Tensor], has_closure: bool) -> None:
    rest_around(parameters)
    if not has_closure:  # which makes other gradients
        check_summed(parameters)  # before an optimizer has changed some weights, or decayed them


before_every_step(_before_step)
