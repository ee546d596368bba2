"""The only file that registers hooks: module and gradient events become calls of an `UnitEvents` object.

A *unit* is a module whose parameters come and go together. The root unit is the whole model: it has what no other unit
has. Recomputation needs nothing here: the receiver knows whether a forward runs inside a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.nested import iter_tensors, map_tensors
from megatron.zero.saved_weights import save_params_by_reference


@dataclass(frozen=True, eq=False)
class Unit:
    """A module and the buckets of its parameters; `index` counts in forward order, the root is 0."""

    index: int
    name: str
    module: nn.Module
    buckets: tuple[FlatBucket, ...]

    @property
    def is_root(self) -> bool:
        return self.index == 0

    @cached_property
    def display_name(self) -> str:
        """What a person reads of it; nothing of the root."""
        return "" if self.is_root else self.name

    @cached_property
    def sharded_buckets(self) -> list[FlatBucket]:
        """Those whose parameters are gathered for each use."""
        return [bucket for bucket in self.buckets if bucket.params_are_sharded]

    @cached_property
    def numel(self) -> int:
        """Elements that come and go."""
        return sum(bucket.layout.numel for bucket in self.sharded_buckets)

    @property
    def is_unsharded(self) -> bool:
        """Those elements are here, or on their way."""
        return any(bucket.is_unsharded for bucket in self.sharded_buckets)

    def has_view(self, tensor: Tensor) -> bool:
        """It is a view of parameters that come and go."""
        return any(bucket.has_view(tensor) for bucket in self.sharded_buckets)

    @cached_property
    def has_frozen(self) -> bool:
        return any(not bucket.trainable for bucket in self.buckets)


class UnitEvents(Protocol):
    """What is reported (passes.py receives it)."""

    @property
    def weight_version(self) -> int:
        """Counts the changes of the weights: a backward belongs to those of its forward."""

    def before_forward(self, unit: Unit) -> None: ...

    def after_forward(self, unit: Unit) -> None: ...

    def before_backward(self, unit: Unit, weight_version: int, call: UnitCall) -> None:
        """Of one `call` of the unit, once for each of its outputs; `weights` is what the count was in that forward."""

    def input_grads_ready(self, unit: Unit) -> None:
        """The gradients of all inputs of the unit have been computed; only for units with frozen parameters."""

    def param_grad_ready(self, unit: Unit, bucket: FlatBucket, index: int) -> None: ...


class EngineHook:
    """A hook of a module, which torch.compile leaves as it is where it compiles calls of modules and so comes by. In a
    copy of the module, or a file that has it, it does nothing: the engine has no part in those."""

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


def refuse_state_dict_loads(units: Sequence[Unit]) -> list[RemovableHandle]:
    """Refuse the load of a state dict that the next step would undo."""
    bucket_of = {parameter: bucket for unit in units for bucket in unit.buckets for parameter in bucket.parameters}
    handles: list[RemovableHandle] = []
    for module in units[0].module.modules():
        buckets = {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
        if buckets:
            handles.append(module.register_load_state_dict_pre_hook(EngineHook(partial(_refuse_load, buckets))))
    return handles


def register_unit_hooks(units: Sequence[Unit], events: UnitEvents) -> list[RemovableHandle]:
    """Report the events of every unit; the handles remove the hooks."""
    handles: list[RemovableHandle] = []
    for unit in units:
        handles.append(unit.module.register_forward_pre_hook(  # before those of the user, which see whole parameters
            EngineHook(partial(_before_forward, events, unit)), with_kwargs=True, prepend=True))
        handles.append(unit.module.register_forward_hook(EngineHook(partial(_after_forward, events, unit))))
        for bucket in unit.buckets:
            for index, parameter in enumerate(bucket.parameters if bucket.trainable else ()):
                ready = partial(_param_grad_ready, ref(events), ref(unit), ref(bucket), index)
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # who freezes it later may unfreeze it again
                bucket.grads.grad_hooks.append(parameter.register_post_accumulate_grad_hook(ready))
                parameter.requires_grad_(is_trained)
            handles.extend(bucket.grads.grad_hooks)
    return handles


def map_module_inputs(module: nn.Module, change: Callable[[Any], Any]) -> RemovableHandle:
    """Everything that the module is called with goes through `change` first."""
    return module.register_forward_pre_hook(lambda module, args, kwargs: (change(args), change(kwargs)), prepend=True,
                                            with_kwargs=True)


class _ScaleGradient(torch.autograd.Function):
    """The same in fp32, where small gradients are still there when they are multiplied. What comes by way of another
    output of the module does not pass here."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: Callable[[], float]) -> Tensor:
        context.scale, context.dtype = scale, x.dtype
        return x.float() if x.dtype != torch.float32 else x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient * context.scale()).to(context.dtype), None


