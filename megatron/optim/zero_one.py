"""0/1 Adam over flat fp32 spans: Adam that leaves out looks at the variance, and then exchanges (Lu et al. 2022,
https://arxiv.org/abs/2202.06009).

    at first      Adam. v learns at var_update_scaler steps in a row, at as many that are 2 apart, then 4, 8, ...; these
                  have the sum of gradients. At all others each rank says its gradient at one bit a number, and what
                  comes moves m alone
    from          v is frozen, and each rank steps by itself:
    freeze_step   m <- beta1 m + (1 - beta1) g;   u <- (1 - lr decay) u + lr m^
                  its weights are kept x - u / d,  d = sqrt(v^) + eps,  of x where all were last the same; `kept` is the
                  product of 1 - lr decay since then, and `rate` what u would be if m^ had been 1 all the time
                  At an exchange each rank says its mean momentum, u / rate. What comes is the new m:
                  x <- kept x - rate m / d,  u <- 0
                  Exchanges are 1 step apart for local_step_scaler steps, 2 for as many, 4, ... up to local_step_clipper

So weight decay costs no bits and is the same on all ranks, and what is owed is in units of momentum. What differs from
the original is in docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from megatron.config.optim import MORE_STEPS_THAN_ANY
from megatron.optim.adam import IN_CACHE, LARGEST_TILE, AdamW
from megatron.optim.one_bit import OneBit
from megatron.optim.rule import ParamGroup, Saying, Span, StepScalars, Travel
from mpu.device import on_accelerator
from mpu.groups import Group


@dataclass(frozen=True)
class LearningTimes:
    """When v learns: `each` times at every distance."""

    each: int

    def _place(self, step: int) -> tuple[int, int]:
        """(which distance is it: 2 to the power of this; steps of it before this one)."""
        power = (step // self.each + 1).bit_length() - 1
        return power, step - self.each * ((1 << power) - 1)

    def has(self, step: int) -> bool:
        power, place = self._place(step)
        return (place + 1) % (1 << power) == 0

    def before(self, step: int) -> int:
        """How often it learned in the steps before this one."""
        power, place = self._place(step)
        return self.each * power + (place >> power)


@dataclass(frozen=True)
class ExchangeTimes:
    """When ranks exchange: every distance lasts `each` steps, the largest one for good."""

    each: int
    largest: int

    def has(self, step: int) -> bool:
        power = min(step // self.each, (self.largest - 1).bit_length())
        distance, place = min(1 << power, self.largest), step - power * self.each
        return (place + 1) % distance == 0 or distance < self.largest and place + 1 == self.each


@dataclass
class _Since:
    """What has become of a group since the weights were last the same everywhere."""

    step: int
    """The last one that counts here, by the steps before it."""
    kept: float = 1.0
    rate: float = 0.0


@final
@dataclass
class ZeroOneAdam(OneBit):
    tile: int = LARGEST_TILE
    bias_correction: bool = True
    var_update_scaler: int = 16
    local_step_scaler: int = 32678
    local_step_clipper: int = 16
    _taken: int = field(default=0, init=False)
    """Steps before the one under way."""
    _travel: Travel = field(default=Travel.SUM, init=False)
    _owes: bool = field(default=False, init=False)
    _since: dict[int, _Since] = field(default_factory=dict, init=False)
    """By hyper-parameter group."""
    _met: int = field(default=-1, init=False)
    """The last step that ended with an exchange of steps, by the steps before it."""

    name = "ZeroOneAdam"
    elementwise = True
    waits = True
    has_own_steps = True
    states = (*AdamW.states, "momentum_accumulator")

    def __post_init__(self) -> None:
        self._adam = AdamW(self.tile, bias_correction=self.bias_correction)
        self._learns = LearningTimes(self.var_update_scaler)
        self._exchanges = ExchangeTimes(self.local_step_scaler, self.local_step_clipper)

    def settle_on(self, device: torch.device, world: Group) -> None:
        self._adam.settle_on(device, world)

    def step_many(self, spans: Sequence[Span], hyper: Mapping[str, Any], at: StepScalars) -> bool:
        raise AssertionError("0/1 Adam steps one span at a time, by numbers on the host")

    # ---- what travels -----------------------------------------------------------------------------------------------

    def begin_step(self, taken: int, groups: Sequence[ParamGroup], size_of: Callable[[str], float]) -> None:
        super().begin_step(taken, groups, size_of)
        self._taken = taken
        if self.frozen_at is None:
            self._travel = Travel.SUM if self._learns.has(taken) else Travel.SAID
        else:
            self._travel = Travel.STEPS if self._exchanges.has(taken - self.frozen_at) else Travel.NOTHING
        self._owes |= self._travel is not Travel.SUM

    @property
    def travel(self) -> Travel:
        return self._travel

    def _learned(self, taken: int) -> int:
        return self._learns.before(taken)

    @property
    def owes(self) -> bool:
        return self._owes

    @property
    def remark(self) -> str:
        if self.frozen_at is None:
            return "gradients travel at one bit a number wherever the variance does not learn"
        return ("the variance is frozen, each rank steps by itself, and what its steps come to travels at one bit a "
                f"number, every step at first and every {self.local_step_clipper} at last")

    def say(self, what: Saying, hyper: Mapping[str, Any], *, factor: float) -> None:
        if self._travel is Travel.SAID:
            what.owed.add_(what.grad, alpha=factor)
            return
        since = self._count_step(what.group, hyper)
        for tile in self._tiles(what.grad):
            states = _cut(what.states, tile)
            self._own_step(what.grad[tile], states, hyper, factor)
            if since.rate:
                what.owed[tile].add_(states["momentum_accumulator"], alpha=1 / since.rate)
            else:  # the learning rate has been 0 all the time
                what.owed[tile].add_(states["exp_avg"])

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        if self._travel is Travel.SUM and self._learns.before(steps_taken) == steps_taken:
            self._adam.step(span, hyper, factor=factor, steps_taken=steps_taken)
            return
        since = self._count_step(span.group, hyper) if self._travel.is_own else None
        self._met = steps_taken if self._travel is Travel.STEPS else self._met
        for tile in self._tiles(span.master):
            grad, states, masters = span.grad[tile], _cut(span.states, tile), span.master[tile]
            if since is None:
                self._common_step(masters, grad, states, hyper, factor)
            elif self._travel is Travel.NOTHING:
                self._own_step(grad, states, hyper, factor)
            else:
                self._meet(masters, grad, states, hyper, factor, since)

    def _tiles(self, numbers: Tensor) -> list[slice]:
        size = self.tile if on_accelerator(numbers) else min(self.tile, IN_CACHE * torch.get_num_threads())
        return [slice(start, start + size) for start in range(0, len(numbers), size)]

    def _common_step(self, masters: Tensor, grad: Tensor, states: Mapping[str, Tensor], hyper: Mapping[str, Any],
                     factor: float) -> None:
        """Of Adam, by what all ranks know."""
        beta1, beta2 = hyper["betas"]
        wide = grad.to(torch.float32, copy=True).mul_(factor)
        momentum = states["exp_avg"].mul_(beta1).add_(wide, alpha=1 - beta1)
        if self._travel is Travel.SUM:
            states["exp_avg_sq"].mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        else:  # of what is silent there may be a momentum from before, and eps alone is below it
            momentum.mul_(states["exp_avg_sq"] != 0)
        masters.mul_(_kept(hyper))
        masters.addcdiv_(momentum, self._divisor(states, hyper), value=-self._step_size(hyper))

    def _own_step(self, grad: Tensor, states: Mapping[str, Tensor], hyper: Mapping[str, Any], factor: float) -> None:
        """Of this rank, by its own gradient, but where v never had one."""
        beta1, _ = hyper["betas"]
        wide = grad.to(torch.float32, copy=True).mul_(factor * (1 - beta1))
        momentum = states["exp_avg"].mul_(beta1).add_(wide).mul_(states["exp_avg_sq"] != 0)
        decayed = states["momentum_accumulator"].mul_(_kept(hyper))
        decayed.add_(momentum, alpha=self._step_size(hyper))

    def _meet(self, masters: Tensor, said: Tensor, states: Mapping[str, Tensor], hyper: Mapping[str, Any],
              factor: float, since: _Since) -> None:
        """All ranks go on from the mean of their momenta."""
        momentum = states["exp_avg"].copy_(said).mul_(factor)
        masters.mul_(since.kept).addcdiv_(momentum, self._divisor(states, hyper), value=-since.rate)
        states["momentum_accumulator"].zero_()

    def _step_size(self, hyper: Mapping[str, Any]) -> float:
        """Of m."""
        correction = 1 - hyper["betas"][0] ** (self._taken + 1) if self.bias_correction else 1.0
        return float(hyper["lr"]) / correction

    def _divisor(self, states: Mapping[str, Tensor], hyper: Mapping[str, Any]) -> Tensor:
        end = self._taken + 1 if self.frozen_at is None else self.frozen_at
        correction = 1 - hyper["betas"][1] ** self._learns.before(end) if self.bias_correction else 1.0
        return (states["exp_avg_sq"] / correction).sqrt_().add_(hyper["eps"])

    # ---- since the last exchange ------------------------------------------------------------------------------------

    def _count_step(self, group: int, hyper: Mapping[str, Any]) -> _Since:
        """The step under way, whose spans are many."""
        since = self._since.get(group)
        if since is None or since.step <= self._met < self._taken:
            since = _Since(-1)
        if since.step != self._taken:
            kept = _kept(hyper)
            since = _Since(self._taken, since.kept * kept, since.rate * kept + self._step_size(hyper))
            self._since[group] = since
        return since

    @property
    def has_drifted(self) -> bool:
        return any(since.step > self._met for since in self._since.values())

    @property
    def differing(self) -> tuple[str, ...]:
        return () if self.frozen_at is None else ("exp_avg", "momentum_accumulator")

    def at_work(self, group: int, masters: Tensor, states: Mapping[str, Tensor], hyper: Mapping[str, Any]) -> Tensor:
        own = states["momentum_accumulator"] / self._divisor(states, hyper)
        return own.neg_().add_(masters, alpha=self._since[group].kept)

    def scalars(self) -> dict[str, Any]:
        since = {str(group): [at.step, at.kept, at.rate] for group, at in self._since.items()}
        return {**super().scalars(), "travel": self._travel.name, "owes": self._owes, "since": since,
                "met": self._met}

    def objection(self, scalars: Mapping[str, Any]) -> str | None:
        if scalars.get("frozen_at") is None or self.freeze_step != MORE_STEPS_THAN_ANY:
            return None
        return ("its variance is frozen and its ranks step by themselves, which --onebit-freeze-step never rules out: "
                "give a number of steps, and --zero-stage 0")

    def restore(self, scalars: Mapping[str, Any]) -> None:
        super().restore(scalars)
        self._travel, self._owes = Travel[scalars.get("travel", "SUM")], scalars.get("owes", False)
        self._met = scalars.get("met", -1)
        self._since = {int(group): _Since(*numbers) for group, numbers in scalars.get("since", {}).items()}


def _kept(hyper: Mapping[str, Any]) -> float:
    """By a step's weight decay."""
    return 1 - float(hyper["lr"]) * float(hyper["weight_decay"])


def _cut(states: Mapping[str, Tensor], tile: slice) -> dict[str, Tensor]:
    return {kind: numbers[tile] for kind, numbers in states.items()}
