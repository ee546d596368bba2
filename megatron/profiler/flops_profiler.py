"""`FlopsProfiler` and `get_model_profile`, with DeepSpeed's names.

Everything that runs between start and stop is counted, including the backward and recomputation. A backward that
did not run is estimated as two forwards, as DeepSpeed does. The model is not modified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.profiler.flop_recorder import FlopRecording
from megatron.profiler.profile import (FLOPS_PER_MAC, ModelProfile, ProfiledJob, aggregated_lines, build_profile,
                                       format_count, format_profile, format_seconds, tensor_parallel_size,
                                       write_profile)


class FlopsProfiler:
    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        """`ds_engine`: an engine of zero.initialize, whose layout the summary then shows. `recompute_fwd_factor`:
        forwards that the estimate of a missing backward adds for recomputation."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"FlopsProfiler takes a torch.nn.Module, not a {type(model).__name__}; of an engine, "
                              "give engine.module and the engine itself as ds_engine")
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self._recording: FlopRecording | None = None
        self._running: AbstractContextManager[None] | None = None
        self._profile: ModelProfile | None = None

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Start a new profile. Modules of the classes in `ignore_list`, and those inside them, are not counted."""
        if self._running is not None:
            raise ConfigError("start_profile: a profile is under way; call stop_profile first")
        self._recording, self._profile = FlopRecording(self.model, tuple(ignore_list or ())), None
        self._running = self._recording.record()
        self._running.__enter__()

    def stop_profile(self) -> None:
        if self._running is None:
            raise ConfigError("stop_profile: no profile is under way; call start_profile first")
        running, self._running = self._running, None
        running.__exit__(None, None, None)

    @contextmanager
    def part(self, name: str, counts: bool = True) -> Iterator[None]:
        """Record one part of a step (forward, backward or step), or only its time. Parts add up until `reset_profile`.
        """
        if self._recording is None:
            self._recording = FlopRecording(self.model)
        self._profile = None
        with self._recording.record(name) if counts else self._recording.record_time(name):
            yield

    def reset_profile(self) -> None:
        """Discard what was recorded."""
        self._profile = None
        if self._recording is not None:
            self._recording.reset()

    def end_profile(self) -> None:
        """Stop, and discard the profile."""
        if self._running is not None:
            self.stop_profile()
        self._recording = self._profile = None

    def profile(self, step: int | None = None, step_before: float | None = None) -> ModelProfile:
        """The results as plain numbers. `step_before`: seconds of the step before the profiled one."""
        if self._recording is None or self._running is not None:
            raise ConfigError("there is no profile: call start_profile, run the model, call stop_profile")
        engine, tp = self.ds_engine, tensor_parallel_size(self.model)
        job = ProfiledJob(world=tp, tp=tp) if engine is None else ProfiledJob(
            engine.groups.world.size, engine.groups.dp.size, engine.groups.tp.size,
            engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu(), engine.train_batch_size(),
            engine.parameters_kept)
        self._profile = build_profile(self._recording, layout=job, step=step, step_before=step_before,
                                      backward_in_forwards=2 + self.recompute_fwd_factor)
        return self._profile

    def _current_profile(self) -> ModelProfile:
        return self._profile or self.profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Of the forwards of the full model."""
        flops = FLOPS_PER_MAC * self._current_profile().macs.forward
        return format_count(flops, "FLOPs") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        macs = self._current_profile().macs.forward
        return format_count(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forwards."""
        seconds = self._current_profile().root.seconds
        return format_seconds(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        parameters = self._current_profile().root.parameters
        return format_count(parameters) if as_string else parameters

    def print_model_profile(self, profile_step: int | None = None, module_depth: int = -1, top_modules: int = 1,
                            detailed: bool = True, output_file: str | None = None) -> None:
        """Print the profile, or write it to a file: JSON or text, by its extension."""
        profile = self._current_profile() if profile_step is None else self.profile(profile_step)
        if output_file is None:
            print(format_profile(profile, module_depth, top_modules, detailed), flush=True)
        else:
            write_profile(profile, output_file, module_depth, top_modules, detailed)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        print("\n".join(aggregated_lines(self._current_profile(), module_depth, top_modules)), flush=True)


def get_model_profile(
    model: nn.Module, input_shape: Sequence[int] | None = None, args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None, print_profile: bool = True, detailed: bool = True, module_depth: int = -1,
    top_modules: int = 1, warm_up: int = 1, as_string: bool = True, output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None, mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(FLOPs, MACs, parameters) of model(*args, **kwargs), or of model.generate(...) with `mode="generate"`.

    `input_shape` stands for a tensor of ones of the model's dtype. The model runs without gradients and dropout,
    `warm_up` times before it counts; each module then returns to its mode. A model on the meta device works too.
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(f"mode={mode!r}: expected one of forward, generate")
    inputs, named = list(args), kwargs or {}
    if input_shape is not None:
        like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0))
        inputs.insert(0, torch.ones(tuple(input_shape), dtype=like.dtype, device=like.device))
    if not inputs and not named:
        raise ConfigError("get_model_profile needs input_shape, args or kwargs: what the model is called with")
    profiler = FlopsProfiler(model)
    call: Callable[..., Any] = model if mode == "forward" else getattr(model, mode)
    modes = {module: module.training for module in model.modules()}  # which need not be the model's
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*inputs, **named)
            profiler.start_profile(ignore_modules)
            try:
                call(*inputs, **named)
            finally:
                profiler.stop_profile()
    finally:
        for module, training in modes.items():
            module.training = training
    if print_profile:
        profiler.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=detailed,
                                     output_file=output_file)
    return (profiler.get_total_flops(as_string), profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string))
