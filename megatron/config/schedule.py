"""The section `schedule`: the learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.kinds import COUNT, COUNT_0, NUMBER, SHARE, choice
from megatron.config.setting import Key, require, require_range, setting

STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""scheduler.type -> --lr-decay-style"""
_REFUSED = {
    "lrrangetest": "a range test is no schedule to train with; try values of --lr",
    "onecycle": "there is no cyclic schedule, and momentum is constant; use WarmupDecayLR or WarmupCosineLR",
}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate: warm up, then decay until --lr-decay-iters."""

    lr: float = setting(1.5e-4, "peak learning rate", newcomer=True, json=(
        Key("optimizer.params.lr", NUMBER),
        Key("scheduler.params.warmup_max_lr", NUMBER,
            help="not with `WarmupCosineLR`, whose peak is the optimizer's `lr`")))
    min_lr: float = setting(0.0, "learning rate at the end of the decay", json=Key(
        "scheduler.params.cos_min_ratio", SHARE, alone=False, default="0.0001",
        help="as a share of the peak; only with `WarmupCosineLR`"))
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "inverse-square-root"] = setting(
        "cosine", "shape of the decay",
        json=Key("scheduler.type", choice(*STYLES), refused=_REFUSED, alone=False, default="",
                 help="`WarmupLR`: constant; `WarmupDecayLR`: linear down to 0; `WarmupCosineLR`: cosine"))
    lr_decay_iters: int | None = setting(
        None, "step at which --min-lr is reached (default: --train-iters)",
        json=Key("scheduler.params.total_num_steps", COUNT, alone=False, nullable=True, help="not with `WarmupLR`"))
    warmup: float = setting(
        0.01, "share of --lr-decay-iters spent warming up",
        json=Key("scheduler.params.warmup_num_steps", COUNT_0, alone=False, default="1000",
                 help="as a number of steps"))
    warmup_type: Literal["linear", "log"] = setting(
        "linear", "shape of the warm-up; log rises fast at first",
        json=Key("scheduler.params.warmup_type", default='"log"', help="the flag's own default is linear"))
    override_lr_scheduler: bool = setting(False, "on resume, use these flags and not the checkpoint's schedule")
    use_checkpoint_lr_scheduler: bool = setting(False, "on resume, use the checkpoint's schedule and not these flags",
                                                "use-checkpoint-opt-param-scheduler")

    def __post_init__(self) -> None:
        require_range(self, "lr min_lr", 0)
        require_range(self, "warmup", 0, 1)
        require_range(self, "lr_decay_iters", 1)
        require(self.min_lr <= self.lr, f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}")
        require(not (self.override_lr_scheduler and self.use_checkpoint_lr_scheduler),
                "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other: give at most one")
