"""Before parameters are used as shards: what a forward without a backward has left whole is split again.

A forward with gradients leaves the outermost module whole, since its backward is next. Where none comes, an optimizer,
a clip or a state dict may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron.fsdp.root import Root

_ROOTS: WeakSet[Root] = WeakSet()


def know(root: Root) -> None:
    _ROOTS.add(root)


def rest_around(parameters: Iterable[Tensor]) -> None:
    """Of all models that have one of these."""
    wanted = {id(one) for one in parameters}
    for root in list(_ROOTS):
        if root.residency.live and any(id(one) in wanted for bucket in root.buckets for one in bucket.parameters):
            root.rest_between()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _ROOTS:
        rest_around(one for group in optimizer.param_groups for one in group["params"])


register_optimizer_step_pre_hook(_before_step)
