"""Partitioned parameters: who owns a parameter's elements, its placeholder while they are sharded, and user writes.

The owner of a parameter is `zero.Init` or a bucket of an engine; an ordinary tensor has none. The registry of owners
is global, because `GatheredParameters(params)` gets only parameters.

A placeholder has no elements, reports the size of the full parameter, and refuses every torch operation that needs
values: use outside the parameter's unit is an error, never a wrong number. Inside `zero.Init`, in-place operations run
on the full parameter. (torch does not dispatch `torch.tensor(p)`, `torch.Tensor(p)` and `to_dlpack(p)` to its class.)

Writes inside `GatheredParameters` count (`GatheredParamsSession`); writes that the next step would undo are refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from threading import Event
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.errors import ConfigError
from megatron.zero.layout import FlatLayout
from megatron.zero.offload.storage import WEIGHT, StoredShard
from mpu.groups import Group

if TYPE_CHECKING:
    from megatron.zero.engine import ZeroEngine


class ParamOwner(ABC):
    """Keeps parameters sharded, and gathers them for a user."""

    dp: Group  # the ranks that hold the shards
    is_engine_owned = False  # an engine owns the parameters: dtype and device are final
    # A weak reference to the engine of `zero.initialize` that trains the parameters.
    engine: Callable[[], ZeroEngine | None] = staticmethod(lambda: None)
    is_offloaded = False  # engine.offload_states() has moved the elements to the host

    params_are_sharded = True  # the parameters are gathered only while they are used (stage 3)

    # Set while the model is being built: in-place operations gather the parameter and run on the full values.
    is_building: Event = Event()

    @abstractmethod
    def full_shape(self, parameter: nn.Parameter) -> torch.Size: ...

    @abstractmethod
    def describe(self, parameter: Tensor) -> str:
        """The parameter for a message: its name, if known, and its shape."""

    def check_before_user_gather(self) -> None:
        """Raise ConfigError if the parameters cannot be gathered for a user. Local."""

    @abstractmethod
    def gather_for_user(self) -> None:
        """Gather the parameters; the user may edit them. Collective."""

    @abstractmethod
    def check_before_user_reshard(self, modifier_rank: int | None) -> None:
        """Raise ConfigError if the user's edits cannot be kept. Local."""

    @abstractmethod
    def reshard_after_user(self, modifier_rank: int | None) -> None:
        """Reshard, with the edits of data parallel rank `modifier_rank` (None: no edits). Collective."""

    @abstractmethod
    def cancel_user_gather(self) -> None:
        """Reshard, and undo all edits. Not collective."""


_PARAM_OWNERS = WeakTensorKeyDictionary()  # parameter -> a function that returns its owner, or None


def set_param_owner(parameter: nn.Parameter, owner: ParamOwner, *, keeps_owner_alive: bool = True) -> None:
    """Register the owner. Without `keeps_owner_alive` only a weak reference is kept."""
    _PARAM_OWNERS[parameter] = (lambda: owner) if keeps_owner_alive else ref(owner)


def clear_param_owner(parameter: nn.Parameter) -> None:
    _PARAM_OWNERS.pop(parameter, None)


def param_owner(parameter: Tensor) -> ParamOwner | None:
    get_owner: Callable[[], ParamOwner | None] | None = _PARAM_OWNERS.get(parameter)
    return None if get_owner is None else get_owner()


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of the full parameter, sharded or not."""
    owner = param_owner(parameter)
    return parameter.shape if owner is None else owner.full_shape(parameter)


EXTERNAL_ATTRIBUTE = "zero_external_parameters"  # the attribute of a module that lists its external parameters


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that the forward of `module` uses a parameter of another module. Call it before `zero.initialize`: the
    parameter is then gathered whenever the model runs. (Modules that share a Parameter object need no such call.)"""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise ConfigError(f"register_external_parameter takes a Module and a Parameter, not {type(module).__name__} "
                          f"and {type(parameter).__name__}")
    known: list[nn.Parameter] = module.__dict__.setdefault(EXTERNAL_ATTRIBUTE, [])
    if not any(parameter is other for other in known):
        known.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    known: list[nn.Parameter] = module.__dict__.get(EXTERNAL_ATTRIBUTE, [])
    if not any(parameter is other for other in known):
        raise ConfigError(f"the parameter of shape {tuple(full_shape(parameter))} is not registered as an external one "
                          f"of {type(module).__name__}")
    module.__dict__[EXTERNAL_ATTRIBUTE] = [other for other in known if other is not parameter]


_TENSOR: Any = Tensor


