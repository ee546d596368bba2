"""Sharded parameters and their gradients between two passes: tensor subclasses that hold this rank's segment; and how
full values are gathered and stored.

    ShardedParam   the parameter: flat, in master precision, a view of the masters, updated in place by the optimizer
    ParamSegment   its gradient, and tensors derived elementwise from the two, such as optimizer state

`p.dim()` and `p.numel()` are those of the full parameter; the elements are a part of it, possibly empty. Elementwise
operations (`ELEMENTWISE_OPS`) are allowed. Norms, sums and products would differ on each rank and raise an error that
names an alternative. `p.copy_(full)` takes this rank's elements, so `nn.Module.load_state_dict` loads full state dicts.
For torch.distributed.checkpoint a segment is described as boxes of the parameter (`split_into_boxes`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.hooks import iter_tensors
from megatron.zero.layout import Slot
from megatron.zero.offload.storage import WEIGHT
from megatron.zero.partitioned_param import (ALLOWED_OPS, SIZE_OPS, Placeholder, op_name, param_owner,
                                             replace_by_placeholder, shift_version_counters)
from mpu.collectives import all_gather_into

if TYPE_CHECKING:
    from torch.distributed.checkpoint import ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# ---- the segments of a bucket ----------------------------------------------------------------------------------------


class SegmentLocation(NamedTuple):
    full_size: torch.Size  # size of the full parameter
    param_name: str
    offset: int  # offset of the segment in the flattened parameter


class LocalParam(NamedTuple):
    """A parameter of a bucket, and which of its elements this rank has."""

    parameter: nn.Parameter
    slot: Slot
    range: slice  # its elements in this rank's shard; empty if it has none
    offset: int  # offset of the first one in the flattened parameter

    @property
    def location(self) -> SegmentLocation:
        return SegmentLocation(torch.Size(self.slot.shape), self.slot.name, self.offset)


def local_params(bucket: FlatBucket) -> Iterator[LocalParam]:
    segments = {segment.slot.name: segment for segment in bucket.layout.segments(bucket.shard_group.rank)}
    for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
        one = segments.get(slot.name)
        yield LocalParam(parameter, slot, slice(0, 0), 0) if one is None else LocalParam(
            parameter, slot, slice(one.shard_offset, one.shard_offset + one.count), one.slot_offset)


def gather_shards(bucket: FlatBucket, shard: Tensor) -> list[Tensor]:
    """All-gather `shard` into one tensor for each parameter, on the bucket's device. Collective."""
    flat = torch.empty(bucket.layout.numel, dtype=shard.dtype, device=bucket.device)
    # [shard_numel] on each rank -> [numel], padding included
    all_gather_into(flat, shard.to(bucket.device), bucket.shard_group).wait()
    return [flat[slot.offset : slot.end].view(slot.shape) for slot in bucket.layout.slots]


def gather_masters(bucket: FlatBucket) -> list[Tensor]:
    """One full tensor for each parameter. Collective."""
    return gather_shards(bucket, bucket.master_state.view(WEIGHT))


def store_masters(bucket: FlatBucket, full_values: Iterable[Tensor]) -> None:
    """Copy this rank's segments of `full_values` into its masters."""
    shard = bucket.master_state.view(WEIGHT)
    for value, one in zip(full_values, local_params(bucket), strict=True):
        own = shard[one.range]
        own.copy_(value.detach().flatten()[one.offset : one.offset + len(own)])


TensorBox = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes) of a part of a tensor


