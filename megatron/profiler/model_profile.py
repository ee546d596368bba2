"""get_model_profile: one forward of a model, profiled in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.profiler.profiler import FlopsProfiler

_MODES = ("forward", "generate")


def get_model_profile(
    model: nn.Module, input_shape: Sequence[int] | None = None, args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None, print_profile: bool = True, detailed: bool = True, module_depth: int = -1,
    top_modules: int = 1, warm_up: int = 1, as_string: bool = True, output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None, mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(FLOPs, MACs, parameters) of model(*args, **kwargs), or of model.generate(...) with `mode="generate"`.

    `input_shape` stands for one tensor of ones, of the shape and the model's dtype. It runs without gradients and
    without dropout, `warm_up` times before it counts; afterwards each module is in the mode that it was in. A model on
    the meta device is counted without being run.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r}: expected one of {', '.join(_MODES)}")
    given = [*_inputs(model, input_shape), *args]
    named = kwargs or {}
    if not given and not named:
        raise ConfigError("get_model_profile needs input_shape, args or kwargs: what the model is called with")
    profiler = FlopsProfiler(model)
    call: Callable[..., Any] = model if mode == "forward" else getattr(model, mode)
    with _eval_mode(model), torch.no_grad():
        for _ in range(warm_up):
            call(*given, **named)
        profiler.start_profile(ignore_modules)
        try:
            call(*given, **named)
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=detailed,
                                     output_file=output_file)
    return (profiler.get_total_flops(as_string), profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string))


def _inputs(model: nn.Module, shape: Sequence[int] | None) -> list[torch.Tensor]:
    if shape is None:
        return []
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0))
    return [torch.ones(tuple(shape), dtype=like.dtype, device=like.device)]


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation; afterwards each in the mode that it was in, which need not be the model's."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
