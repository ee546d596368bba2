"""The section `profile`: where the arithmetic and the time of one step go (megatron/profiler)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.problems import Problems
from megatron.config.setting import setting

_HERE = "flops_profiler."


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The flops profiler: one training step is counted and timed module by module (docs/profiler.md)."""

    flops_profiler: bool = setting(False, "count the arithmetic of one step, module by module", json=_HERE + "enabled")
    flops_profiler_step: int = setting(1, "the step that is profiled, from 1", json=_HERE + "profile_step")
    flops_profiler_module_depth: int = setting(
        -1, "how deep into the modules the sums over classes go; -1: to the innermost", json=_HERE + "module_depth")
    flops_profiler_top_modules: int = setting(1, "how many classes are named at each depth",
                                              json=_HERE + "top_modules")
    flops_profiler_detailed: bool = setting(True, "print every module", json=_HERE + "detailed")
    flops_profiler_output_file: str | None = setting(
        None, "write the profile to this file; its ending says as what: .json, .html, or else text",
        json=_HERE + "output_file", place=True)

    def __post_init__(self) -> None:
        problems = Problems()
        problems.require_range(self, "flops_profiler_step flops_profiler_top_modules", 1)
        problems.require_range(self, "flops_profiler_module_depth", -1)
        problems.stop()

    def notes(self, train_iters: int | None = None) -> list[str]:
        """What is switched on and does nothing."""
        if not self.flops_profiler or train_iters is None or self.flops_profiler_step <= train_iters:
            return []
        return [f" note: --flops-profiler-step {self.flops_profiler_step} does not come: --train-iters {train_iters} "
                "ends the run before it"]
