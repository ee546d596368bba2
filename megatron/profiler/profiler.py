"""FlopsProfiler, with DeepSpeed's names: where the arithmetic, the time and the parameters of a model are.

    profiler = FlopsProfiler(model)
    profiler.start_profile();  loss = model(batch);  loss.backward();  profiler.stop_profile()
    profiler.print_model_profile();  profiler.end_profile()

What runs between start and stop is counted, whatever it is: a backward as it runs, and what it recomputes. (DeepSpeed
counts a forward, and takes a backward for two; so is one taken here that was not seen.) The model stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import nn

from megatron.errors import ConfigError
from megatron.profiler.nodes import tensor_parallel_size
from megatron.profiler.numbers import lasted, short
from megatron.profiler.output import write
from megatron.profiler.profile import FLOPS_PER_MAC, Layout, Profile, profile_of
from megatron.profiler.recording import Recording
from megatron.profiler.text import aggregated, report
from mpu.groups import Groups


class Engine(Protocol):
    """What a profiler asks of an engine: the job that its model is trained in."""

    @property
    def groups(self) -> Groups: ...

    @property
    def parameters_kept(self) -> int: ...

    def train_batch_size(self) -> int: ...

    def train_micro_batch_size_per_gpu(self) -> int: ...

    def zero_optimization_stage(self) -> int: ...


class FlopsProfiler:
    def __init__(self, model: nn.Module, ds_engine: Engine | None = None, recompute_fwd_factor: float = 0.0) -> None:
        """`recompute_fwd_factor`: of a backward that is not seen, the part of a forward that it runs again."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"FlopsProfiler takes a torch.nn.Module, not a {type(model).__name__}; of an engine, "
                              "give engine.module and the engine itself as ds_engine")
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self._recording: Recording | None = None
        self._running: AbstractContextManager[None] | None = None
        self._profile: Profile | None = None

    # ---- recording ----------------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Count from here on, from nothing. What runs in modules of the classes in `ignore_list`, and in those inside
        them, is not counted."""
        if self._running is not None:
            raise ConfigError("start_profile: a profile is under way; call stop_profile first")
        self._recording, self._profile = Recording(self.model, tuple(ignore_list or ())), None
        self._running = self._recording.on()
        self._running.__enter__()

    def stop_profile(self) -> None:
        if self._running is None or self._recording is None:
            raise ConfigError("stop_profile: no profile is under way; call start_profile first")
        if not self._recording.can_end:
            raise ConfigError("stop_profile: another profile, or mode of torch's, was started after this one and is on "
                              "still, or this one was started by another thread; stop there, the last one first")
        running, self._running = self._running, None
        running.__exit__(None, None, None)

    @contextmanager
    def part(self, name: str, counts: bool = True) -> Iterator[None]:
        """Record one part of a step, forward, backward or step, or only its time. They add up until
        `reset_profile`."""
        if self._recording is None:
            self._recording = Recording(self.model)
        self._profile = None
        with self._recording.on(name) if counts else self._recording.timed(name):
            yield

    def reset_profile(self) -> None:
        """Forget what was recorded."""
        self._profile = None
        if self._recording is not None:
            self._recording.forget()

    def end_profile(self) -> None:
        """Stop, and forget. Nothing has to be taken off the model: nothing was put on it."""
        if self._running is not None:
            self.stop_profile()
        self._recording = self._profile = None

    # ---- what was found -----------------------------------------------------------------------------------------

    def profile(self, step: int | None = None, step_before: float | None = None) -> Profile:
        """What was recorded, as plain numbers. `step_before`: how long the step before took."""
        if self._recording is None or self._running is not None:
            raise ConfigError("there is no profile: call start_profile, run the model, call stop_profile")
        if self._profile is None or (self._profile.step, self._profile.step_before) != (step, step_before):
            self._profile = profile_of(self._recording, layout=self._layout(), step=step, step_before=step_before,
                                       recompute_factor=self.recompute_fwd_factor)
        return self._profile

    def _layout(self) -> Layout:
        engine = self.ds_engine
        if engine is None:
            tp = tensor_parallel_size(self.model)
            return Layout(world=tp, tp=tp)
        groups = engine.groups
        return Layout(groups.world.size, groups.dp.size, groups.tp.size, engine.zero_optimization_stage(),
                      engine.train_micro_batch_size_per_gpu(), engine.train_batch_size(), engine.parameters_kept)

    def _any(self) -> Profile:
        return self._profile or self.profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Of the forwards, in the whole model."""
        flops = FLOPS_PER_MAC * self._any().macs.forward
        return short(flops, "FLOPs") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        macs = self._any().macs.forward
        return short(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Of the forwards, in seconds."""
        seconds = self._any().root.seconds
        return lasted(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        parameters = self._any().root.parameters
        return short(parameters) if as_string else parameters

    def print_model_profile(self, profile_step: int | None = None, module_depth: int = -1, top_modules: int = 1,
                            detailed: bool = True, output_file: str | None = None) -> None:
        """Print the profile, or write it to a file, whose ending says as what: .json, .html, or text."""
        found = self._any() if profile_step is None else self.profile(profile_step)
        if output_file is None:
            print(report(found, module_depth, top_modules, detailed), flush=True)
        else:
            write(found, output_file, module_depth, top_modules, detailed)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        print("\n".join(aggregated(self._any(), module_depth, top_modules)), flush=True)
