"""`clip_grad_norm_` over sharded parameters: the norm is that of all ranks' parts together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.fsdp.shard import Shard, bucket_of, gradient_of, local
from mpu.collectives import all_reduce
from mpu.groups import SOLO, Group


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, and every rank calls it. Parameters that are not sharded count once."""
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    group = _group_of(found)
    sharded = [local(gradient) for one in found if isinstance(one, Shard)
               and (gradient := gradient_of(one)) is not None]
    others = [one.grad for one in found if not isinstance(one, Shard) and one.grad is not None]
    norm = total_norm(sharded, others, float(norm_type), group)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise NumericsError(f"the norm of order {norm_type} of all gradients is {float(norm)}: they cannot be clipped")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in (sharded, others):
        by_dtype: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for one in gradients:
            by_dtype.setdefault((one.dtype, one.device), []).append(one)
        for (dtype, device), some in by_dtype.items():
            torch._foreach_mul_(some, factor.to(device, dtype))
    return norm


def _group_of(parameters: Sequence[Tensor]) -> Group:
    found = {bucket.dp for one in parameters if isinstance(one, Shard) and (bucket := bucket_of(one))}
    if len(found) > 1:
        raise ConfigError("the parameters are sharded over different groups of ranks: clip those of each group by "
                          "themselves")
    return next(iter(found), SOLO)


def total_norm(sharded: Sequence[Tensor], others: Sequence[Tensor], order: float, group: Group) -> Tensor:
    """A 0-dimensional fp32 tensor. Sums are in fp64."""
    counted = [*sharded, *(others if group.rank == 0 else ())]
    device = next((one.device for one in (*sharded, *others)), torch.device("cpu"))
    if order == math.inf:
        largest = [one.abs().max().to(device, torch.float64) for one in counted if one.numel()]
        top = torch.stack(largest).max() if largest else torch.zeros((), dtype=torch.float64, device=device)
        return all_reduce(top, group, "max").float()
    parts = [torch.linalg.vector_norm(one, order, dtype=_wide(one)).to(device, torch.float64).pow(order)
             for one in counted if one.numel()]
    total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)
    return all_reduce(total, group).pow(1 / order).float()


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
