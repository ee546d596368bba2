"""Module, gradient and saved-tensor hooks of the engine. They report to a `PassCoordinator`.

Autograd may save views of gathered weights, which would keep the gathered buffer alive until the backward. After the
forward of a unit each such view in its graph is replaced by a reference (`SavedParamView`), which is resolved in
the buffer that the backward gathers. Gradients do not depend on this search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.gradients import STAGE3_OUTPUT_RULE
from megatron.zero.units import Unit, UnitCall

if TYPE_CHECKING:
    from megatron.zero.pass_coordinator import PassCoordinator


def iter_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from iter_tensors(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from iter_tensors(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from iter_tensors(getattr(value, item.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of the nested `value` with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict | UserDict):
        changed = copy(value)  # keeps the class: some subclasses are dataclasses too
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: map_tensors(getattr(value, item.name), change)
                                 for item in fields(value) if item.init})
    return value


# ---- saved tensors --------------------------------------------------------------------------------------------------


# Part of autograd's message when a saved tensor has another version.
INPLACE_CHANGE_TEXT = "has been modified by an inplace operation"

_SEARCHED_KEY = "zero_searched"  # marks the graph nodes of a unit's outputs; a later search stops at them


class SavedParamView(NamedTuple):
    """A view of a gathered parameter, without its memory."""

    bucket: FlatBucket
    parameter: Tensor
    version: int
    dtype: torch.dtype
    offset: int  # into the storage of the gathered buffer, in elements of `dtype`
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
    """Replace views of gathered parameters by references in a unit's graph, from its `outputs` back to the outputs of
    the units before it."""
    # Buckets written to inside the forward keep their saved tensors: autograd knows the saved versions and refuses.
    of_storage = {bucket.gathered_params.untyped_storage()._cdata: bucket for bucket in buckets
                  if bucket.write_guard.first_written() is None}
    ends = [output.grad_fn for output in outputs if output.grad_fn is not None]
    nodes, seen = [*ends], set[Node]()
    while nodes:
        node = nodes.pop()
        if node in seen or _SEARCHED_KEY in cast(Any, node).metadata:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions if before is not None]
        for name in _saved_tensor_names(type(node)):
            value = getattr(node, name)
            for saved in value if isinstance(value, tuple | list) else () if value is None else (value,):
                if saved.unpack_hook is None and (view := _find_param_view(saved.data, of_storage)) is not None:
                    saved.register_hooks(lambda tensor, view=view: view, SavedParamView.resolve)
    for node in ends:
        cast(Any, node).metadata[_SEARCHED_KEY] = True  # torch annotates it as a function


@cache
def _saved_tensor_names(kind: type[Node]) -> list[str]:
    """The attributes of the node class that hold its saved tensors."""
    return [name for name in dir(kind) if name.startswith("_raw_saved")]


def _find_param_view(saved: object, of_storage: Mapping[int, FlatBucket]) -> SavedParamView | None:
    """`saved` is what autograd holds: a tensor, or the result of another saved-tensor hook."""
    # type(): a Parameter has no memory while it is sharded. Lazy negation and conjugation are lost in size and strides.
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


# ---- units -----------------------------------------------------------------------------------------------------------


class EngineHook:
    """A module hook that torch.compile does not trace. In a copied or pickled module it does nothing, because the
    engine does not own that module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch._dynamo.disable(self._call, recursive=True)(*given)
        return self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineHook, (_do_nothing,)


def _do_nothing(*given: Any) -> None:
    pass


