"""Learning rate schedules: the trainer's `LRSchedule`, and DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR,
OneCycle, LRRangeTest.

`LRSchedule` is a pure function of the number of completed steps; step 0 already trains with 1/warmup of the peak.
DeepSpeed's classes write `lr` into the param groups of any optimizer. `last_batch_iteration` counts calls of `step`
from -1, and is all of their state. As in DeepSpeed a warm-up has at least 2 steps. Unlike there, an unknown
`warmup_type` is an error, and `load_state_dict` writes the rates of its step into the groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from megatron.errors import ConfigError

CYCLE_BETA2 = 0.99  # beta2 while momentum is cycled, as in DeepSpeed, which has no key for it

MAX_MOMENTUM = 0.9999999  # upper limit of momentum that grows after the cycle: Adam is undefined at 1

# Final rate of exponential decay relative to the peak if --min-lr is 0, as an exponential never reaches 0.
EXPONENTIAL_FLOOR_RATIO = 0.01


@dataclass(frozen=True)
class LRSchedule:
    """Warm up over `warmup_steps`, then decay from `peak` to `floor` until `decay_steps`, then stay."""

    style: str
    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int
    warmup_type: str = "linear"
    tail: float = 0.0  # one-cycle: decay per step after the cycle; range-test: growth per `decay_steps` steps
    momentum_low: float | None = None  # one-cycle: beta1 at the highest rate; None leaves momentum alone
    momentum_high: float = 0.0
    momentum_tail: float = 0.0
    wsd_style: str = "exponential"
    wsd_steps: int = 0  # WSD: the shape of the decay, and its length before `decay_steps`

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps and self.style not in STYLES_WITHOUT_WARMUP:
            return self.peak * warmup_fraction(self.warmup_type, step + 1, self.warmup_steps)
        return LR_STYLES[self.style](self, step)

    def progress(self, step: int) -> float:
        """0 at the end of the warm-up, 1 from `decay_steps` on."""
        decay_length = max(1, self.decay_steps - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / decay_length)

    def betas(self, step: int) -> tuple[float, float] | None:
        """(beta1, beta2) of the step, or None if the schedule leaves them alone. As in DeepSpeed, the first step has
        the lowest beta1, later ones move against the rate, and beta2 is 0.99."""
        if self.momentum_low is None:
            return None
        low, high = self.momentum_low, self.momentum_high
        if step == 0:
            return low, CYCLE_BETA2
        after = step - self.decay_steps
        first = high * (1 +
                        self.momentum_tail * after) if after > 0 else high - (high - low) * _cycle_height(self, step)
        return min(first, MAX_MOMENTUM), CYCLE_BETA2


def warmup_fraction(kind: str, step: int, steps: int) -> float:
    """The fraction of the peak after `step` of `steps` warm-up steps. As in DeepSpeed, "log" reaches 1 one step
    early."""
    if kind == "linear":
        return step / steps
    return min(1.0, math.log(step + 1) / math.log(max(2, steps)))


def _exponential_lr(s: LRSchedule, step: int) -> float:
    floor = s.floor or s.peak * EXPONENTIAL_FLOOR_RATIO
    return s.peak * (floor / s.peak) ** s.progress(step) if s.peak else 0.0


def _inverse_square_root_lr(s: LRSchedule, step: int) -> float:
    start = max(1, s.warmup_steps)
    return max(s.floor, s.peak * math.sqrt(start / max(start, step + 1)))


def _wsd_lr(s: LRSchedule, step: int) -> float:
    """The peak, then one of Megatron-LM's four decays over the last `wsd_steps` before `decay_steps`."""
    progress = min(1.0, max(0, step - (s.decay_steps - s.wsd_steps)) / max(1, s.wsd_steps))
    return s.floor + (s.peak - s.floor) * WSD_DECAYS[s.wsd_style](progress)


def _cycle_height(s: LRSchedule, step: int) -> float:
    """The cycle's triangle: 0 at both ends, 1 at `warmup_steps`."""
    if step <= s.warmup_steps:
        return step / max(1, s.warmup_steps)
    return max(0.0, (s.decay_steps - step) / max(1, s.decay_steps - s.warmup_steps))


def _one_cycle_lr(s: LRSchedule, step: int) -> float:
    after = max(0, step - s.decay_steps)
    return (s.floor + (s.peak - s.floor) * _cycle_height(s, step)) / (1 + s.tail * after)


