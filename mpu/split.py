"""Arithmetic of tensor parallelism: which rank owns which slice, as half-open ranges. No process group, no torch."""

from __future__ import annotations

from dataclasses import dataclass


class ParallelError(ValueError):
    """An impossible parallel layout (user error); the message names both numbers and the remedy."""


@dataclass(frozen=True)
class Partition:
    """How a parameter is split over tensor-parallel ranks. The logical tensor is viewed as [..., stride, n, ...] along
    `dim`; every rank holds n/tp of each of the `stride` parts (stride 3 for a fused q, k, v projection: a rank owns a
    slice of q, of k and of v)."""

    dim: int
    stride: int = 1
    # Length along `dim` without padding; None: not padded. Rows beyond it are zero and never saved.
    size: int | None = None


def ensure_divisibility(numerator: int, denominator: int, what: str = "value") -> None:
    if denominator < 1 or numerator % denominator:
        raise ParallelError(f"{what} {numerator} is not divisible by {denominator}: choose a multiple of "
                            f"{denominator}, or a divisor of {numerator} in its place")


def divide(numerator: int, denominator: int, what: str = "value") -> int:
    ensure_divisibility(numerator, denominator, what)
    return numerator // denominator


def split_range(rank: int, parts: int, length: int) -> tuple[int, int]:
    """Range `rank` of `parts` equal, consecutive ranges of [0, length)."""
    if not 0 <= rank < parts:
        raise ParallelError(f"rank {rank} is outside 0..{parts - 1}")
    each = divide(length, parts, "length")
    return rank * each, (rank + 1) * each


def pad_vocab(vocab_size: int, multiple: int, tp: int) -> int:
    """The smallest size >= vocab_size that is a multiple of multiple * tp: every rank's rows are a multiple of it."""
    if vocab_size < 1 or multiple < 1 or tp < 1:
        raise ParallelError(f"vocabulary {vocab_size}, multiple {multiple} and tp {tp} must be at least 1")
    block = multiple * tp
    # -(-a // b): rounded up
    return -(-vocab_size // block) * block


def rank_grid(world: int, tp: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(tp groups, dp groups): tp groups are consecutive ranks, dp groups the ranks with equal tp rank."""
    if tp < 1 or world < 1 or world % tp:
        raise ParallelError(f"tensor-parallel size {tp} does not divide the world size {world}: start a multiple of "
                            f"{tp} ranks, or choose a divisor of {world}")
    tp_groups = [tuple(range(start, start + tp)) for start in range(0, world, tp)]
    dp_groups = [tuple(range(place, world, tp)) for place in range(tp)]
    return tp_groups, dp_groups
