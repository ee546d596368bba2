"""`deepspeed.utils`: read and set the fp32 weight, gradient or optimizer state of one parameter; mark leaf modules.

    from megatron.zero.utils import safe_get_full_grad
    gradient = safe_get_full_grad(model.fc.weight)     # between backward and step; every rank calls it

*full* functions are collective over data parallel, and take or return the full parameter (of this tensor parallel
rank). *local* functions use the flat segment that this rank holds, which may be empty. Getters return fp32 copies, or
None without an engine, for a frozen parameter, or without a reduced gradient.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.distributed.collective_log import assert_collective_call
from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket, publish_masters
from megatron.zero.layout import Segment
from megatron.zero.offload.storage import WEIGHT
from megatron.zero.partitioned_param import full_shape, param_owner
from megatron.zero.units import LEAF_ATTRIBUTE
from mpu.collectives import all_reduce

_GRADIENT = "gradient"

logger = logging.getLogger("megatron.zero")  # logs to stdout from level INFO on
if not logger.handlers:  # keep handlers that a script has installed
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.handlers[0].setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_dist(message: object, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log a line on these ranks: [-1] is all ranks, None or [] rank 0."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if {rank, -1} & set(ranks or (0,)):
        logger.log(level, "[Rank %d] %s", rank, message)


# ---- leaf modules: stage 3 gathers each as one unit --------------------------------------------------------------


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Collection[type | str], raise_if_not_found: bool = True,
                        flag: bool = True) -> list[nn.Module]:
    """Mark the modules of these classes (or class names) as leaves, and return them. Call it before zero.initialize.

    All parameters inside a leaf are gathered for its forward. Use it for mixtures of experts, where each rank calls
    other experts. Raises ConfigError if none is found."""
    leaves = []
    for module in model.modules():
        own = type(module)
        names = own.__name__, f"{own.__module__}.{own.__qualname__}"
        if any(issubclass(own, wanted) if isinstance(wanted, type) else wanted in names
               for wanted in leaf_module_classes):
            leaves.append(module)
    if raise_if_not_found and not leaves:
        raise ConfigError(f"no module of {type(model).__name__} is of the classes {[*leaf_module_classes]}: name one "
                          "of print(model)")
    for module in leaves:
        set_z3_leaf_module(module, flag)
    return leaves


unset_z3_leaf_modules = partial(set_z3_leaf_modules, flag=False)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module as a leaf, or remove the mark."""
    for marked in (model, *model.parameters()):
        setattr(marked, LEAF_ATTRIBUTE, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module | nn.Parameter) -> bool:
    """Whether the module, or the module of the parameter, is marked as a leaf."""
    return bool(getattr(model, LEAF_ATTRIBUTE, False))


z3_leaf_parameter = z3_leaf_module


# ---- weights, gradients, optimizer states --------------------------------------------------------------------------


def _trained_bucket(param: nn.Parameter) -> FlatBucket | None:
    owner = param_owner(param)
    return owner if isinstance(owner, FlatBucket) and owner.trainable else None


def _find_segment(param: nn.Parameter, kind: str) -> tuple[FlatBucket, Segment] | None:
    """The bucket and this rank's segment of the state, maybe empty. None without an engine or without a complete
    reduced gradient."""
    bucket = _trained_bucket(param)
    if bucket is not None:
        bucket.check_not_offloaded(f"a look at a {kind}, or setting it,")
    if bucket is None or kind == _GRADIENT and (bucket.grads.skip_reduction or not bucket.grads.has_all_step_grads):
        return None
    if kind != _GRADIENT and kind not in bucket.master_state.kinds:
        raise ConfigError(f"the optimizer keeps no {kind!r}; it keeps "
                          f"{', '.join(kind for kind in bucket.master_state.kinds if kind != WEIGHT) or 'nothing'}")
    slot = bucket.slot_of(param)
    segments = (segment for segment in bucket.layout.segments(bucket.shard_group.rank) if segment.slot is slot)
    return bucket, next(segments, Segment(slot, 0, 0, 0))


def _read_segment(bucket: FlatBucket, segment: Segment, kind: str) -> Tensor:
    out = torch.empty(segment.count, dtype=torch.float32, device=bucket.device)
    if kind == _GRADIENT:
        out.copy_(bucket.grads.shard[segment.shard_range]).mul_(bucket.grad_mean_factor())
    elif kind == WEIGHT:
        bucket.read_master(segment.shard_offset, out)
    else:
        bucket.master_state.read(kind, segment.shard_offset, out)
    return out