LR_STYLES: dict[str, Callable[[LRSchedule, int], float]] = {
    "constant": lambda s, step: s.peak,
    "linear": lambda s, step: s.peak + (s.floor - s.peak) * s.progress(step),
    "cosine": lambda s, step: s.floor + (s.peak - s.floor) * 0.5 * (1.0 + math.cos(math.pi * s.progress(step))),
    "exponential": _exponential_lr, "inverse-square-root": _inverse_square_root_lr, "WSD": _wsd_lr,
    "one-cycle": _one_cycle_lr,
    "range-test": lambda s, step: s.floor * (1 + s.tail * (step / s.decay_steps)),
    "range-test-stairs": lambda s, step: s.floor * (1 + s.tail * (step // s.decay_steps))}
# Style of the WSD decay -> the fraction of the peak, from 1 at t = 0 to 0 at t = 1.
WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "exponential": lambda t: 2 * 0.5**t - 1, "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)), "minus_sqrt": lambda t: 1 - math.sqrt(t)}
# Styles that define the rate of every step themselves.
STYLES_WITHOUT_WARMUP = ("one-cycle", "range-test", "range-test-stairs")


LRValues = float | Sequence[float]  # one for all param groups, or one for each


Curve = Callable[[int], float]  # `last_batch_iteration` -> the rate of one group


class DeepSpeedScheduler:
    """Counts calls of `step`, and writes the rate of each group's curve into the param groups."""

    def __init__(self, optimizer: Optimizer, curves: Sequence[Curve], last_batch_iteration: int) -> None:
        self.optimizer, self._curves, self.last_batch_iteration = optimizer, curves, last_batch_iteration
        if last_batch_iteration == -1:
            self._write_to_groups()

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""
        return [curve(self.last_batch_iteration) for curve in self._curves]

    def get_last_lr(self) -> list[float]:
        """The rates in the param groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to the given one."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._write_to_groups()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._write_to_groups()

    def _write_to_groups(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


def _warmup_curves(optimizer: Optimizer, lows: LRValues, highs: LRValues | None, warmup_steps: int, kind: str,
                   after_warmup: Callable[[int, int], float], first: float = 0.0) -> list[Curve]:
    """Curves from `lows` (fraction 0) to `highs` (fraction 1; None: each group's own rate): a warm-up from the fraction
    `first` on, then the fraction after_warmup(step, number of warm-up steps)."""
    _check_steps("warmup_num_steps", warmup_steps)
    if kind not in ("log", "linear"):
        raise ConfigError(f'warmup_type is {kind!r}: expected "log" or "linear"')
    steps = max(2, warmup_steps)

    def fraction(step: int) -> float:
        if step < 0:
            return 0.0
        return (first + (1 - first) * warmup_fraction(kind, step, steps) if step < steps
                else after_warmup(step, steps))

    def curve(low: float, high: float) -> Curve:
        return lambda step: low + (high - low) * fraction(step)

    own = [float(group["lr"]) for group in optimizer.param_groups]
    return list(map(curve, _one_per_group(optimizer, lows), own if highs is None else _one_per_group(optimizer, highs)))


class WarmupLR(DeepSpeedScheduler):
    """From `warmup_min_lr` to `warmup_max_lr` (None: each group's own rate), then constant."""

    def __init__(self, optimizer: Optimizer, warmup_min_lr: LRValues = 0.0, warmup_max_lr: LRValues | None = 0.001,
                 warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1) -> None:
        super().__init__(optimizer, _warmup_curves(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps,
                                                   warmup_type, lambda step, warmup: 1.0), last_batch_iteration)


class WarmupDecayLR(DeepSpeedScheduler):
    """As WarmupLR, then linear decay to `warmup_min_lr` at `total_num_steps`."""

    def __init__(self, optimizer: Optimizer, total_num_steps: int, warmup_min_lr: LRValues = 0.0,
                 warmup_max_lr: LRValues | None = 0.001, warmup_num_steps: int = 1000, warmup_type: str = "log",
                 last_batch_iteration: int = -1) -> None:
        def decay(step: int, warmup: int) -> float:
            return max(0.0, (total_num_steps - step) / max(1, total_num_steps - warmup))

        super().__init__(optimizer, _warmup_curves(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps,
                                                   warmup_type, decay), last_batch_iteration)


class WarmupCosineLR(DeepSpeedScheduler):
    """Ratios of each group's own rate: from `warmup_min_ratio` to 1, then cosine decay to `cos_min_ratio`."""

    def __init__(self, optimizer: Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0,
                 warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
                 last_batch_iteration: int = -1) -> None:
        def decay(step: int, warmup: int) -> float:
            progress = min(1.0, (step - warmup + 1) / max(1, total_num_steps - warmup))
            return cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2

        super().__init__(optimizer, _warmup_curves(optimizer, 0.0, None, warmup_num_steps, warmup_type, decay,
                                                   warmup_min_ratio), last_batch_iteration)


class OneCycle(DeepSpeedScheduler):
    """Linear from `cycle_min_lr` to `cycle_max_lr` and back, then divided by 1 + `decay_lr_rate` per `decay_step_size`
    steps. If all groups have betas, beta1 moves the other way, and grows after the cycle."""

    def __init__(self, optimizer: Optimizer, cycle_min_lr: LRValues, cycle_max_lr: LRValues,
                 decay_lr_rate: float = 0.0, cycle_first_step_size: int = 2000,
                 cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0,
                 cycle_second_stair_count: int | None = None, decay_step_size: int = 0, cycle_momentum: bool = True,
                 cycle_min_mom: LRValues = 0.8, cycle_max_mom: LRValues = 0.9, decay_mom_rate: float = 0.0,
                 last_batch_iteration: int = -1) -> None:
        first, per_step = cycle_first_step_size, 1 / decay_step_size if decay_step_size else 0.0
        second = first if cycle_second_step_size is None else cycle_second_step_size
        _check_steps("cycle_first_step_size", first)
        _check_steps("cycle_second_step_size", second, 0)
        if cycle_first_stair_count or cycle_second_stair_count:
            raise ConfigError("a stair count of OneCycle is not 0: rates do not rise in stairs; leave it out")
        cycles = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        limits = (_one_per_group(optimizer, limit)
                  for limit in (cycle_max_lr, cycle_min_lr, cycle_min_mom, cycle_max_mom))
        self._schedules = [
            LRSchedule("one-cycle", high, low, first, first + second, "linear", decay_lr_rate * per_step,
                       least if cycles else None, most, decay_mom_rate * per_step)
            for high, low, least, most in zip(*limits, strict=True)]
        super().__init__(optimizer, list(map(_curve_of, self._schedules)), last_batch_iteration)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, or None unless they are cycled."""
        found = [schedule.betas(self.last_batch_iteration + 1) for schedule in self._schedules]
        return None if None in found else [betas for betas in found if betas is not None]

    def _write_to_groups(self) -> None:
        super()._write_to_groups()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or ()):
            group["betas"] = betas


class LRRangeTest(DeepSpeedScheduler):
    """Grows from `lr_range_test_min_lr` by `lr_range_test_step_rate` of it every `lr_range_test_step_size` steps,
    linearly or (staircase) at once."""

    def __init__(self, optimizer: Optimizer, lr_range_test_min_lr: LRValues = 1e-3,
                 lr_range_test_step_size: int = 2000, lr_range_test_step_rate: float = 1.0,
                 lr_range_test_staircase: bool = False, last_batch_iteration: int = -1) -> None:
        _check_steps("lr_range_test_step_size", lr_range_test_step_size)
        style = "range-test-stairs" if lr_range_test_staircase else "range-test"
        super().__init__(optimizer, [_curve_of(LRSchedule(style, 0.0, low, 0, lr_range_test_step_size,
                                                          tail=lr_range_test_step_rate))
                                     for low in _one_per_group(optimizer, lr_range_test_min_lr)], last_batch_iteration)


def _curve_of(schedule: LRSchedule) -> Curve:
    return lambda last_batch_iteration: schedule(last_batch_iteration + 1)


def _check_steps(name: str, steps: object, least: int = 1) -> None:
    if not isinstance(steps, int) or steps < least:
        raise ConfigError(f"{name} is {steps}: expected an integer of at least {least}")


def _one_per_group(optimizer: Optimizer, rates: LRValues) -> list[float]:
    count = len(optimizer.param_groups)
    given = list(rates) if isinstance(rates, Sequence) else [rates] * count
    if len(given) != count:
        raise ConfigError(f"{len(given)} learning rates are given: expected one, or one for each of the {count} param "
                          "groups")
    return given
