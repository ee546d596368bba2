"""Optional features of an engine: progressive layer drop, eigenvalues for MoQ, and the flops profile of one step.

Progressive layer drop: in training the forward gets `progressive_layer_drop=True, pld_theta=theta`, and `pld_step` if
it has such a parameter. The model decides which layers to skip. Eigenvalues: before a bit width changes, the last
micro-batch is run again on every rank with its random numbers; the forward must return the loss. Profile: rank 0 counts
one step; the step before is timed for comparison. Compiled modules run uncompiled in it.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.config.model_config import LayerDropConfig, QuantizeConfig
from megatron.config.tree import Config
from megatron.distributed.consistency import on_rank_0
from megatron.errors import ConfigError, StorageError
from megatron.zero.eigenvalue import HessianEigensolver
from megatron.zero.engine import ZeroEngine
from megatron.zero.moq import MoQState
from mpu.random import capture_rng, restore_rng

if TYPE_CHECKING:
    from megatron.profiler import FlopsProfiler


class EigenvalueEstimator:
    def __init__(self, core: ZeroEngine, config: QuantizeConfig, quantisation: MoQState) -> None:
        self._core, self._quantisation = core, quantisation
        self._curvature = HessianEigensolver(core.buckets, core.groups, max_iter=config.eigenvalue_max_iter,
                                             tol=config.eigenvalue_tol, stability=config.eigenvalue_stability)
        self._last_forward: tuple[Sequence[Any], Mapping[str, Any], dict[str, object]] | None = None

    def record_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments and random state of a training forward, if a bit width may change soon."""
        self._last_forward = (args, kwargs, capture_rng()) if self._quantisation.bits_may_fall_soon else None

    def after_step(self) -> None:
        """Compute the eigenvalues if the next step uses them. Collective."""
        if self._last_forward is None or not self._quantisation.bits_fall_next_step(self._core.counters.applied_steps):
            return
        core, (args, kwargs, streams) = self._core, self._last_forward
        core.finish_step()
        now = capture_rng()
        try:
            with core.backwards_without_step() as reset:
                def run() -> None:
                    reset()
                    restore_rng(streams)
                    loss = core.module(*args, **kwargs)
                    if not isinstance(loss, Tensor) or loss.numel() != 1:
                        raise ConfigError(
                            "--quantize-eigenvalue: the forward of the model returns something else than its loss, "
                            "which is run again to find eigenvalues: let it return the loss, or leave the setting out")
                    core.backward(loss * core.accumulation_steps)

                self._quantisation.set_eigenvalues([
                    self._curvature.eigenvalue(block, f"{block} {self._quantisation.counter}", run)
                    for block in self._quantisation.blocks[1:]])
        finally:
            restore_rng(now)
        self._last_forward = None


FORWARD_ARGUMENTS = ("progressive_layer_drop", "pld_theta")
STEP_ARGUMENT = "pld_step"


class ProgressiveLayerDrop:
    """`engine.progressive_layer_drop`, with DeepSpeed's names. Stateless: theta follows from the engine's step, so a
    resumed run continues."""

    def __init__(self, config: LayerDropConfig, module: nn.Module, step: Callable[[], int]) -> None:
        assert config.schedule is not None, "progressive layer drop is on"
        self._schedule, self._step, self._passes_step = config.schedule, step, check_forward_signature(module)
        self.theta, self.gamma = config.pld_theta, config.pld_gamma

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self._step()

    def get_theta(self, step: int | None = None) -> float:
        """theta of `step`, by default the current one."""
        return self._schedule.theta_at(self.step if step is None else step)

    current_theta = property(get_theta)

    def get_state(self) -> dict[str, Any]:
        """Keyword arguments of the forward."""
        return dict(zip(FORWARD_ARGUMENTS, (True, self.get_theta()), strict=True))

    def forward_arguments(self) -> dict[str, Any]:
        """`get_state`, plus `pld_step` if the forward has that parameter."""
        return {**self.get_state(), **({STEP_ARGUMENT: self.step} if self._passes_step else {})}


def check_forward_signature(module: nn.Module) -> bool:
    """Raise ConfigError if the forward lacks the layer drop arguments; True if it also takes `pld_step`."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    missing = [name for name in FORWARD_ARGUMENTS if name not in parameters and not takes_any]
    if missing:
        raise ConfigError(
            f"--progressive-layer-drop: forward of {type(module).__name__} takes no {' and no '.join(missing)}, and it "
            "is the model that leaves out its layers: give its forward the keyword arguments "
            "progressive_layer_drop=False, pld_theta=1.0 (docs/methods.md), or leave the setting out")
    return STEP_ARGUMENT in parameters


class ProfiledStep:
    def __init__(self, config: Config, core: ZeroEngine, engine: Any) -> None:
        self._config, self._key_names, self._core = config.profile, config.key_names, core
        self._previous_step_seconds: float | None = None
        self.profiler: FlopsProfiler | None = None
        """On rank 0, if a profile is configured."""
        path = self._config.flops_profiler_output_file
        if self._config.flops_profiler and path:
            from megatron.profiler.profile import check_output_path
            on_rank_0(lambda: check_output_path(path, "--flops-profiler-output-file"), core.groups.world)
        if self._config.flops_profiler and core.groups.world.rank == 0:
            from megatron import profiler
            self.profiler = profiler.FlopsProfiler(core.module, engine)
        self._is_due = self._config.flops_profiler

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Context of forward, backward or step. The optimizer step is timed but its FLOPs are not counted."""
        if not self._is_due or not self._core.module.training:
            return nullcontext()
        ahead = self._config.flops_profiler_step - self._core.global_steps - 1
        if ahead < 0:
            self._is_due = False
            if self.profiler is not None:
                print(self._key_names.translate(
                    f" note: nothing is profiled: --flops-profiler-step {self._config.flops_profiler_step} "
                    f"is over, the run goes on at step {self._core.global_steps + 1}"), flush=True)
        if self.profiler is None and ahead == 0:
            from megatron.profiler.flop_recorder import run_uncompiled
            return run_uncompiled()
        if self.profiler is not None and ahead == 0:
            return self.profiler.part(name, counts=name != "step")
        return self._time_phase() if self.profiler is not None and ahead == 1 else nullcontext()

    def step_done(self) -> None:
        """After an optimizer step; writes the report of the profiled one."""
        step, config = self._core.global_steps, self._config
        if not self._is_due or step != config.flops_profiler_step:
            return
        self._is_due = False
        if self.profiler is None:
            return
        from megatron.profiler.profile import format_profile, is_json, write_profile

        profile, path = self.profiler.profile(step, self._previous_step_seconds), config.flops_profiler_output_file
        depth, top, detailed = (config.flops_profiler_module_depth, config.flops_profiler_top_modules,
                                config.flops_profiler_detailed)
        print(format_profile(profile, depth, top, detailed=detailed and path is None), flush=True)
        if path is not None:
            try:
                write_profile(profile, path, depth, top, detailed)
                modules = ", every module" if detailed or is_json(path) else ""
                print(f" profile of step {step}{modules}: {path}", flush=True)
            except StorageError as error:  # a failed profile must not end the job
                print(f"warning: {error}; training goes on without it", file=sys.stderr, flush=True)

    @contextmanager
    def _time_phase(self) -> Iterator[None]:
        start = self._now()
        yield
        self._previous_step_seconds = (self._previous_step_seconds or 0.0) + self._now() - start

    def _now(self) -> float:
        device = self._core.state.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()