def _get_local(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    held = _find_segment(param, optim_state_key)
    return None if held is None else _read_segment(*held, optim_state_key)


def _get_full(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    kind = optim_state_key
    if (held := _find_segment(param, kind)) is None:
        return None
    bucket, segment = held
    if not bucket.shard_group.is_solo:
        _assert_collective(bucket, f"reading the {kind} of {segment.slot.name}")
    full = torch.zeros(segment.slot.numel, dtype=torch.float32, device=bucket.device)
    full[segment.slot_offset : segment.slot_offset + segment.count] = _read_segment(bucket, segment, kind)
    return all_reduce(full, bucket.shard_group).view(full_shape(param))  # each rank has zeros outside its segment


@torch.no_grad()
def _set_value(param: nn.Parameter, value: Tensor, optim_state_key: str, *, is_full: bool = True) -> None:
    kind = optim_state_key
    if (held := _find_segment(param, kind)) is None:
        owner = _trained_bucket(param)
        if owner is None:
            why = "no engine trains this parameter"
        elif owner.grads.skip_reduction:
            why = "at this step the optimizer does not have gradients summed over the ranks, and each has its own"
        else:
            why = "there is no complete gradient: call it between the backward that ends a step and step()"
        raise ConfigError(f"cannot set a {kind}: {why}")
    bucket, segment = held
    bucket.check_not_gathered_by_user(f"setting a {kind}")
    expected = tuple(full_shape(param)) if is_full else (segment.count,)
    if tuple(value.shape) != expected:
        raise ConfigError(f"the {kind} of {bucket.describe(param)} needs a value of shape {list(expected)}, "
                          f"not {list(value.shape)}")
    if kind not in (WEIGHT, _GRADIENT) and bucket.grads.skip_reduction:
        raise ConfigError(f"the {kind} of {bucket.describe(param)} cannot be set now: all ranks derive it from "
                          "compressed messages; set it before the optimizer's warm-up ends")
    _assert_equal_values(bucket, segment.slot.name, kind, value, is_full=is_full)
    part = value.flatten()[segment.slot_offset : segment.slot_offset + segment.count] if is_full else value
    part = part.to(bucket.device, torch.float32)
    engine = bucket.engine()
    if kind == WEIGHT:
        if engine is not None:
            engine.finish_delayed_update()
        bucket.wait_for_param_gather()  # a running all-gather may still read the shard
    with nullcontext() if engine is None or kind == _GRADIENT else \
            engine.state.guard_state_change(f"setting of a {kind}"):
        if kind == _GRADIENT:
            bucket.grads.shard[segment.shard_range] = part / bucket.grad_mean_factor()
        else:
            bucket.master_state.write(kind, segment.shard_offset, part)
        if kind == WEIGHT:
            bucket.reshard()
            publish_masters([bucket])
            bucket.wait_for_param_gather()
            if engine is not None:
                engine.pass_coordinator.weight_version += 1


def _assert_equal_values(bucket: FlatBucket, name: str, kind: str, value: Tensor, *, is_full: bool) -> None:
    """Raise ConfigError, before anything is written, if ranks that must hold equal values got different ones."""
    owners = bucket.dp if is_full else bucket.replica_group  # the ranks that hold these elements
    engine, where = bucket.engine(), f"setting the {kind} of {name}"
    if engine is not None and kind == WEIGHT and owners.size < bucket.dp.size:  # all ranks gather it afterwards
        assert_collective_call(engine.log, bucket.dp, where)
    if engine is not None and not owners.is_solo and not assert_collective_call(engine.log, owners, where, value):
        raise ConfigError(f"the {kind} given for {name} is not the same on all data parallel ranks: give every rank "
                          "the same value (broadcast it, or make it from the same seed); nothing was changed")


def _assert_collective(bucket: FlatBucket, where: str, value: Tensor | None = None) -> bool:
    engine = bucket.engine()
    return engine is None or assert_collective_call(engine.log, bucket.dp, where, value)


# An optimizer state, such as "exp_avg".
safe_get_full_optimizer_state = _get_full
safe_get_local_optimizer_state = _get_local
safe_set_full_optimizer_state = _set_value
safe_set_local_optimizer_state = partial(_set_value, is_full=False)
# The fp32 masters. Inside `GatheredParameters` those from before the block, since edits count at its end.
safe_get_full_fp32_param = partial(_get_full, optim_state_key=WEIGHT)
safe_get_local_fp32_param = partial(_get_local, optim_state_key=WEIGHT)
# Set the masters and the parameter. All setters but those of a local gradient or state are collective; at stage 0
# those are too, because the local segment is the full parameter: values must be equal on all ranks.
safe_set_full_fp32_param = partial(_set_value, optim_state_key=WEIGHT)
safe_set_local_fp32_param = partial(_set_value, optim_state_key=WEIGHT, is_full=False)
# The mean gradient over ranks and micro-batches, before clipping and without the loss scale.
safe_get_full_grad = partial(_get_full, optim_state_key=_GRADIENT)
safe_get_local_grad = partial(_get_local, optim_state_key=_GRADIENT)
safe_set_full_grad = partial(_set_value, optim_state_key=_GRADIENT)
safe_set_local_grad = partial(_set_value, optim_state_key=_GRADIENT, is_full=False)