def _getters(names: str) -> Iterator[Any]:
    return (getattr(_TENSOR, name).__get__ for name in names.split())


def _methods(names: str) -> Iterator[Any]:
    return (getattr(_TENSOR, name) for name in names.split())


_has_compatible_data: Any = torch._has_compatible_shallow_copy_type

# Operations that need no values: metadata, hooks, gradients, and being an input of torch.autograd.grad.
ALLOWED_OPS = frozenset(
    (*_getters("dtype device layout is_leaf is_cpu is_cuda is_meta is_mps is_mkldnn is_nested "
               "is_quantized is_sparse is_sparse_csr is_xpu itemsize requires_grad retains_grad "
               "grad grad_fn output_nr _backward_hooks _post_accumulate_grad_hooks _version"),
     *_methods("storage_offset element_size get_device is_complex is_contiguous is_floating_point is_inference "
               "is_signed requires_grad_ register_hook register_post_accumulate_grad_hook backward __dir__ __hash__"),
     _TENSOR.requires_grad.__set__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__, _TENSOR._backward_hooks.__set__,
     _TENSOR._post_accumulate_grad_hooks.__set__, _has_compatible_data, torch.is_complex, torch.is_floating_point,
     torch.is_inference, torch.is_signed, torch.autograd.backward, torch.autograd.grad))

# Operations that answer for the full parameter.
SIZE_OPS = frozenset((*_getters("shape ndim nbytes"), *_methods("size dim ndimension numel nelement stride __len__"),
                      torch.numel))

# `Module.to` and similar calls return another placeholder. A parameter of an engine cannot change dtype or device;
# `zero.initialize` decides dtype and device of parameters from `zero.Init`.
CONVERSION_OPS = frozenset(_methods("to type cpu cuda xpu half float double bfloat16"))

_GET_DATA, _SET_DATA = _TENSOR.data.__get__, _TENSOR.data.__set__

