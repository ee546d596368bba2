"""The clock of the probe: how long something takes on every rank at once.

All ranks measure at the same time, since they share memory and cores in training too. A number is the lowest decile of
what one rank saw, which other programs of the machine disturb less than the median, and of all ranks the largest. Work
that ranks do together has to be done equally often by all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor

from mpu.collectives import all_gather_json, barrier
from mpu.groups import Group

SECONDS, FEWEST, MOST = 0.2, 3, 50
"""Of measuring one thing: so long, but so many times at least and at most."""

Work = Callable[[], object]


def usual(samples: Iterable[float]) -> float:
    """The lowest decile."""
    return quantiles(samples, n=10, method="inclusive")[0]


@dataclass(frozen=True)
class Stopwatch:
    device: torch.device
    world: Group

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def once(self, work: Work) -> float:
        begin = self.now()
        work()
        return self.now() - begin

    def seconds(self, work: Work) -> float:
        """Of something that each rank does by itself, beside the others."""
        work()
        barrier(self.world)
        return self.slowest(usual(self._samples(work)))

    def together(self, work: Work) -> float:
        """Of something that ranks do with each other."""
        work()
        times = max(FEWEST, min(MOST, int(SECONDS / self.slowest(self.once(work)))))
        return self.slowest(usual(self.once(work) for _ in range(times)))

    def passes(self, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> tuple[float, float]:
        """Seconds of a forward, and of its backward."""
        ahead = self.seconds(forward)
        result = forward()
        gradient = torch.ones_like(result)
        return ahead, self.seconds(lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))

    def slowest(self, seconds: float) -> float:
        return seconds if self.world.is_solo else float(max(all_gather_json(seconds, self.world)))

    def _samples(self, work: Work) -> Iterator[float]:
        end = self.now() + SECONDS
        for number in range(MOST):
            if number >= FEWEST and self.now() > end:
                return
            yield self.once(work)
