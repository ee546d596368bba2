"""The section `schedule`: the learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.kinds import BOOLEAN, COUNT, COUNT_FROM_0, FRACTION, NUMBER, NUMBER_FROM_0, one_of
from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, require, setting

SCHEDULER_TYPES = {
    "WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "OneCycle": "one-cycle",
    "LRRangeTest": "range-test"
}
"""scheduler.type -> --lr-decay-style"""
_SCHEDULER_PARAMS = "scheduler.params."
DEFAULT_WARMUP_FRACTION = 0.01


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate: warm up, then decay until --lr-decay-iters."""

    lr: float = setting(1.5e-4, "peak learning rate", "learning-rate", in_short_help=True, json=(
        JsonKey("optimizer.params.lr", NUMBER),
        JsonKey("scheduler.params.warmup_max_lr", NUMBER,
                help="of `WarmupLR` and `WarmupDecayLR`; the peak of `WarmupCosineLR` is the optimizer's `lr`"),
        JsonKey(_SCHEDULER_PARAMS + "cycle_max_lr", NUMBER, is_independent=False, default="", help="of `OneCycle`")))
    min_lr: float = setting(0.0, "learning rate at the end of the decay", json=(
        JsonKey(_SCHEDULER_PARAMS + "cos_min_ratio", FRACTION, is_independent=False, default="0.0001",
                help="of `WarmupCosineLR`, as a share of the peak"),
        JsonKey(_SCHEDULER_PARAMS + "cycle_min_lr", NUMBER, is_independent=False, default="", help="of `OneCycle`"),
        JsonKey(_SCHEDULER_PARAMS + "lr_range_test_min_lr", NUMBER, is_independent=False, default="0.001",
                help="of `LRRangeTest`: the first rate")))
    lr_decay_style: Literal[
        "constant", "linear", "cosine", "exponential", "inverse-square-root", "WSD", "one-cycle", "range-test",
        "range-test-stairs"] = setting(
            "cosine",
            "shape of the decay",
            json=(JsonKey(
                "scheduler.type",
                one_of(*SCHEDULER_TYPES),
                is_independent=False,
                default="",
                help="`WarmupLR`: constant; `WarmupDecayLR`: linear down to 0; `WarmupCosineLR`: cosine; `OneCycle`: "
                "one-cycle; `LRRangeTest`: range-test"),
                  JsonKey(_SCHEDULER_PARAMS + "lr_range_test_staircase",
                          BOOLEAN,
                          is_independent=False,
                          default="false",
                          help="of `LRRangeTest`: range-test-stairs")))
    lr_decay_iters: int | None = setting(
        None, "step at which --min-lr is reached (default: --train-iters)", json=(
            JsonKey(_SCHEDULER_PARAMS + "total_num_steps", COUNT, is_independent=False, nullable=True,
                    help="of `WarmupDecayLR` and `WarmupCosineLR`"),
            JsonKey(_SCHEDULER_PARAMS + "cycle_second_step_size", COUNT, is_independent=False, nullable=True,
                    help="of `OneCycle`: the steps from the peak to the end of the cycle; by default those before it"),
            JsonKey(_SCHEDULER_PARAMS + "lr_range_test_step_size", COUNT, is_independent=False, default="2000",
                    help="of `LRRangeTest`: steps in which the rate grows by `lr_range_test_step_rate`")))
    warmup: float | None = setting(
        None, "share of --lr-decay-iters spent warming up (default: 0.01)", "lr-warmup-fraction", "warmup-ratio")
    lr_warmup_iters: int | None = setting(None,
                                          "steps spent warming up, in place of --warmup",
                                          "warmup-iters",
                                          "warmup-steps",
                                          json=(JsonKey(_SCHEDULER_PARAMS + "warmup_num_steps",
                                                        COUNT_FROM_0,
                                                        is_independent=False,
                                                        default="1000",
                                                        help="of the warm-up schedules"),
                                                JsonKey(_SCHEDULER_PARAMS + "cycle_first_step_size",
                                                        COUNT,
                                                        is_independent=False,
                                                        default="2000",
                                                        help="of `OneCycle`: the steps from the start to the peak")))
    warmup_type: Literal["linear", "log"] = setting(
        "linear", "shape of the warm-up; log rises fast at first",
        json=JsonKey("scheduler.params.warmup_type", default='"log"', help="the flag's own default is linear"))
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", "WSD: shape of the decay")
    lr_wsd_decay_iters: int | None = setting(None, "WSD: steps of the decay, the last ones of --lr-decay-iters")
    cycle_decay: float = setting(
        0.0, "one-cycle: after the cycle the rate is --min-lr / (1 + this x steps); range-test: growth of the rate, as "
        "a share of --min-lr, in --lr-decay-iters steps",
        json=(JsonKey(_SCHEDULER_PARAMS + "decay_lr_rate",
                      NUMBER_FROM_0,
                      is_independent=False,
                      default="0",
                      help="of `OneCycle`, per `decay_step_size` steps"),
              JsonKey(_SCHEDULER_PARAMS + "lr_range_test_step_rate",
                      NUMBER,
                      is_independent=False,
                      default="1",
                      help="of `LRRangeTest`")))
    cycle_momentum: bool = setting(False,
                                   "one-cycle: move beta1 against the learning rate, with beta2 0.99",
                                   json=JsonKey(_SCHEDULER_PARAMS + "cycle_momentum",
                                                is_independent=False,
                                                default="true",
                                                help="DeepSpeed's default for `OneCycle`"))
    cycle_min_mom: float = setting(0.8, "one-cycle: beta1 at the peak of the learning rate",
                                   json=JsonKey(_SCHEDULER_PARAMS, is_independent=False))
    cycle_max_mom: float = setting(0.9,
                                   "one-cycle: beta1 at the ends of the cycle",
                                   json=JsonKey(_SCHEDULER_PARAMS, is_independent=False))
    cycle_mom_growth: float = setting(
        0.0, "one-cycle: after the cycle beta1 is --cycle-max-mom x (1 + this x steps), below 1",
        json=JsonKey(_SCHEDULER_PARAMS + "decay_mom_rate", NUMBER_FROM_0, is_independent=False, default="0",
                     help="of `OneCycle`, per `decay_step_size` steps"))
    override_lr_scheduler: bool = setting(False, "on resume, use these flags and not the checkpoint's schedule")
    use_checkpoint_lr_scheduler: bool = setting(False, "on resume, use the checkpoint's schedule and not these flags",
                                                "use-checkpoint-opt-param-scheduler")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "lr min_lr", 0)
        problems.require_range(self, "warmup", 0, 1)
        problems.require_range(self, "lr_warmup_iters", 0)
        problems.require_range(self, "lr_decay_iters lr_wsd_decay_iters", 1)
        problems.require_range(self, "cycle_decay cycle_mom_growth", 0)
        problems.require_range(self, "cycle_min_mom cycle_max_mom", 0, 0.9999999)
        problems.raise_if_any()
        require(self.min_lr <= self.lr, f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}")
        require(self.lr_decay_style != "WSD" or self.lr_wsd_decay_iters is not None,
                "--lr-decay-style WSD needs --lr-wsd-decay-iters: the number of steps of its decay")
        require(not (self.override_lr_scheduler and self.use_checkpoint_lr_scheduler),
                "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other: give at most one")

    @property
    def cycled_momentum(self) -> tuple[float, float, float] | None:
        """Lowest, highest and later growth of beta1, if the schedule moves it."""
        moves = self.cycle_momentum and self.lr_decay_style == "one-cycle"
        return (self.cycle_min_mom, self.cycle_max_mom, self.cycle_mom_growth) if moves else None
