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
from megatron.profiler.numbers import format_count, format_seconds
from megatron.profiler.output import write_profile
from megatron.profiler.profile import FLOPS_PER_MAC, ModelProfile, ProfiledJob, build_profile
from megatron.profiler.recording import FlopRecording
from megatron.profiler.text import aggregated_lines, format_profile
from mpu.groups import Groups


class ProfiledEngine(Protocol):
    """What a profiler asks of an engine: the job that its model is trained in."""

    @property
    def groups(self) -> Groups: ...

    @property
    def parameters_kept(self) -> int: ...

    def train_batch_size(self) -> int: ...

    def train_micro_batch_size_per_gpu(self) -> int: ...

    def zero_optimization_stage(self) -> int: ...


class FlopsProfiler:
    def __init__(self,
                 model: nn.Module,
                 ds_engine: ProfiledEngine | None = None,
                 recompute_fwd_factor: float = 0.0) -> None:
        """`recompute_fwd_factor`: of a backward that is not seen, the part of a forward that it runs again."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"FlopsProfiler takes a torch.nn.Module, not a {type(model).__name__}; of an engine, "
                              "give engine.module and the engine itself as ds_engine")
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self._recording: FlopRecording | None = None
        self._running: AbstractContextManager[None] | None = None
        self._profile: ModelProfile | None = None

    # ---- recording ----------------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Count from here on, from nothing. What runs in modules of the classes in `ignore_list`, and in those inside
        them, is not counted."""
        if self._running is not None:
            raise ConfigError("start_profile: a profile is under way; call stop_profile first")
        self._recording, self._profile = FlopRecording(self.model, tuple(ignore_list or ())), None
        self._running = self._recording.record()
        self._running.__enter__()

    def stop_profile(self) -> None:
        if self._running is None or self._recording is None:
            raise ConfigError("stop_profile: no profile is under way; call start_profile first")
        if not self._recording.can_stop:
            raise ConfigError("stop_profile: another profile, or mode of torch's, was started after this one and is on "
                              "still, or this one was started by another thread; stop there, the last one first")
        running, self._running = self._running, None
        running.__exit__(None, None, None)

    @contextmanager
    def part(self, name: str, counts: bool = True) -> Iterator[None]:
        """Record one part of a step, forward, backward or step, or only its time. They add up until
        `reset_profile`."""
        if self._recording is None:
            self._recording = FlopRecording(self.model)
        self._profile = None
        with self._recording.record(name) if counts else self._recording.record_time(name):
            yield

    def reset_profile(self) -> None:
        """Forget what was recorded."""
        self._profile = None
        if self._recording is not None:
            self._recording.reset()

    def end_profile(self) -> None:
        """Stop, and forget. Nothing has to be taken off the model: nothing was put on it."""
        if self._running is not None:
            self.stop_profile()
        self._recording = self._profile = None

    # ---- what was found -----------------------------------------------------------------------------------------

    def profile(self, step: int | None = None, step_before: float | None = None) -> ModelProfile:
        """What was recorded, as plain numbers. `step_before`: how long the step before took."""
        if self._recording is None or self._running is not None:
            raise ConfigError("there is no profile: call start_profile, run the model, call stop_profile")
        if self._profile is None or (self._profile.step, self._profile.step_before) != (step, step_before):
            self._profile = build_profile(self._recording, layout=self._layout(), step=step, step_before=step_before,
                                          recompute_factor=self.recompute_fwd_factor)
        return self._profile

    def _layout(self) -> ProfiledJob:
        engine = self.ds_engine
        if engine is None:
            tp = tensor_parallel_size(self.model)
            return ProfiledJob(world=tp, tp=tp)
        groups = engine.groups
        return ProfiledJob(groups.world.size, groups.dp.size, groups.tp.size, engine.zero_optimization_stage(),
                           engine.train_micro_batch_size_per_gpu(), engine.train_batch_size(), engine.parameters_kept)

    def _current_profile(self) -> ModelProfile:
        return self._profile or self.profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Of the forwards, in the whole model."""
        flops = FLOPS_PER_MAC * self._current_profile().macs.forward
        return format_count(flops, "FLOPs") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        macs = self._current_profile().macs.forward
        return format_count(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Of the forwards, in seconds."""
        seconds = self._current_profile().root.seconds
        return format_seconds(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        parameters = self._current_profile().root.parameters
        return format_count(parameters) if as_string else parameters

    def print_model_profile(self, profile_step: int | None = None, module_depth: int = -1, top_modules: int = 1,
                            detailed: bool = True, output_file: str | None = None) -> None:
        """Print the profile, or write it to a file, whose ending says as what: .json, .html, or text."""
        found = self._current_profile() if profile_step is None else self.profile(profile_step)
        if output_file is None:
            print(format_profile(found, module_depth, top_modules, detailed), flush=True)
        else:
            write_profile(found, output_file, module_depth, top_modules, detailed)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        print("\n".join(aggregated_lines(self._current_profile(), module_depth, top_modules)), flush=True)
