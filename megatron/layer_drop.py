"""Progressive layer dropping (Zhang and He, 2020): which blocks a training step runs. Pure arithmetic on the host.

    theta(t) = (1 - theta) exp(-gamma t) + theta    falls from 1 to theta; t is the number of steps before this one
    p_i(t)   = 1 - i (1 - theta(t)) / L             the chance that block i of L runs, from 0: the first always does

A block that runs has its branches multiplied by 1 / p_i, so that its mean is that of the whole block; one that does not
passes its input on. A draw depends only on (seed, step, block): all ranks, the recomputation of a block and a resumed
run agree, and no generator moves. All micro-batches of a step share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

DRAW_BITS = 53  # bits of a draw: those of a float in [0, 1)


@dataclass(frozen=True)
class ThetaSchedule:
    """How theta falls: to `theta`, by a factor of exp(-gamma) of the way that is left in each step."""

    theta: float
    gamma: float

    def theta_at(self, step: int) -> float:
        """theta(t) of the step that `step` others came before."""
        return (1 - self.theta) * math.exp(-self.gamma * step) + self.theta

    def mean(self, steps: int) -> float:
        """The mean of theta(t) over the first `steps` steps: a geometric sum."""
        if steps == 0 or self.gamma == 0:
            return 1.0
        total = math.expm1(-self.gamma * steps) / math.expm1(-self.gamma)
        return (1 - self.theta) * total / steps + self.theta


def keep_probability(block: int, blocks: int, theta: float) -> float:
    """p_i of block i of `blocks`."""
    return 1 - block * (1 - theta) / blocks


def uniform_draw(seed: int, step: int, block: int) -> float:
    """A number of [0, 1), evenly distributed over seeds, steps and blocks."""
    digest = blake2b(f"layer drop {seed} {step} {block}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - DRAW_BITS)) / (1 << DRAW_BITS)


def kept(seed: int, step: int, blocks: int, theta: float) -> dict[int, float]:
    """The blocks that run in this step, in order -> what their branches are multiplied by."""
    chances = {block: keep_probability(block, blocks, theta) for block in range(blocks)}
    return {block: 1 / chance for block, chance in chances.items() if uniform_draw(seed, step, block) < chance}


def expected_blocks(blocks: int, theta: float) -> float:
    """How many run on average: all but (1 - theta) (blocks - 1) / 2."""
    return blocks - (1 - theta) * (blocks - 1) / 2
