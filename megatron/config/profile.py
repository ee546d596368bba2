"""The section `profile`: where arithmetic and time go: the flops profiler (profiler/) and traces (trace/)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.problems import ErrorList
from megatron.config.setting import setting

_FLOPS_PROFILER = "flops_profiler."


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The flops profiler counts and times one training step module by module; a trace says what ran when
    (docs/profiler.md, docs/trace.md)."""

    flops_profiler: bool = setting(False,
                                   "count the arithmetic of one step, module by module",
                                   json=_FLOPS_PROFILER + "enabled")
    flops_profiler_step: int = setting(1, "the step that is profiled, from 1", json=_FLOPS_PROFILER + "profile_step")
    flops_profiler_module_depth: int = setting(
        -1,
        "how deep into the modules the sums over classes go; -1: to the innermost",
        json=_FLOPS_PROFILER + "module_depth")
    flops_profiler_top_modules: int = setting(1, "how many classes are named at each depth",
                                              json=_FLOPS_PROFILER + "top_modules")
    flops_profiler_detailed: bool = setting(True, "print every module", json=_FLOPS_PROFILER + "detailed")
    flops_profiler_output_file: str | None = setting(
        None, "write the profile to this file; its ending says as what: .json, .html, or else text",
        json=_FLOPS_PROFILER + "output_file", is_location=True)

    profile_steps: str | None = setting(
        None, "trace these steps, FIRST:LAST: a file for ui.perfetto.dev, memory over time, and a line that says where "
              "the time went", metavar="FIRST:LAST")
    profile_rank: int = setting(0, "the rank that is traced", metavar="RANK")
    profile_dir: str | None = setting(None, "folder of the traces (default: profile)", metavar="DIR", is_location=True)

    @property
    def traced_steps(self) -> range | None:
        """The first and all up to the last; None: no trace is asked for."""
        if self.profile_steps is None:
            return None
        first, last = map(int, self.profile_steps.split(":"))
        return range(first, last + 1)

    def __post_init__(self) -> None:
        problems = ErrorList()
        asked = self.profile_steps
        is_range = asked is None or re.fullmatch(r"[1-9]\d*:[1-9]\d*", asked) is not None and bool(self.traced_steps)
        problems.require(is_range, f"--profile-steps {asked} is no FIRST:LAST of steps from 1 on, in their order: "
                                   "write 10:12, say, for steps 10 to 12")
        problems.require_range(self, "profile_rank", 0)
        problems.require_range(self, "flops_profiler_step flops_profiler_top_modules", 1)
        problems.require_range(self, "flops_profiler_module_depth", -1)
        problems.raise_if_any()

    def notes(self, train_iters: int | None = None) -> list[str]:
        """What is switched on and does nothing."""
        late = {}
        if self.flops_profiler:
            late[f"--flops-profiler-step {self.flops_profiler_step}"] = self.flops_profiler_step
        if self.traced_steps is not None:
            late[f"--profile-steps {self.profile_steps}"] = self.traced_steps[0]
        return [f" note: {flag} does not come: --train-iters {train_iters} ends the run before it"
                for flag, first in late.items() if train_iters is not None and first > train_iters]
