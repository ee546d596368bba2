"""Pure arithmetic of tensor parallelism: who owns which slice. No process group, no torch.

A *partition* says how one logical tensor is cut over the tensor-parallel ranks; a *range* is a half-open
pair (start, stop). Nothing here knows about devices or communication.
"""

from __future__ import annotations

from dataclasses import dataclass


class ParallelError(ValueError):
    """A parallel layout that cannot exist (user error): names both numbers and the remedy."""


@dataclass(frozen=True)
class Partition:
    """How a parameter is cut over tensor-parallel ranks.

    The logical tensor is viewed as [..., stride, n, ...] along `dim`; every rank holds n/tp of each of the
    `stride` parts (the fused q, k, v projection has stride 3: a rank owns a slice of q, of k and of v).
    """

    dim: int
    stride: int = 1
    size: int | None = None
    """Length along `dim` without padding (None: not padded). Rows beyond it are zero and never saved."""


def ensure_divisibility(numerator: int, denominator: int, what: str = "value") -> None:
    if numerator % denominator:
        raise ParallelError(f"{what} {numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int, what: str = "value") -> int:
    ensure_divisibility(numerator, denominator, what)
    return numerator // denominator
