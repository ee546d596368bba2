"""Steps that train nothing: says so where a learning rate reaches 0 before --train-iters is reached.

A schedule may end early in many ways: --lr-decay-iters below --train-iters, a resumed run whose checkpoint has another
end, a JSON file with its own total_num_steps, --lr 0. All of them are legal, and none of them looks wrong from outside.
Not here: the curves (optim/schedule.py), and which schedule a resumed run follows (resume.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from megatron.config.tree import Config


@dataclass(frozen=True)
class ZeroLRSteps:
    """The iterations from `first` to `last` have a learning rate of 0."""

    first: int
    last: int
    remedy: str

    def start_warning(self) -> str:
        return (f" warning: the learning rate is 0 from iteration {self.first} on: the last "
                f"{self.last - self.first + 1} of {self.last} iterations train nothing; {self.remedy}")

    def reached_warning(self, iteration: int) -> str:
        return (f" warning: the learning rate has reached 0 at iteration {iteration}: the rest of the run, up to "
                f"iteration {self.last}, trains nothing; {self.remedy}")


class ZeroLRWarning:
    """Warns at the start of a run, and again when the rate reaches 0 on the way."""

    def __init__(self, zero_lr_steps: ZeroLRSteps | None, lr: float, print_line: Callable[[str], None]) -> None:
        """`rate` is that of the first step."""
        self._zero_lr_steps, self._lr, self._print_line = zero_lr_steps, lr, print_line
        if zero_lr_steps is not None:
            print_line(zero_lr_steps.start_warning())

    def after_step(self, iteration: int, lr: float) -> None:
        """`rate` was that of `iteration`, which is over."""
        if self._zero_lr_steps is not None and lr == 0 != self._lr:
            self._print_line(self._zero_lr_steps.reached_warning(iteration))
        self._lr = lr


def find_zero_lr_steps(config: Config, schedule: Callable[[int], float], applied: int,
                       iteration: int) -> ZeroLRSteps | None:
    """What is idle in a run that is at `iteration`, after `applied` steps of its schedule (skipped ones do not
    count there); None where every step has a rate."""
    last = config.train.train_iters
    remaining = range(applied, applied + last - iteration)
    if not remaining or schedule(remaining[-1]) != 0:
        return None
    trained = bisect_left(remaining, True, key=lambda step: schedule(step) == 0)
    return ZeroLRSteps(iteration + trained + 1, last, _remedy(config, iteration))


def _remedy(config: Config, iteration: int) -> str:
    section, last = config.schedule, config.train.train_iters
    if section.lr == 0 and not section.use_checkpoint_lr_scheduler:
        return "give --lr above 0"
    if section.use_checkpoint_lr_scheduler:
        return f"give --override-lr-scheduler --lr-decay-iters {last} in place of --use-checkpoint-lr-scheduler"
    if iteration > 0 and not section.override_lr_scheduler:
        return f"give --override-lr-scheduler --lr-decay-iters {last}, or with it a --min-lr above 0"
    return f"give --lr-decay-iters {last} (in a JSON file: total_num_steps), or a --min-lr above 0"
