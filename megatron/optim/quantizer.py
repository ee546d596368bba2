"""Quantizers for MoQ: the levels that the weights of a group may take, and rounding to them.

    bits        levels of a group                                      from
    3 and more  k * scale for low <= k <= high
                symmetric:  scale = 2 max|w| / 2^bits, k from -2^(bits-1) to 2^(bits-1) - 1
                asymmetric: scale = (max w - min w) / 2^bits, k from round(min w / scale) on, 2^bits of them
    2           -scale, 0, scale: 0 up to 0.7 mean|w|, and scale the mean of the others
    1           -scale, scale = mean|w|; 0 stays 0

Rounding is to nearest even, or stochastic with `noise` in [0, 1). Means do not depend on summation order: magnitudes
are counted as integer multiples of a power of two (`MagnitudeUnit`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bit_schedule import MIN_UNIFORM_BITS

TERNARY_THRESHOLD = 0.7  # threshold of the ternary quantizer, in units of mean|w|


@dataclass(frozen=True)
class UniformQuantizer:
    """Level k of a group is the value k * scale."""

    scale: Tensor  # [groups], as are low and high
    low: Tensor
    high: Tensor

    def levels(self, x: Tensor, group: Tensor, noise: Tensor | None = None) -> Tensor:
        """k of each element of x [rows, columns] in fp32; row i belongs to `group[i]`."""
        scale, low, high = (numbers[group].unsqueeze(1) for numbers in (self.scale, self.low, self.high))
        steps = x / torch.where(scale != 0, scale, torch.inf)
        steps = steps.round_() if noise is None else steps.add_(noise).floor_()
        return torch.minimum(torch.maximum(steps, low, out=steps), high, out=steps)

    @property
    def fits_int8(self) -> bool:
        return bool((self.low >= -128).all() and (self.high <= 127).all())


@dataclass(frozen=True)
class SignQuantizer:
    """Ternary, and with a negative threshold binary."""

    scale: Tensor
    # [groups], as is scale. Magnitudes up to it become 0.
    threshold: Tensor

    fits_int8 = True

    def levels(self, x: Tensor, group: Tensor, noise: Tensor | None = None) -> Tensor:
        return x.sign().mul_(x.abs() > self.threshold[group].unsqueeze(1))


Quantizer = UniformQuantizer | SignQuantizer


def quantize_to_levels(quantizer: Quantizer, x: Tensor, group: Tensor, noise: Tensor | None = None) -> Tensor:
    """x rounded to the quantizer's levels."""
    return quantizer.levels(x, group, noise).mul_(quantizer.scale[group].unsqueeze(1))


def uniform_quantizer(bits: int, highest: Tensor, lowest: Tensor, *, symmetric: bool) -> UniformQuantizer:
    """From the largest and smallest weight of each group, in fp32."""
    assert bits >= MIN_UNIFORM_BITS
    count = 2.0 ** bits
    if symmetric:
        largest = torch.maximum(highest, -lowest)
        low = torch.full_like(largest, -count / 2)
        return UniformQuantizer(largest * (2 / count), low, low + (count - 1))
    spread = highest - lowest
    is_spread = spread > 0
    scale = torch.where(is_spread, spread / count, highest)
    low = torch.where(is_spread, (lowest / torch.where(is_spread, scale, 1.0)).round(), 1.0)
    return UniformQuantizer(scale, low, torch.where(is_spread, low + (count - 1), low))


@dataclass(frozen=True)
class MagnitudeUnit:
    """The unit in which each group's magnitudes are counted: a power of two, so small relative to the largest magnitude
    that the sum over all members just fits int64."""

    size: Tensor  # [groups] in fp64

    @staticmethod
    def for_groups(largest: Tensor, members: Tensor) -> MagnitudeUnit:
        """From the largest |w| of each group and its number of members."""
        exponent = torch.frexp(largest.double())[1]
        room = 62 - torch.frexp(members.double())[1]
        return MagnitudeUnit(torch.ldexp(torch.ones_like(largest, dtype=torch.float64), exponent - room))

    def to_units(self, x: Tensor, group: Tensor) -> Tensor:
        """|x| in units, int64, rounded down."""
        return (x.double().abs_() / self.size[group].unsqueeze(1)).long()

    def mean(self, counts: Tensor, members: Tensor) -> Tensor:
        """The fp32 mean of `counts` (sums in units) over `members`; 0 for an empty group."""
        return (counts.double() * self.size / members.double().clamp(min=1)).float()
