"""Sections `save`, `log`, `profile` and `autotuning`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from megatron.config.schema import BOOLEAN, COUNT_FROM_0, ConfigSection, ErrorList, JsonKey, setting
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SaveConfig(ConfigSection):
    """Checkpoints: where they are written and read, and what of them."""

    save: str | None = setting(None, "folder to write checkpoints to", common=True)
    load: str | None = setting(None, "folder to resume from, or FOLDER:TAG; must hold a checkpoint, unless it is an "
                               "empty --save", common=True)
    ckpt_step: int | None = setting(None, "resume from the checkpoint of this step, not the one that `latest` names",
                                    ge=0)
    load_hf: str | None = setting(
        None, "Hugging Face GPT-2 folder of the initial weights; --load wins where it resumes", common=True)
    save_interval: int = setting(1000, "steps between checkpoints; 0 saves at the end only", "save-steps",
                                 common=True, ge=0)
    async_save: bool = setting(False, "train on while a copy of the state is written")
    keep_last: int | None = setting(None, "keep only this many of the newest checkpoints", "save-total-limit", ge=1)
    keep_every: int | None = setting(None, "with --keep-last: also keep those of steps divisible by this", ge=1)
    no_save_optim: bool = setting(False, "leave the optimizer state out of checkpoints")
    no_save_rng: bool = setting(False, "leave the random number state out of checkpoints")
    no_load_optim: bool = setting(False, "do not load the optimizer state", needs="load")
    no_load_rng: bool = setting(False, "do not load the random number state", needs="load")
    finetune: bool = setting(False, "load the weights only, and start at iteration 0")
    load_precision_change: bool = setting(False, "accept a checkpoint of another precision; its loss scale restarts")
    resume_fallback: bool = setting(
        False, "if the checkpoint to load is damaged, load its newest intact ancestor, never one of another branch")
    resume_dataloader: bool = setting(False, "accepted for old scripts: the data position is always restored")

    def check(self, errors: ErrorList) -> None:
        errors.require(self.keep_every is None or self.keep_last is not None,
                       "{keep_every} needs {keep_last}: without it every checkpoint is kept")
        for name in ("finetune", "load_precision_change", "resume_fallback", "ckpt_step"):
            value = getattr(self, name)
            errors.require(value is None or value is False or self.load is not None,
                           f"{{{name}}} needs {{load}}: there is nothing to load")


@dataclass(frozen=True, kw_only=True)
class LogConfig(ConfigSection):
    """What a run prints, and where it records it."""

    log_interval: int | None = setting(
        None, "steps between console lines (loss, gradient norm, speed, ...); 0 turns them off (default: a round "
        "number, at most 100, that gives at least ten lines)", "logging-steps", common=True,
        json=JsonKey("steps_per_print", COUNT_FROM_0, nullable=True, help="a flag wins over it"), ge=0)
    log_fields: Literal["auto", "short", "all"] = setting(
        "auto", "what a console line shows; auto is short on a terminal, and all in a file or pipe")
    metrics_file: str | None = setting(None, "append one JSON object per step to this file", common=True)
    tensorboard_dir: str | None = setting(None, "write tensorboard scalars to this folder",
                                          "logging-dir", common=True,
                                          json=JsonKey("tensorboard.enabled", BOOLEAN, is_independent=False))
    csv_dir: str | None = setting(None, "append steps and evaluations to two tables in this folder",
                                  json=JsonKey("csv_monitor.enabled", BOOLEAN, is_independent=False))
    wandb_project: str | None = setting(
        None, "send scalars to this project of Weights & Biases, with the package wandb", metavar="NAME",
        json=JsonKey("wandb.enabled", BOOLEAN, is_independent=False))
    wandb_group: str | None = setting(None, "group of the run in its project", metavar="NAME",
                                      json=JsonKey("wandb.group", is_independent=False))
    wandb_team: str | None = setting(None, "whose project it is (default: the user's own)", "wandb-entity",
                                     metavar="NAME", json=JsonKey("wandb.team", is_independent=False))
    peak_tflops: float | None = setting(None, "peak of one device, for MFU (default: by the device's name)", gt=0)
    sample_tokens: int = setting(64, "tokens of each text sample at the end; 0 turns them off", ge=0)
    sample_prompt: tuple[str, ...] = setting(("The",), "prompts of the text samples at the end", metavar="TEXT")
    summary: bool = setting(False, "at the end, a chart of the losses of --metrics-file, the samples as paragraphs, "
                            "and what to do next")
    verbose: bool = setting(False, "print the whole configuration at the start")
    debug: bool = setting(False, "print tracebacks")

    def check(self, errors: ErrorList) -> None:
        for name in ("wandb_group", "wandb_team"):
            errors.require(getattr(self, name) is None or self.wandb_project is not None,
                           f"{{{name}}} needs {{wandb_project}}")


def check_wandb(flag: str) -> None:
    """Raise a ConfigError if the wandb package is missing. Does not import it."""
    if find_spec("wandb") is None:
        raise ConfigError(f"{flag} needs the package wandb, which is not installed: pip install wandb, or leave "
                          f"{flag} out")


_FLOPS_PROFILER = "flops_profiler."


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(ConfigSection):
    """The flops profiler counts and times one training step module by module; a trace says what ran when
    (docs/profiler.md, docs/trace.md)."""

    flops_profiler: bool = setting(False, "count the arithmetic of one step, module by module",
                                   json=_FLOPS_PROFILER + "enabled")
    flops_profiler_step: int = setting(1, "the step that is profiled, from 1", json=_FLOPS_PROFILER + "profile_step",
                                       ge=1, needs="flops_profiler")
    flops_profiler_module_depth: int = setting(-1, "how deep into the modules the sums over classes go; -1: to the "
                                               "innermost", json=_FLOPS_PROFILER + "module_depth", ge=-1,
                                               needs="flops_profiler")
    flops_profiler_top_modules: int = setting(1, "how many classes are named at each depth",
                                              json=_FLOPS_PROFILER + "top_modules", ge=1, needs="flops_profiler")
    flops_profiler_detailed: bool = setting(True, "print every module", json=_FLOPS_PROFILER + "detailed",
                                            needs="flops_profiler")
    flops_profiler_output_file: str | None = setting(
        None, "write the profile to this file: JSON if its ending is .json, else text",
        json=_FLOPS_PROFILER + "output_file", is_location=True, needs="flops_profiler")

    profile_steps: str | None = setting(
        None, "trace these steps, FIRST:LAST: a file for ui.perfetto.dev, on a GPU a memory snapshot, and a line that "
              "says where the time went", metavar="FIRST:LAST")
    profile_rank: int = setting(0, "the rank that is traced", metavar="RANK", ge=0, needs="profile_steps")
    profile_dir: str | None = setting(None, "folder of the traces (default: profile)", metavar="DIR", is_location=True,
                                      needs="profile_steps")

    @property
    def traced_steps(self) -> range | None:
        """The traced steps, both ends included; None without a trace."""
        if self.profile_steps is None:
            return None
        first, last = map(int, self.profile_steps.split(":"))
        return range(first, last + 1)

    def check(self, errors: ErrorList) -> None:
        steps = self.profile_steps
        is_range = steps is None or re.fullmatch(r"[1-9]\d*:[1-9]\d*", steps) is not None and bool(self.traced_steps)
        errors.require(is_range, "{profile_steps=} is no FIRST:LAST of steps from 1 on, in their order: write 10:12, "
                       "say, for steps 10 to 12")
        errors.require(not (self.flops_profiler_output_file or "").lower().endswith((".html", ".htm")),
                       "{flops_profiler_output_file=}: a profile is JSON or text, no page; name a .json or .txt file")

    def notes(self, train_iters: int | None = None) -> list[str]:
        """Notes on settings that are on but have no effect."""
        late = {}
        if self.flops_profiler:
            late[f"--flops-profiler-step {self.flops_profiler_step}"] = self.flops_profiler_step
        if self.traced_steps is not None:
            late[f"--profile-steps {self.profile_steps}"] = self.traced_steps[0]
        return [f" note: {flag} does not come: --train-iters {train_iters} ends the run before it"
                for flag, first in late.items() if train_iters is not None and first > train_iters]


_AUTOTUNING = "autotuning."


@dataclass(frozen=True, kw_only=True)
class AutotuningConfig(ConfigSection):
    """The search for the fastest settings of a machine, by `python -m megatron.tune` (docs/tune.md). Training itself
    tunes nothing."""

    autotuning: bool = setting(False, "python -m megatron.tune with the same flags is what tunes",
                               json=_AUTOTUNING + "enabled", is_unread=True)
    autotuning_results_dir: str = setting(
        "autotuning_results", "folder of what the trials wrote, and of what came of them",
        json=_AUTOTUNING + "results_dir")
    autotuning_start_profile_step: int = setting(3, "the first step of a trial that counts, from 1",
                                                 json=_AUTOTUNING + "start_profile_step", ge=1)
    autotuning_end_profile_step: int = setting(5, "the last one, after which the trial ends",
                                               json=_AUTOTUNING + "end_profile_step")
    autotuning_tuner_num_trials: int = setting(50, "trials at most", json=_AUTOTUNING + "tuner_num_trials", ge=1)
    autotuning_mp_size: int | None = setting(
        None, "tensor parallel size (default: all that divide ranks and model are tried)",
        json=JsonKey(_AUTOTUNING + "mp_size", help="DeepSpeed's default is 1"), ge=1)

    def check(self, errors: ErrorList) -> None:
        errors.require(self.autotuning_end_profile_step >= self.autotuning_start_profile_step,
                       "{autotuning_end_profile_step=} is before {autotuning_start_profile_step=}")