def scale_output_gradients(module: nn.Module, scale: Callable[[], float]) -> RemovableHandle:
    """The gradients of its outputs, which become fp32, are multiplied as they come in."""
    def scaled(tensor: Tensor) -> Tensor:
        narrow = tensor.is_floating_point() and tensor.element_size() <= 4
        return _ScaleGradient.apply(tensor, scale) if narrow else tensor  # type: ignore[no-untyped-call]

    return map_module_outputs(module, lambda output: map_tensors(output, scaled))


def on_forward_end(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Whether it returned or raised, and after what else is to happen then."""
    return module.register_forward_hook(EngineHook(lambda module, args, output: call()), always_call=True)


def before_optimizer_steps(call: Callable[[list[Tensor], bool], None]) -> None:
    """Of any optimizer of torch: `call(parameters, has_closure)`."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: call(
        [one for group in optimizer.param_groups for one in group["params"]], any((*args[1:], *kwargs.values()))))


def before_state_dict(module: nn.Module, call: Callable[[bool | None], None]) -> None:
    """`call(None)` before a state dict is taken of the module, `call(assigns)` before one is loaded into it."""
    module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: call(None))
    module.register_load_state_dict_pre_hook(  # torch keeps the mark in the metadata of the state dict
        lambda module, state, prefix, metadata, *more: call(metadata.pop("assign_to_params_buffers", False)))


def on_backward_end(call: Callable[[], None]) -> Callable[[], bool]:
    """At the end of the backward under way, before `backward()` returns. Gives a way to ask whether that will still
    come: a backward that raises forgets what was to be called after it, and tells nobody."""
    def once() -> None:
        call()

    torch.autograd.Variable._execution_engine.queue_callback(once)
    callback_ref = ref(once)
    return lambda: callback_ref() is not None


def map_module_outputs(module: nn.Module, change: Callable[[Any], Any]) -> RemovableHandle:
    return module.register_forward_hook(lambda module, args, output: change(output))


def _refuse_load(buckets: set[FlatBucket], module: nn.Module, *arguments: object) -> None:
    if any(bucket.overwrites_user_writes for bucket in buckets):
        raise ConfigError("load_state_dict of a module that an engine trains: the next step would overwrite it with "
                          "the fp32 masters; call engine.load_module_state_dict(state), or load it inside "
                          "zero.GatheredParameters(parameters, modifier_rank=0)")


def _before_forward(events: UnitEvents, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
    events.before_forward(unit)
    if unit.has_frozen and torch.is_grad_enabled():
        inputs = [tensor for tensor in iter_tensors((args, kwargs)) if tensor.requires_grad and not tensor.is_leaf]
        if inputs:
            register_multi_grad_hook(inputs, lambda gradients: events.input_grads_ready(unit))


class UnitCall:
    """One forward of a unit. The backward of another one that returned the same tensor begins together with its."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._output_ids = {_output_id(x) for x in outputs}

    def shares_output_with(self, other: UnitCall) -> bool:
        return not self._output_ids.isdisjoint(other._output_ids)


def _output_id(output: Tensor) -> object:
    """The same for whatever calls have returned this tensor."""
    mark = output.__dict__.setdefault("zero_mark", object())
    return mark


def _after_forward(events: UnitEvents, unit: Unit, module: nn.Module, inputs: object, output: object) -> object:
    if any(map(unit.has_view, iter_tensors(output))):  # a view would keep all of the gathered buffer
        output = map_tensors(output, lambda tensor: tensor.clone() if unit.has_view(tensor) else tensor)
    output_tensors = list(iter_tensors(output))
    grad_outputs = [tensor for tensor in output_tensors
                    if tensor.requires_grad and not tensor.is_leaf]  # leaves come out of order
    if grad_outputs and unit.sharded_buckets and not unit.is_root:  # the root is gathered until its backward is over
        save_params_by_reference(grad_outputs, unit.sharded_buckets)
    call = UnitCall(grad_outputs)
    for tensor in grad_outputs:
        tensor.register_hook(partial(_before_backward, events, unit, events.weight_version, call))
    if not output_tensors and output is not None and unit.numel:
        raise ConfigError(f"{unit.name} returned a {type(output).__name__}, in which no tensor can be found: its "
                          "backward could not be announced; return tensors, or tuples, lists, dicts or dataclasses of "
                          "them")
    events.after_forward(unit)
    return output


def _before_backward(events: UnitEvents, unit: Unit, weight_version: int, call: UnitCall, gradient: Tensor) -> None:
    events.before_backward(unit, weight_version, call)


def _param_grad_ready(events_of: ref[UnitEvents], unit_of: ref[Unit], bucket_of: ref[FlatBucket], index: int,
                      parameter: Tensor) -> None:
    """The hook of a parameter, which torch's C++ has: a circle that goes through there is never collected. The hooks of
    the modules keep the three."""
    events, unit, bucket = events_of(), unit_of(), bucket_of()
    if events is not None and unit is not None and bucket is not None:
        events.param_grad_ready(unit, bucket, index)