_ASSIGNMENT_OPS = frozenset((_SET_DATA, *_methods(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__")))


class Placeholder(nn.Parameter):
    """A sharded parameter, without elements. Instances have a subclass made by `_placeholder_class`."""

    own_class: type[nn.Parameter]  # the class of the gathered parameter

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        given = {} if kwargs is None else kwargs
        if func in ALLOWED_OPS or func == _SET_DATA and isinstance(args[1], Placeholder):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        used = next(_find_placeholders((*args, *given.values())), None)
        if func in SIZE_OPS and used is not None and used is args[0] and param_owner(used) is not None:
            with torch._C.DisableTorchFunctionSubclass():
                full_meta = torch.empty(full_shape(used), dtype=used.dtype, device="meta")
            return func(full_meta, *args[1:], **given)
        if func in CONVERSION_OPS and used is not None and used is args[0]:
            return _convert(used, func, args, given)
        owner = None if used is None else param_owner(used)
        if owner is not None and owner.is_building.is_set():
            if func == _GET_DATA:
                return used  # in-place writes to `p.data` run on the parameter
            name = op_name(func)
            if func in _ASSIGNMENT_OPS or name.endswith("_") and not name.endswith("__"):
                return _run_in_place(func, args, given)
        if owner is None:
            raise ConfigError(f"a parameter cannot be used here ({op_name(func)}): its elements were split over the "
                              "data parallel ranks, and nothing has them now. Either its engine could not be built, "
                              "or is gone: build the model again; or this is a copy: use the parameter itself")
        if owner.is_offloaded:
            raise ConfigError(f"{_describe(used)} cannot be used here ({op_name(func)}): engine.offload_states() has "
                              "set its elements aside; call engine.reload_states() first")
        outside = "" if owner.is_engine_owned else "build a model that reads it outside zero.Init, "
        raise ConfigError(
            f"{_describe(used)} cannot be used here ({op_name(func)}): its elements are split over the data parallel "
            f"ranks; {outside}use it inside zero.GatheredParameters (edits need modifier_rank), save weights with "
            "engine.save_16bit_model or engine.save_checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = param_owner(self)
        if owner is None or not owner.is_building.is_set():
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]  # refused
        if id(self) not in memo:
            memo[id(self)] = cast(Any, owner).clone()  # a DeferredParam, since no engine owns the parameter
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({_describe(self)}, {self.dtype}, requires_grad={self.requires_grad})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)


def _run_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an in-place operation on gathered parameters. Collective; rank 0's result is kept."""
    owners = {id(owner): owner for used in _find_placeholders((*args, *kwargs.values()))
              if (owner := param_owner(used)) is not None}.values()
    try:
        for owner in owners:
            owner.gather_for_user()
        with torch.no_grad():
            result = func(*args, **kwargs)
        for owner in owners:
            owner.check_before_user_reshard(0)
    except BaseException:
        for owner in owners:
            owner.cancel_user_gather()
        raise
    for owner in owners:
        owner.reshard_after_user(0)
    return result


def replace_by_placeholder(parameter: Any, empty: Tensor, placeholder_class: type[Placeholder] = Placeholder) -> None:
    """Turn the parameter into a placeholder with the data `empty`, which has the dtype and device to report and usually
    no elements (another `placeholder_class` may have some)."""
    set_param_data(parameter, empty)
    own: type[nn.Parameter] = type(parameter)
    parameter.__class__ = _placeholder_class(own, placeholder_class)


def set_param_data(parameter: Any, data: Tensor) -> None:
    """Give the parameter its normal class and these elements."""
    now: type[nn.Parameter] = type(parameter)
    parameter.__class__ = now.own_class if issubclass(now, Placeholder) else now
    parameter.data = data


@cache
def _placeholder_class(own: type[nn.Parameter], kind: type[Placeholder]) -> type[nn.Parameter]:
    bases = (kind,) if own is nn.Parameter else (kind, own)
    return type(kind.__name__, bases, {"own_class": own, "__module__": kind.__module__})


def _convert(placeholder: Placeholder, func: Callable[..., Any], args: tuple[Any, ...],
             kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        result: Any = func(*args, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        if not isinstance(result, Tensor):  # `type()` without arguments returns a string
            return result
        owner = param_owner(placeholder)
        is_same_kind = (result.dtype, result.device) == (placeholder.dtype, placeholder.device)
        if owner is not None and owner.is_engine_owned and not is_same_kind:
            raise ConfigError(f"{_describe(placeholder)} cannot become {result.dtype} on {result.device} "
                              f"({op_name(func)}): its elements are split over the data parallel ranks, in "
                              f"{placeholder.dtype} on {placeholder.device}; choose fp16 or bf16 in the configuration "
                              "and the device by the launcher, and read values inside zero.GatheredParameters")
    result.__class__ = type(placeholder)
    return result


def _describe(placeholder: Placeholder | None) -> str:
    owner = None if placeholder is None else param_owner(placeholder)
    return "a parameter" if owner is None or placeholder is None else owner.describe(placeholder)


def _find_placeholders(values: Iterable[object]) -> Iterator[Placeholder]:
    """Yield the placeholders among the arguments of a function, also inside sequences and mappings."""
    for value in values:
        if isinstance(value, Placeholder):
            yield value
        elif isinstance(value, list | tuple):
            yield from _find_placeholders(value)
        elif isinstance(value, dict):
            yield from _find_placeholders(value.values())


def op_name(func: Callable[..., Any]) -> str:
    """The name of an operation; for a property's getter or setter, that of the property."""
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


# ---- writes of the user ---------------------------------------------------------------------------------------------


# (chunk, masters) -> the parameter values of the chunk; the caller casts.
MasterRounding = Callable[[slice, Tensor], Tensor]

ELEMENTS_PER_COMPARISON = 1 << 24  # elements that are compared at a time


class InPlaceWriteGuard:
    """Finds writes by torch's version counters (0.1 ms for 1,200 parameters) and, since writes to `p.data` do not count
    there, by comparing values at some steps. While a parameter is sharded its counter is one higher, so that a backward
    that saved it before is refused (hooks.py)."""

    def __init__(self, layout: FlatLayout, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self._layout, self._parameters, self._rank = layout, parameters, rank
        # A parameter that was written to while it was gathered, which a reshard loses; reported by `take_writes`.
        self.lost_write: str | None = None
        self.accept_writes()

    def accept_writes(self) -> None:
        """Take the current version counters as the reference: earlier writes have been handled."""
        with torch._C.DisableTorchFunctionSubclass():  # placeholders have version counters too
            self._versions = self._current_versions()

    def take_writes(self) -> bool:
        """For parameters whose sharded data users may write to (FSDP): whether they wrote since the last call. Raises
        ConfigError for a write to gathered parameters, which the reshard has lost."""
        if self.lost_write is not None:
            name, self.lost_write = self.lost_write, None
            raise ConfigError(
                f"{name} was written to while all of it was here, in a forward or between that and its backward, and "
                "that is lost: change weights after the backward, or inside summon_full_params()")
        counts = self._versions
        self.accept_writes()
        return counts != self._versions

    def first_written(self) -> str | None:
        """The first parameter that was written to since `accept_writes`."""
        counts = self._current_versions()
        if counts == self._versions:
            return None
        return next(slot.name for slot, now, before in zip(self._layout.slots, counts, self._versions) if now != before)

    def shift_versions(self, by: int) -> None:
        """Shift the version counters for a reshard (+1) or a gather (-1), without counting it as a write."""
        shift_version_counters(self._parameters, by)
        self._versions = [count + by for count in self._versions]

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def refuse_writes(self, param_shard: Tensor | None, master_state: StoredShard, round_masters: MasterRounding, *,
                      compare_values: bool) -> None:
        """Raise ConfigError for writes since `accept_writes`. Call it with `__torch_function__` switched off.

        `param_shard` is given if the parameters are never sharded; its values are then compared with the rounded
        masters if a version counter has changed, or always with `compare_values`. On a single shard a write that was
        undone does not count."""
        counts = self._current_versions()
        if counts == self._versions and (param_shard is None or not compare_values):  # the common case
            return
        written, modified = self.first_written(), None
        if param_shard is not None and (written is not None or compare_values):
            modified = self._first_modified(param_shard, master_state, round_masters)
        if modified is None:
            self._versions = counts
            if param_shard is None or self._layout.shards > 1:
                modified = written
        if modified is not None:
            raise ConfigError(
                f"{modified} was written to in place since the last step (copy_(), `p.data.mul_()`, nn.init and the "
                "like), and that would not last: the engine keeps fp32 masters or shards beside it. Write inside "
                "zero.GatheredParameters(parameters, modifier_rank=0), or call engine.load_module_state_dict(state)")

    def _first_modified(self, param_shard: Tensor, master_state: StoredShard,
                        round_masters: MasterRounding) -> str | None:
        """The first parameter that differs from its masters."""
        for chunk in master_state.chunks:
            with master_state.open(chunk, [WEIGHT]) as opened:
                master = round_masters(chunk, opened[WEIGHT])
                if not any(map(_values_differ, param_shard[chunk].split(ELEMENTS_PER_COMPARISON),
                               master.split(ELEMENTS_PER_COMPARISON))):
                    continue
                for segment in self._layout.segments(self._rank, chunk):
                    start = segment.shard_offset - chunk.start
                    if _values_differ(param_shard[segment.shard_range], master[start : start + segment.count]):
                        return segment.slot.name  # if none differs, it was padding
        return None


def shift_version_counters(parameters: Sequence[Tensor], by: int) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple([one._version + by for one in parameters]))


def _values_differ(params: Tensor, master: Tensor) -> bool:
    wanted = master.to(params.device, params.dtype)
    if torch.equal(params, wanted):
        return False
    return bool((params != wanted).logical_and(params.eq(params) | wanted.eq(wanted)).any())  # nan equals nan


class GatheredParamsSession:
    def __init__(self, gathered_params: Tensor, layout: FlatLayout, rank: int, *, was_sharded: bool) -> None:
        """`rank` owns its shard of `gathered_params`. `was_sharded`: sharded before the session, and again after it."""
        self._gathered_params, self._layout, self.was_sharded = gathered_params, layout, was_sharded
        self._shard_range = layout.shard_slice(rank)
        self._before = gathered_params.clone()
        # This rank's shard at the start of the session; it counts until the session ends.
        self.shard_before = self._before[self._shard_range]

    def first_modified(self) -> str | None:
        """The first parameter whose bits have changed."""
        now, before = self._gathered_params.view(torch.uint8), self._before.view(torch.uint8)
        if torch.equal(now, before):
            return None
        size = self._gathered_params.element_size()
        names = (slot.name for slot in self._layout.slots
                 if not torch.equal(*(flat[slot.offset * size : slot.end * size] for flat in (now, before))))
        return next(names, None)

    def store_modified_shard(self, param_shard: StoredShard, master_state: StoredShard) -> None:
        """Store this rank's part of the gathered parameters in its parameter shard and masters."""
        new, old = self._gathered_params[self._shard_range], self.shard_before
        param_shard.write(WEIGHT, 0, new)
        for chunk in master_state.chunks if master_state is not param_shard else ():
            edited = new[chunk] != old[chunk]
            if edited.any():  # unedited elements keep their fp32 bits
                with master_state.open(chunk, [WEIGHT], writes=True) as opened:
                    masters = opened[WEIGHT]
                    masters[edited.to(masters.device)] = new[chunk][edited].to(masters.device, masters.dtype)

    def undo_modifications(self) -> None:
        self._gathered_params.copy_(self._before)
