"""The clock of the probe: how long something takes on every rank at once.

All ranks measure at the same time, since they share memory and cores in training too. A number is the lowest decile of
what one rank saw, which other programs of the machine disturb less than the median, and of all ranks the largest. Work
that ranks do together has to be done equally often by all.

A GPU is told what to do ahead of time, in training as well. So there the clock is read after many calls at once: what
waiting for their end takes is little beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor

from megatron.plan.sighting import PassTimings
from mpu.collectives import all_gather_json, barrier
from mpu.groups import Group

SECONDS, FEWEST, MOST = 0.1, 3, 50
"""Of measuring one thing: so long, but so many times at least and at most."""
SAMPLE, MOST_CALLS = 0.005, 200
"""Seconds that the calls between two looks at the clock of a GPU are to take, and so many of them at most."""

Work = Callable[[], object]


def lowest_decile(samples: Iterable[float]) -> float:
    """The lowest decile."""
    return quantiles(samples, n=10, method="inclusive")[0]


@dataclass(frozen=True)
class ProbeTimer:
    device: torch.device
    world: Group

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def once(self, work: Work, calls: int = 1) -> float:
        """Seconds of a call, by the mean of so many."""
        begin = self.now()
        for _ in range(calls):
            work()
        return (self.now() - begin) / calls

    def seconds(self, work: Work) -> float:
        """Of something that each rank does by itself, beside the others."""
        work()
        calls = self._calls(work)
        barrier(self.world)
        return self.slowest(lowest_decile(self._samples(work, calls)))

    def collective_seconds(self, work: Work) -> float:
        """Of something that ranks do with each other."""
        work()
        calls = self._calls(work)
        times = max(FEWEST, min(MOST, int(SECONDS / (self.slowest(self.once(work, calls)) * calls))))
        return self.slowest(lowest_decile(self.once(work, calls) for _ in range(times)))

    def passes(self, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> PassTimings:
        """Seconds of a forward, and of its backward."""
        ahead = self.seconds(forward)
        result = forward()
        gradient = torch.ones_like(result)
        return PassTimings(ahead,
                           self.seconds(lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)))

    def slowest(self, seconds: float) -> float:
        return seconds if self.world.is_solo else float(max(all_gather_json(seconds, self.world)))

    def _calls(self, work: Work) -> int:
        """Between two looks at the clock."""
        if self.device.type == "cpu":
            return 1
        return max(1, min(MOST_CALLS, int(SAMPLE / self.slowest(self.once(work)))))

    def _samples(self, work: Work, calls: int) -> Iterator[float]:
        end = self.now() + SECONDS
        for number in range(MOST):
            if number >= FEWEST and self.now() > end:
                return
            yield self.once(work, calls)