def split_into_boxes(shape: Sequence[int], start: int, count: int) -> Iterator[TensorBox]:
    """Split elements [start, start + count) of a flattened tensor of `shape` into axis-aligned boxes, in order."""
    if len(shape) <= 1 and count:
        yield ((start,), (count,)) if shape else ((), ())
        return
    row, end = prod(shape[1:]), start + count
    while start < end:
        number, within = divmod(start, row)
        if not within and (rows := (end - start) // row):
            yield (number, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            part = min(end - start, row - within)
            for offsets, sizes in split_into_boxes(shape[1:], within, part):
                yield (number, *offsets), (1, *sizes)
            start += part


_TENSOR: Any = Tensor

# Names of torch operations without outer underscores and "foreach_".
ELEMENTWISE_OPS = frozenset("""
    abs absolute add addcdiv addcmul bool ceil clamp clamp_max clamp_min clip clone contiguous copy copysign cos
    detach div divide double empty_like eq erf exp exp2 expm1 fill float float_power floor floor_divide fmax fmin
    frac full_like ge greater greater_equal gt half bfloat16 hypot int invert isclose isfinite isinf isnan
    isneginf isposinf ldexp le lerp less less_equal log log10 log1p log2 logical_and logical_not logical_or
    logical_xor long lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative not_equal ones_like
    pos positive pow reciprocal relu remainder round rsqrt sgn sigmoid sign sin softsign sqrt square sub subtract
    tan tanh to true_divide truediv trunc type type_as where xlogy zero zeros_like floordiv mod lshift rshift and
    or xor radd rsub rmul rtruediv rdiv rfloordiv rmod rpow rand ror rxor iadd isub imul itruediv idiv ifloordiv
    imod ipow iand ior ixor fused_adam fused_adamw fused_sgd fused_adagrad
""".split())

CONVERSION_OPS = frozenset("to type half float double bfloat16 cpu cuda xpu".split())

ALWAYS_ALLOWED = ALLOWED_OPS | {_TENSOR.is_pinned, _TENSOR.untyped_storage, _TENSOR.is_shared, _TENSOR.is_set_to}

_GET_DATA, _SET_DATA = _TENSOR.data.__get__, _TENSOR.data.__set__
_ALIASES = frozenset((_GET_DATA, _TENSOR.detach, torch.detach, _TENSOR.view_as))


class PartialTensor(Tensor):
    """A tensor of which this rank holds a segment."""

    # the protocol of torch.distributed.checkpoint

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint import ChunkStorageMetadata
        full_size, _, offset = location_of(self)
        boxes = [*split_into_boxes(full_size, offset, local_tensor(self).numel())] if full_size.numel() \
            else [((0,) * len(full_size), full_size)]
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]

    def __create_write_items__(self, name: str, part: Tensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
        properties, full_size = TensorProperties.create_from_tensor(local_tensor(self)), location_of(self).full_size
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(
            chunk, properties, full_size)) for chunk in self.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunks = self.__create_chunk_list__()
        # the elements of a chunk are consecutive
        parts: Sequence[Tensor] = local_tensor(self).split([chunk.sizes.numel() for chunk in chunks])
        return next(part.view(chunk.sizes) for part, chunk in zip(parts, chunks, strict=True)
                    if chunk.offsets == (index.offset or ()))

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        return _dispatch(func, args, {} if kwargs is None else kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shard({_describe(self)}, {self.dtype}, requires_grad={self.requires_grad})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles this rank's elements only, with a warning."""
        if local_tensor(self).numel() != location_of(self).full_size.numel():
            _warn_partial_pickle()
        return local_tensor(self).clone().__reduce_ex__(protocol)


class ShardedParam(PartialTensor, Placeholder):  # type: ignore[misc]  # both have a __repr__
    """A parameter between two passes."""


class ParamSegment(PartialTensor):
    """A tensor derived elementwise from a parameter's segment: gradient, optimizer state."""

    location: SegmentLocation
    # The parameter whose memory this tensor aliases; writes count as writes to it.
    owner: nn.Parameter | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamSegment:
        return segment_like(local_tensor(self).clone(), self)


class UnreducedGrad(ParamSegment):
    """A gradient from inside `no_sync`, not yet reduced. It can be cleared (`None`, `zero_()`); every other use raises.
    For code that bypasses `__torch_function__` its elements are NaN (expanded, without memory)."""

    is_cleared = False

    @staticmethod
    def error() -> ConfigError:
        return ConfigError("a gradient of backwards inside no_sync() cannot be used: it is not summed over the ranks "
                           "yet; run the last backward before a step or a clip outside of no_sync()")


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's elements as an ordinary tensor. Raises ConfigError for an unreduced gradient."""
    if isinstance(tensor, UnreducedGrad):
        raise UnreducedGrad.error()
    _restore_param_views()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def _restore_param_views() -> None:
    """Give parameters that are empty during a pass their segments again, as they are about to be read."""
    for shards in [*ShardedParamViews.without_elements] if ShardedParamViews.without_elements else ():
        shards.restore_views()


@cache
def _warn_partial_pickle() -> None:
    print("warning: what is pickled (torch.save) has this rank's part of sharded tensors, and loads on the same rank "
          "of as many: every rank must save its own. For one file take get_state_dict(model, optimizer, "
          "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of megatron.fsdp on every rank, and save "
          "on rank 0 (docs/fsdp.md)", file=sys.stderr, flush=True)


def make_segment(values: Tensor, location: SegmentLocation, cls: type[ParamSegment] = ParamSegment) -> ParamSegment:
    with torch._C.DisableTorchFunctionSubclass():
        segment: ParamSegment = values.as_subclass(cls)
    segment.location = location
    return segment


def segment_like(values: Tensor, like: Tensor) -> ParamSegment:
    """A segment at the position of `like`."""
    return make_segment(values, location_of(like))


def location_of(tensor: Tensor) -> SegmentLocation:
    if isinstance(tensor, ParamSegment):
        return tensor.location
    return next(one.location for one in local_params(bucket_of(tensor)) if one.parameter is tensor)


def bucket_of(tensor: Tensor) -> FlatBucket:
    holder = param_owner(tensor)
    if not isinstance(holder, FlatBucket):
        raise ConfigError("a parameter cannot be used here: its model was sharded, and is gone; build the model again")
    return holder


class ShardedParamViews:
    """Shows the parameters of a bucket as views of the masters while they are sharded. (Holds the bucket weakly: the
    bucket holds this.)

    During a mixed-precision pass the sharded parameters are empty tensors in the working dtype instead: if the dtype
    changed between uses, autograd would deliver the gradient in two parts. Reading one restores its segment.
    """

    # Instances whose sharded parameters are empty now.
    without_elements: ClassVar[WeakSet[ShardedParamViews]] = WeakSet()

    def __init__(self) -> None:
        self._views: list[Tensor] = []
        self._bucket: Callable[[], FlatBucket | None] = lambda: None
        self._in_pass = False

    def __call__(self, bucket: FlatBucket) -> None:
        if not self._views:
            masters, self._bucket = bucket.master_state.view(WEIGHT), ref(bucket)
            self._views = [masters[one.range] for one in local_params(bucket)]
            self._set_views(bucket)
            for parameter in bucket.parameters:
                _register_for_foreach(type(parameter))
        elif self._in_pass:
            self.without_elements.add(self)
            for parameter in bucket.parameters:
                replace_by_placeholder(parameter, bucket.empty_param, ShardedParam)
        else:
            self._set_views(bucket)

    def enter_pass(self) -> None:
        bucket = self._bucket()
        self._in_pass = bucket is not None and bucket.param_shard.dtype != bucket.master_state.dtype

    def leave_pass(self) -> None:
        self._in_pass = False
        self.restore_views()

    def restore_views(self) -> None:
        bucket = self._bucket()
        if self in self.without_elements and bucket is not None and bucket.params_are_placeholders:
            self._set_views(bucket)
        self.without_elements.discard(self)

    def _set_views(self, bucket: FlatBucket) -> None:
        for parameter, view in zip(bucket.parameters, self._views, strict=True):
            replace_by_placeholder(parameter, view, ShardedParam)


def _register_for_foreach(cls: type[Tensor]) -> None:
    """Otherwise torch's optimizers would step parameters of an unknown class one by one."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        known = getattr(import_module(module), "_foreach_supported_types", None)
        if isinstance(known, list) and cls not in known:
            known.append(cls)


# ---- torch functions on these tensors ----------------------------------------------------------------------------


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    parts = [] if func in ALWAYS_ALLOWED else [
        one for one in iter_tensors((args, kwargs)) if isinstance(one, PartialTensor)]
    if not parts:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    part = parts[0]
    if func not in SIZE_OPS:
        _restore_param_views()
        if any(isinstance(one, UnreducedGrad) for one in parts):  # optimizers pass parameters before gradients
            if func in (_TENSOR.zero_, torch._foreach_zero_):  # zero_grad(set_to_none=False)
                return _clear_unreduced(args[0])
            raise UnreducedGrad.error()
    if func in SIZE_OPS and args and args[0] is part:
        return func(torch.empty(location_of(part).full_size, dtype=part.dtype, device="meta"), *args[1:], **kwargs)
    if func in _ALIASES and args and args[0] is part:  # the same memory: writes count as writes to the parameter
        alias = segment_like(local_tensor(part), part)
        alias.owner = part if isinstance(part, nn.Parameter) else getattr(part, "owner", None)
        return alias
    if func in (_SET_DATA, _TENSOR.copy_) and args[0] is part:
        return _copy_into(func, part, *args[1:], **kwargs)
    name = _base_op_name(func)
    if name not in ELEMENTWISE_OPS:
        raise _unsupported_error(part, name)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
    except RuntimeError as error:
        if "shape" not in str(error) and "size" not in str(error):
            raise
        raise ConfigError(f"{name} of {_describe(part)}, of which this rank has a segment of "
                          f"{local_tensor(part).numel()} elements: an optimizer's state must be made with "
                          "torch.zeros_like(parameter), and not by its shape (docs/fsdp.md). torch says: "
                          f"{error}") from error
    _count_inplace_writes(func, args)
    return _wrap_result(name, args, part, result)


def _clear_unreduced(zeroed: Any) -> Any:
    for one in zeroed if isinstance(zeroed, list | tuple) else (zeroed,):
        if isinstance(one, UnreducedGrad):
            one.is_cleared = True
        else:
            one.zero_()
    return zeroed


def _copy_into(func: Callable[..., Any], part: Tensor, source: Any, *more: Any, **kwargs: Any) -> Any:
    """`p.copy_(values)` with a segment or the full tensor; and `p.data = p.data`."""
    whole, name, offset = location_of(part)
    target = local_tensor(part)
    if func == _SET_DATA and (source.dtype, source.device) != (target.dtype, target.device):  # half(), to()
        raise _unsupported_error(part, "to")
    if func == _SET_DATA and not (isinstance(source, PartialTensor) and local_tensor(source).is_set_to(target)):
        raise ConfigError(f"{name}.data = ... would part the parameter from its buffers: write p.data.copy_(values), "
                          "and keep old values with p.data.clone()")
    values = local_tensor(source) if isinstance(source, PartialTensor) else source
    if values is source and isinstance(values, Tensor) and values.shape == whole:
        values = values.detach().flatten()[offset : offset + target.numel()]
    with torch.no_grad():
        target.copy_(values, *more, **kwargs)
    _count_write(part)
    return None if func == _SET_DATA else part


def _wrap_result(name: str, args: tuple[Any, ...], part: Tensor, result: Any) -> Any:
    """The result as a segment. Raises ConfigError if it has another size than its operand."""
    if isinstance(result, list | tuple) and result:
        given = next((value for value in args if isinstance(value, list | tuple)), [part] * len(result))
        return type(result)(_wrap_result(name, (), one, value) for one, value in zip(given, result))
    if not isinstance(result, Tensor) or isinstance(result, PartialTensor) or not isinstance(part, PartialTensor):
        return result
    if result.shape != local_tensor(part).shape:
        raise _unsupported_error(part, name)
    return segment_like(result, part)


def _count_inplace_writes(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Count a write to `p.data` as one to the parameter: torch's version counter does not."""
    name = getattr(func, "__name__", "")
    if not (name.endswith("_") and not name.endswith("__") or name.startswith("__i")):
        return
    for one in args[0] if args and isinstance(args[0], list | tuple) else args[:1]:
        if isinstance(one, ParamSegment):
            _count_write(one)


def _count_write(part: Tensor) -> None:
    parameter = part if isinstance(part, nn.Parameter) else getattr(part, "owner", None)
    if parameter is not None:
        with torch._C.DisableTorchFunctionSubclass():
            shift_version_counters([parameter], 1)


def _base_op_name(func: Callable[..., Any]) -> str:
    name = op_name(func)
    if name in ("__bool__", "__float__", "__int__", "__index__", "__complex__"):
        return f"{name.strip('_')}()"
    return name.strip("_").removeprefix("foreach_")


def _describe(part: Tensor) -> str:
    whole, name, _ = location_of(part)
    return f"parameter {name!r} of shape {tuple(whole)}"


_ALTERNATIVES = {
    "norm": "for the norm of all gradients, and to clip them, call model.clip_grad_norm_(limit), or "
    "megatron.fsdp.clip_grad_norm_(parameters, limit). Optimizers that look at whole parameters cannot be used on "
    "shards; zero.initialize has Muon and LAMB",
    "amp": "no GradScaler is needed here: fp16 scales the loss by itself (docs/fsdp.md)",
    "conversion": "choose the precision with mixed_precision or mp_policy, and the device before it is sharded",
    "data_ptr": "to store it use torch.distributed.checkpoint.save (async_save cannot), save_checkpoint or the full "
    "state dict of megatron.fsdp (docs/fsdp.md)",
    "": "full values are in the module's forward and its forward hooks, and between passes in `with "
    "megatron.fsdp.summon_full_params(model)`; full state dicts, and optimizers that look at whole parameters: "
    "docs/fsdp.md"}


def _unsupported_error(part: Tensor, name: str) -> ConfigError:
    kind = (name if name in _ALTERNATIVES else "norm" if name.endswith("norm") else "amp" if name.startswith("amp") else
            "conversion" if name in CONVERSION_OPS else "")
    what = "the gradient or a state of " if isinstance(part, ParamSegment) else ""
    return ConfigError(f"{what}{_describe(part)} cannot be used here ({name}): this rank has a segment of it, "
                       f"and the result would be another one on each rank; {_ALTERNATIVES[kind]}")
