"""`clip_grad_norm_` over sharded parameters: the norm of the gradients of all ranks together.

Squares are summed by rows that begin at parameter borders (mpu/grads.py), so the norm is the same to the bit for any
wrapping and number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.fsdp.root import reshard_models_with
from megatron.fsdp.sharded_tensor import ShardedParam, bucket_of, gradient_of, local_tensor
from megatron.zero.bucket import FlatBucket
from mpu.collectives import all_reduce
from mpu.grads import sum_of_squares
from mpu.groups import SOLO, Group


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, but collective. Parameters that are not sharded count once."""
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    reshard_models_with(found)
    buckets = _group_by_bucket(found)
    group = _common_group(buckets)
    sharded = [run for bucket, members in buckets.items() for run in _local_grads(bucket, members)]
    others = [one.grad for one in found if not isinstance(one, ShardedParam) and one.grad is not None]
    if buckets:
        next(iter(buckets)).log.record_barrier("clip_grad_norm_()")
    # unsharded gradients are equal on all ranks: count rank 0's only
    norm = total_norm([*sharded, *(others if group.rank == 0 else ())], float(norm_type), group,
                      _norm_device(sharded, others, buckets))
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise NumericsError(f"the norm of order {norm_type} of all gradients is {float(norm)}: they cannot be clipped")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for (dtype, device), some in _group_by_dtype_and_device([*sharded, *others]).items():
        torch._foreach_mul_(some, factor.to(device, dtype))
    return norm


def _group_by_bucket(parameters: Sequence[Tensor]) -> dict[FlatBucket, list[ShardedParam]]:
    found: dict[FlatBucket, list[ShardedParam]] = {}
    for one in parameters:
        if isinstance(one, ShardedParam):
            found.setdefault(bucket_of(one), []).append(one)
    return found


def _common_group(buckets: Iterable[FlatBucket]) -> Group:
    found = {bucket.dp for bucket in buckets}
    if len(found) > 1:
        raise ConfigError("the parameters are sharded over different groups of ranks: clip those of each group by "
                          "themselves")
    return next(iter(found), SOLO)


def _local_grads(bucket: FlatBucket, parameters: Sequence[ShardedParam]) -> Iterator[Tensor]:
    """This rank's gradients of these parameters: the bucket's flat shard in one piece if the user replaced none."""
    gradients = [None if (one := gradient_of(parameter)) is None else local_tensor(one) for parameter in parameters]
    if len(parameters) == len(bucket.parameters) and bucket.grads.is_reduced and all(
            one is not None and (not one.numel() or _shares_storage(one, bucket.grads.shard)) for one in gradients):
        yield bucket.grads.shard
    else:
        yield from (one for one in gradients if one is not None)


def _shares_storage(grad: Tensor, shard: Tensor) -> bool:
    return grad.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()


def _norm_device(sharded: Sequence[Tensor], others: Sequence[Tensor], buckets: Iterable[FlatBucket]) -> torch.device:
    """The device of the norm. It must be the same on all ranks, even if one has no gradient."""
    first = next(iter(buckets), None)
    if first is not None:
        return first.update_device if first.dp.own_backend_serves_cpu else first.device
    return next((one.device for one in (*sharded, *others)), torch.device("cpu"))


def _group_by_dtype_and_device(gradients: Iterable[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for one in gradients:
        found.setdefault((one.dtype, one.device), []).append(one)
    return found


def total_norm(grads: Sequence[Tensor], order: float, group: Group, device: torch.device) -> Tensor:
    """A 0-dimensional fp32 tensor, summed in fp64 over this rank and the group. Collective."""
    parts = [_local_term(one, order).to(device) for one in grads if one.numel()]
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    if order == math.inf:
        return all_reduce(torch.stack(parts).max() if parts else nothing, group, "max").float()
    return all_reduce(torch.stack(parts).sum() if parts else nothing, group).pow(1 / order).float()


def _local_term(gradient: Tensor, order: float) -> Tensor:
    if order == math.inf:
        return gradient.abs().max().double()
    return sum_of_squares(gradient) if order == 2 else gradient.double().abs().pow(order).sum()
