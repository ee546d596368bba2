"""DeepSpeed's learning rate schedulers, for people who bring their own loop: WarmupLR, WarmupDecayLR, WarmupCosineLR.

They write `lr` into the param groups of anything that has them. `last_batch_iteration` counts calls of `step`, from -1:
before the first call the rates are the lowest ones. A rate is a pure function of that count, so a state dict is one
number. Not here: the trainer's own Schedule, which has the same curves but wastes no step on a rate of 0.

As in DeepSpeed, a warm-up has at least 2 steps, and one that is longer than the whole is not cut: right after it the
rates drop to where they end. Other than there, an unknown `warmup_type` is an error, and `load_state_dict` puts the
rates of its step into the groups.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, final

from megatron.errors import ConfigError
from megatron.optim.schedule import warmup_share

Rates = float | Sequence[float]
"""One for all param groups, or one for each."""


class HasGroups(Protocol):
    """An optimizer, or what looks like one to a scheduler."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Scheduler(ABC):
    """Counts, and moves each group's rate from `lows` (share 0) to `highs` (share 1); `_after` is the decay."""

    def __init__(self, optimizer: HasGroups, lows: Rates, highs: Rates, warmup_num_steps: int, warmup_type: str,
                 last_batch_iteration: int) -> None:
        if not isinstance(warmup_num_steps, int) or warmup_num_steps < 1:
            raise ConfigError(f"warmup_num_steps is {warmup_num_steps}: expected an integer of at least 1")
        if warmup_type not in ("log", "linear"):
            raise ConfigError(f'warmup_type is {warmup_type!r}: expected "log" or "linear"')
        self.optimizer = optimizer
        self.lows, self.highs = _for_each_group(optimizer, lows), _for_each_group(optimizer, highs)
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._publish()

    @abstractmethod
    def _after(self, step: int) -> float:
        """The share after the warm-up."""

    def _warming(self, step: int) -> float:
        return warmup_share(self.warmup_type, step, self.warmup_num_steps)

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""
        step = self.last_batch_iteration
        share = 0.0 if step < 0 else self._warming(step) if step < self.warmup_num_steps else self._after(step)
        return [low + (high - low) * share for low, high in zip(self.lows, self.highs, strict=True)]

    def get_last_lr(self) -> list[float]:
        """The rates that are in the groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one, or to this iteration."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._publish()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._publish()

    def _publish(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


@final
class WarmupLR(Scheduler):
    """From `warmup_min_lr` to `warmup_max_lr` (None: each group's own rate), then constant."""

    def __init__(self, optimizer: HasGroups, warmup_min_lr: Rates = 0.0, warmup_max_lr: Rates | None = 0.001,
                 warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1) -> None:
        highs = _own_rates(optimizer) if warmup_max_lr is None else warmup_max_lr
        super().__init__(optimizer, warmup_min_lr, highs, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self, step: int) -> float:
        return 1.0


@final
class WarmupDecayLR(Scheduler):
    """As WarmupLR, then down in a straight line, to `warmup_min_lr` at `total_num_steps`."""

    def __init__(self, optimizer: HasGroups, total_num_steps: int, warmup_min_lr: Rates = 0.0,
                 warmup_max_lr: Rates | None = 0.001, warmup_num_steps: int = 1000, warmup_type: str = "log",
                 last_batch_iteration: int = -1) -> None:
        self.total_num_steps = total_num_steps
        highs = _own_rates(optimizer) if warmup_max_lr is None else warmup_max_lr
        super().__init__(optimizer, warmup_min_lr, highs, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self, step: int) -> float:
        return max(0.0, (self.total_num_steps - step) / max(1, self.total_num_steps - self.warmup_num_steps))


@final
class WarmupCosineLR(Scheduler):
    """Ratios of each group's own rate: from `warmup_min_ratio` to 1, then along a cosine to `cos_min_ratio`."""

    def __init__(self, optimizer: HasGroups, total_num_steps: int, warmup_min_ratio: float = 0.0,
                 warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
                 last_batch_iteration: int = -1) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, 0.0, _own_rates(optimizer), warmup_num_steps, warmup_type, last_batch_iteration)

    def _warming(self, step: int) -> float:
        return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * super()._warming(step)

    def _after(self, step: int) -> float:
        progress = (step - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def _own_rates(optimizer: HasGroups) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _for_each_group(optimizer: HasGroups, rates: Rates) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(rates, Sequence):
        return [rates] * count
    if len(rates) != count:
        raise ConfigError(f"{len(rates)} learning rates are given: expected one, or one for each of the {count} param "
                          "groups")
    return list(rates)
