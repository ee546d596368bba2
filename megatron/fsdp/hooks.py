"""Hooks of sharded modules besides those of their units (zero/hooks.py): on inputs, gradients, state dicts, optimizer
steps, and at the end of a forward or a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron.zero.hooks import EngineHook, map_module_outputs, map_tensors


def map_module_inputs(module: nn.Module, change: Callable[[Any], Any]) -> RemovableHandle:
    """Apply `change` to the positional and keyword arguments of every call of the module."""
    return module.register_forward_pre_hook(lambda module, args, kwargs: (change(args), change(kwargs)), prepend=True,
                                            with_kwargs=True)


class _ScaleGradient(torch.autograd.Function):
    """Identity, cast to fp32 in the forward, so that small gradients are scaled before they are cast to 16 bits."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: Callable[[], float]) -> Tensor:
        context.scale, context.dtype = scale, x.dtype
        return x.float() if x.dtype != torch.float32 else x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient * context.scale()).to(context.dtype), None


def scale_output_gradients(module: nn.Module, scale: Callable[[], float]) -> RemovableHandle:
    """Multiply the gradients of the module's outputs by `scale()`. The outputs become fp32."""
    def scaled(tensor: Tensor) -> Tensor:
        narrow = tensor.is_floating_point() and tensor.element_size() <= 4
        return _ScaleGradient.apply(tensor, scale) if narrow else tensor  # type: ignore[no-untyped-call]

    return map_module_outputs(module, lambda output: map_tensors(output, scaled))


def on_forward_end(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call `call` when a forward returns or raises, after the hooks registered so far."""
    return module.register_forward_hook(EngineHook(lambda module, args, output: call()), always_call=True)


def before_optimizer_steps(call: Callable[[list[Tensor], bool], None]) -> None:
    """Call `call(parameters, has_closure)` before every step of any torch optimizer in the process."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: call(
        [one for group in optimizer.param_groups for one in group["params"]], any((*args[1:], *kwargs.values()))))


def before_state_dict(module: nn.Module, call: Callable[[bool | None], None]) -> None:
    """Call `call(None)` before `state_dict()` of the module, and `call(assign)` before `load_state_dict()`."""
    module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: call(None))
    module.register_load_state_dict_pre_hook(  # torch passes assign= in the metadata of the state dict
        lambda module, state, prefix, metadata, *more: call(metadata.pop("assign_to_params_buffers", False)))


def on_backward_end(call: Callable[[], None]) -> Callable[[], bool]:
    """Run `call` at the end of the running backward, before `backward()` returns.

    The returned function tells whether the call is still to come: a backward that raises drops its callbacks
    silently."""
    def once() -> None:
        call()

    torch.autograd.Variable._execution_engine.queue_callback(once)
    callback_ref = ref(once)
    return lambda: callback_ref() is not None