def register_unit_hooks(units: Sequence[Unit], coordinator: PassCoordinator) -> list[RemovableHandle]:
    """Report the events of every unit to `coordinator`. Returns the handles that remove the hooks."""
    handles: list[RemovableHandle] = []
    for unit in units:
        handles.append(unit.module.register_forward_pre_hook(  # first, so that hooks of users see gathered parameters
            EngineHook(partial(_before_forward, coordinator, unit)), with_kwargs=True, prepend=True))
        handles.append(unit.module.register_forward_hook(EngineHook(partial(_after_forward, coordinator, unit))))
        for bucket in unit.buckets:
            if not bucket.trainable:
                continue
            for index, parameter in enumerate(bucket.parameters):
                ready = partial(_param_grad_ready, ref(coordinator), ref(unit), ref(bucket), index)
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # the hook needs it; a user may freeze and unfreeze parameters later
                bucket.grads.grad_hooks.append(parameter.register_post_accumulate_grad_hook(ready))
                parameter.requires_grad_(is_trained)
            handles.extend(bucket.grads.grad_hooks)
    return handles


def _before_forward(coordinator: PassCoordinator, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
    coordinator.before_forward(unit)
    if unit.has_frozen and torch.is_grad_enabled():
        inputs = [tensor for tensor in iter_tensors((args, kwargs)) if tensor.requires_grad and not tensor.is_leaf]
        if inputs:
            register_multi_grad_hook(inputs, lambda gradients: coordinator.input_grads_ready(unit))


def _after_forward(coordinator: PassCoordinator, unit: Unit, module: nn.Module, inputs: object,
                   output: object) -> object:
    if any(map(unit.has_view, iter_tensors(output))):  # a view would keep the whole gathered buffer alive
        output = map_tensors(output, lambda tensor: tensor.clone() if unit.has_view(tensor) else tensor)
    outputs = list(iter_tensors(output))
    # Leaves get gradients in no fixed order.
    grad_outputs = [tensor for tensor in outputs if tensor.requires_grad and not tensor.is_leaf]
    if grad_outputs and unit.sharded_buckets and not unit.is_root:  # the root stays gathered for its backward
        save_params_by_reference(grad_outputs, unit.sharded_buckets)
    call = UnitCall(grad_outputs)
    for tensor in grad_outputs:
        tensor.register_hook(lambda gradient: coordinator.before_backward(unit, call))
    if not outputs and output is not None and unit.numel:
        raise ConfigError(f"{unit.name} returned a {type(output).__name__}, in which no tensor can be found: its "
                          "backward could not be announced; return tensors, or tuples, lists, dicts or dataclasses of "
                          "them")
    coordinator.after_forward(unit, call)
    return output


def _param_grad_ready(coordinator_of: ref[PassCoordinator], unit_of: ref[Unit], bucket_of: ref[FlatBucket], index: int,
                      parameter: Tensor) -> None:
    # Weak references: torch's C++ holds this hook, and a reference cycle through C++ is never collected. The module
    # hooks keep the three objects alive.
    coordinator, unit, bucket = coordinator_of(), unit_of(), bucket_of()
    if coordinator is not None and unit is not None and bucket is not None:
        coordinator.param_grad_ready(unit, bucket, index)


def refuse_state_dict_loads(units: Sequence[Unit]) -> list[RemovableHandle]:
    """Register hooks that raise ConfigError on a load_state_dict that the next step would undo."""
    def refuse_load(buckets: set[FlatBucket], *arguments: object) -> None:
        if any(bucket.has_separate_masters and bucket.user_session is None for bucket in buckets):
            raise ConfigError("load_state_dict of a module that an engine trains: the next step would overwrite it "
                              "with the fp32 masters; call engine.load_module_state_dict(state), or load it inside "
                              "zero.GatheredParameters(parameters, modifier_rank=0)")

    bucket_of = {parameter: bucket for unit in units for bucket in unit.buckets for parameter in bucket.parameters}
    handles: list[RemovableHandle] = []
    for module in units[0].module.modules():
        buckets = {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
        if buckets:
            handles.append(module.register_load_state_dict_pre_hook(EngineHook(partial(refuse_load, buckets))))
    return handles


def map_module_outputs(module: nn.Module, change: Callable[[Any], Any]) -> RemovableHandle:
    return module.register_forward_hook(lambda module, args, output: change(output))
