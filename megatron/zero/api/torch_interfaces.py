"""The optimizer, the learning rate scheduler and the data loader of an engine, with torch's interfaces.

The engine itself takes the steps. The optimizer's `param_groups` are the engine's: a scheduler that sets `group["lr"]`
changes the learning rate of the next step. The schedule's formulas and DeepSpeed's scheduler classes are in
megatron/optim/schedulers.py.

The loader yields micro-batches of this data-parallel rank. The order of an epoch depends on the seed and the epoch
only, not on the number of ranks. An epoch ends with its last batch; a loop that is left early repeats the same order. A
checkpoint stores the epoch and resumes from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megatron.config.tree import Config
from megatron.errors import ConfigError
from megatron.optim.schedulers import DeepSpeedScheduler, LRSchedule
from megatron.zero.engine import ZeroEngine


class LRSchedulerProtocol(Protocol):
    """A scheduler with torch's interface."""

    def step(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class LRScheduleAdapter:
    """An `LRSchedule` (a pure function of the step) as a scheduler. All groups get its rate; with `floor_ratio` each
    group peaks at its initial rate and its floor is this ratio of the peak."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: LRSchedule,
                 floor_ratio: float | None = None) -> None:
        self._optimizer, self.schedule, self._floor_ratio = optimizer, schedule, floor_ratio
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups] if floor_ratio is not None else []
        self._set_step(0)

    def _set_step(self, steps: int) -> None:
        self.steps = steps
        betas = self.schedule.betas(steps)
        for number, group in enumerate(self._optimizer.param_groups):
            schedule = self.schedule
            # the groups' own peaks: DeepSpeed's schedules that name no peak scale the optimizer's rates
            if self._floor_ratio is not None:
                peak = self._peaks[number]
                schedule = replace(schedule, peak=peak, floor=peak * self._floor_ratio)
            group["lr"] = schedule(steps)
            if betas is not None and "betas" in group:
                group["betas"] = betas

    def step(self) -> None:
        self._set_step(self.steps + 1)

    def get_last_lr(self) -> list[float]:
        """Learning rate of each param group in the next step."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._set_step(state_dict["steps"])


def is_reversible(scheduler: LRSchedulerProtocol) -> bool:
    """Its state is small and is all that `step` changes besides the param groups."""
    return isinstance(scheduler, LRScheduleAdapter | DeepSpeedScheduler | torch.optim.lr_scheduler.LRScheduler)


class ReversibleSchedulerStep:
    """Steps a scheduler, and can undo it."""

    def __init__(self, scheduler: LRSchedulerProtocol, groups: Sequence[dict[str, Any]],
                 arguments: Mapping[str, Any]) -> None:
        self._scheduler, self._groups = scheduler, groups
        self._state, self._before = deepcopy(scheduler.state_dict()), _scheduled_values(groups)
        scheduler.step(**arguments)
        self._after = _scheduled_values(groups)

    def undo(self) -> None:
        """Restore the state; param group values that the user changed since then stay."""
        # what is not as the step left it was set by the user since
        now = _scheduled_values(self._groups)
        self._scheduler.load_state_dict(self._state)  # ours also set the rates; torch's do not
        for group, old, new, present in zip(self._groups, self._before, self._after, now, strict=True):
            group.update({name: old[name] if value == new[name] else value for name, value in present.items()})


def _scheduled_values(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Float and tuple hyper-parameters of each group: the ones that schedulers change (lr, betas, momentum)."""
    return [{name: value for name, value in group.items() if isinstance(value, float | tuple)} for group in groups]


def build_lr_schedule(config: Config) -> LRSchedule:
    """The configured schedule, for the trainer and `zero.initialize` alike."""
    section = config.schedule
    moves_beta1 = section.cycle_momentum and section.lr_decay_style == "one-cycle"
    low, high, growth = (section.cycle_min_mom, section.cycle_max_mom,
                         section.cycle_mom_growth) if moves_beta1 else (None, 0.0, 0.0)
    return LRSchedule(section.lr_decay_style, section.lr, section.min_lr, config.warmup_steps, config.decay_iters,
                      section.warmup_type, section.cycle_decay, low, high, growth, section.lr_wsd_decay_style,
                      section.lr_wsd_decay_iters or 0)


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer that `zero.initialize` returns."""

    _is_built = False

    def __init__(self, engine: ZeroEngine, defaults: Mapping[str, Any] | None = None,
                 client: torch.optim.Optimizer | None = None) -> None:
        """`defaults` are the wrapped optimizer's (torch's cyclic schedulers look for momentum there); `client` is the
        user's optimizer, for which a scheduler may have been built."""
        # these groups are for torch's checks only: the engine's take their place, and schedulers write into those
        super().__init__([{"params": group["params"]} for group in engine.param_groups], {})
        self.defaults, self.param_groups = {**(defaults or {})}, engine.param_groups
        self._engine, self._client, self._is_built = engine, client, True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            raise ConfigError("add_param_group after zero.initialize: its buffers hold the parameters it began with; "
                              "give all groups to initialize, frozen ones excepted")
        super().add_param_group(param_group)

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self._engine.state.counters.scaler.scale

    loss_scale = cur_scale

    @property
    def overflow(self) -> bool:
        """The last step was skipped because a gradient was not finite."""
        report = self._engine.last_report
        return report is not None and not report.applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad()

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        raise ConfigError("the engine steps the optimizer: call engine.step() instead of optimizer.step()")

    def mark_step_taken(self) -> None:
        """Set the flag that torch's schedulers read to warn about `scheduler.step` before `optimizer.step`."""
        for optimizer in (self, self._client):
            if optimizer is not None:
                optimizer._opt_called = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        raise ConfigError("optimizer state is split over ranks: engine.save_checkpoint() saves it")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ConfigError("optimizer state is split over ranks: engine.load_checkpoint() loads it")


class EpochDataLoader(DataLoader[Any]):
    """Advances to the next epoch with the last batch of one, so that a checkpoint after it resumes in the next."""

    def __init__(self, samples: Dataset[Any], sampler: DistributedSampler[Any], **options: Any) -> None:
        super().__init__(samples, sampler=sampler, **options)
        self._epoch_sampler = sampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number, batch in enumerate(super().__iter__(), 1):
            if number == len(self):  # the sampler has drawn the whole order of this epoch
                self.set_epoch(self.epoch + 1)
            yield batch

    @property
    def epoch(self) -> int:
        return self._epoch_sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch_sampler.set_epoch(epoch)
