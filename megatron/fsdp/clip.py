"""`clip_grad_norm_` over sharded parameters: the norm of the gradients of all ranks together.

Squares are summed by rows that begin at parameter borders (mpu/grads.py), so the norm is the same to the bit for any
wrapping and number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.fsdp.root import reshard_models_with
from megatron.fsdp.sharded_tensor import ShardedParam, bucket_of, gradient_of, local_tensor
from megatron.zero.bucket import FlatBucket
from mpu.collectives import all_reduce
from mpu.grads import norm_term
from mpu.groups import SOLO, Group


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, but collective. Parameters that are not sharded count once."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    reshard_models_with(given)
    by_bucket: dict[FlatBucket, list[ShardedParam]] = defaultdict(list)
    for one in given:
        if isinstance(one, ShardedParam):
            by_bucket[bucket_of(one)].append(one)
    groups = {bucket.dp for bucket in by_bucket}
    if len(groups) > 1:
        raise ConfigError("the parameters are sharded over different groups of ranks: clip those of each group by "
                          "themselves")
    group = next(iter(groups), SOLO)
    sharded = [grad for bucket, members in by_bucket.items() for grad in _local_grads(bucket, members)]
    others = [one.grad for one in given if not isinstance(one, ShardedParam) and one.grad is not None]
    first = next(iter(by_bucket), None)
    if first is None:
        norm_device = others[0].device if others else torch.device("cpu")
    else:  # the same device on all ranks, even if one has no gradient
        norm_device = first.update_device if first.dp.own_backend_serves_cpu else first.device
        first.log.record_barrier("clip_grad_norm_()")
    # unsharded gradients are equal on all ranks: count rank 0's only
    counted = [*sharded, *(others if group.rank == 0 else ())]
    norm = _total_norm(counted, float(norm_type), group, norm_device)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise NumericsError(f"the norm of order {norm_type} of all gradients is {float(norm)}: they cannot be clipped")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for grad in (*sharded, *others):
        by_kind[grad.dtype, grad.device].append(grad)
    for (dtype, device), grads in by_kind.items():
        torch._foreach_mul_(grads, factor.to(device, dtype))
    return norm


def _local_grads(bucket: FlatBucket, parameters: Sequence[ShardedParam]) -> Iterator[Tensor]:
    """This rank's gradients of these parameters: the bucket's flat shard in one piece if the user replaced none."""
    grads = [None if (one := gradient_of(parameter)) is None else local_tensor(one) for parameter in parameters]
    if len(parameters) == len(bucket.parameters) and bucket.grads.is_reduced:
        address = bucket.grads.shard.untyped_storage().data_ptr()
        if all(one is not None and (not one.numel() or one.untyped_storage().data_ptr() == address) for one in grads):
            yield bucket.grads.shard
            return
    yield from (one for one in grads if one is not None)


def _total_norm(grads: Sequence[Tensor], order: float, group: Group, device: torch.device) -> Tensor:
    """A 0-dimensional fp32 tensor, summed in fp64 over this rank and the group. Collective."""
    terms = [norm_term(one, order).to(device) for one in grads if one.numel()]
    stacked = torch.stack(terms) if terms else torch.zeros(1, dtype=torch.float64, device=device)
    if order == math.inf:
        return all_reduce(stacked.max(), group, "max").float()
    return all_reduce(stacked.sum(), group).pow(1 / order).float()
