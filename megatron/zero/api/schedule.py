"""The learning rate of an engine: the schedule of a configuration as a scheduler of torch's kind.

Not here: the curves (optim/schedule.py), and DeepSpeed's scheduler classes (optim/schedulers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import torch

from megatron.config.tree import Config
from megatron.optim.schedule import Schedule
from megatron.optim.schedulers import Scheduler as Curve
from megatron.zero.api.saved import Stateful


class Scheduler(Stateful, Protocol):
    """A learning rate scheduler of torch's kind; ours are such too."""

    def step(self) -> Any: ...


class FollowSchedule:
    """A schedule, which is a pure function of the step, as a scheduler of the groups of an optimizer.

    All groups have the schedule's rate. With `own_floor`, each group's peak is the rate it has now, and its floor is
    this share of that rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule, own_floor: float | None = None) -> None:
        self._optimizer, self.schedule, self._own_floor = optimizer, schedule, own_floor
        self._own_peaks = [float(group["lr"]) for group in optimizer.param_groups] if own_floor is not None else []
        self._go_to(0)

    def _rates(self, steps: int) -> list[float]:
        if self._own_floor is None:
            return [self.schedule(steps)] * len(self._optimizer.param_groups)
        return [replace(self.schedule, peak=peak, floor=peak * self._own_floor)(steps) for peak in self._own_peaks]

    def _go_to(self, steps: int) -> None:
        self.steps = steps
        betas = self.schedule.betas(steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates(steps), strict=True):
            group["lr"] = rate
            if betas is not None and "betas" in group:
                group["betas"] = betas

    def step(self) -> None:
        self._go_to(self.steps + 1)

    def get_last_lr(self) -> list[float]:
        """The rate of each param group in the next step."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._go_to(state_dict["steps"])


def can_go_back(scheduler: Scheduler) -> bool:
    """Its state is known to be small, and to be all that `step` changes beside the param groups."""
    return isinstance(scheduler, FollowSchedule | Curve | torch.optim.lr_scheduler.LRScheduler)


class Moved:
    """A step of a scheduler that can be taken back."""

    def __init__(self, scheduler: Scheduler, groups: Sequence[dict[str, Any]], arguments: Mapping[str, Any]) -> None:
        self._scheduler, self._groups = scheduler, groups
        self._state, self._before = deepcopy(scheduler.state_dict()), _numbers_of(groups)
        scheduler.step(**arguments)
        self._after = _numbers_of(groups)

    def take_back(self) -> None:
        """What somebody else has set since then stays."""
        now = _numbers_of(self._groups)
        self._scheduler.load_state_dict(self._state)  # ours set the rates of that state, torch's set none
        for group, old, new, present in zip(self._groups, self._before, self._after, now, strict=True):
            group.update({name: old[name] if value == new[name] else value for name, value in present.items()})


def _numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What schedulers set in param groups: the rate, and betas or a momentum."""
    return [{name: value for name, value in group.items() if isinstance(value, float | tuple)} for group in groups]


def schedule_of(config: Config) -> Schedule:
    """The one reading of the configuration's schedule: the trainer and `zero.initialize` both train by it."""
    section = config.schedule
    low, high, growth = section.cycled_momentum or (None, 0.0, 0.0)
    return Schedule(section.lr_decay_style, section.lr, section.min_lr, config.warmup_steps, config.decay_iters,
                    section.warmup_type, section.cycle_decay, low, high, growth, section.lr_wsd_decay_style,
                    section.lr_wsd_decay_iters or 0)
