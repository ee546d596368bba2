"""Grids: every number is on one, is the nearest or the next of it, and no group can give anything else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optim.quantizer import (TERNARY_THRESHOLD, MagnitudeUnit, SignQuantizer, quantize_to_levels,
                                      uniform_quantizer)

GROUPS, ROWS, COLUMNS = 4, 8, 50


def weights(seed: int = 0) -> tuple[Tensor, Tensor]:
    """[rows, columns] with groups of very different sizes, and the group of each row."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) + 0.3
    group = torch.arange(ROWS) // (ROWS // GROUPS)
    return x * (10.0 ** group)[:, None], group


def by_group(x: Tensor) -> Tensor:
    return x.view(GROUPS, -1)


def test_a_symmetric_grid_is_as_published() -> None:
    """Against the formula written out: the largest positive number always loses a step."""
    x, group = weights()
    flat = by_group(x).double()
    for bits in (3, 4, 8, 12, 16):
        scale = 2 * flat.abs().amax(1, keepdim=True) / 2**bits
        expected = (flat / scale).round().clamp(-2 ** (bits - 1), 2 ** (bits - 1) - 1) * scale
        grid = uniform_quantizer(bits, by_group(x).amax(1), by_group(x).amin(1), symmetric=True)
        found = by_group(quantize_to_levels(grid, x, group)).double()
        assert (found - expected).abs().amax() <= 1e-6 * expected.abs().amax()
        assert all(len(row.unique()) <= 2**bits for row in found)


def test_an_asymmetric_grid_is_as_published() -> None:
    x, group = weights()
    flat = by_group(x).double()
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    for bits in (3, 4, 8):
        scale = (high - low) / 2**bits
        zero = (low / scale).round() * scale
        expected = ((flat - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero
        grid = uniform_quantizer(bits, by_group(x).amax(1), by_group(x).amin(1), symmetric=False)
        found = by_group(quantize_to_levels(grid, x, group))
        # A tie may fall on either side of the other formula's: a step at most, and seldom.
        assert ((found - expected).abs() > 1e-4 * scale).float().mean() < 0.01
        assert all(len(row.unique()) <= 2**bits for row in found)


def test_groups_of_zeros_and_of_equal_numbers_stay_what_they_are() -> None:
    x = torch.stack([torch.zeros(6), torch.full((6,), 0.7), torch.full((6,), -0.2)])
    group = torch.arange(3)
    for bits in (3, 8):
        for symmetric in (True, False):
            found = quantize_to_levels(uniform_quantizer(bits, x.amax(1), x.amin(1), symmetric=symmetric), x, group)
            assert found.isfinite().all() and found[0].eq(0).all()
            if not symmetric:
                assert found.equal(x)
    mean = x.abs().mean(1)
    for grid in (SignQuantizer(mean, -mean), SignQuantizer(mean, 0.7 * mean)):
        found = quantize_to_levels(grid, x, group)
        assert found.isfinite().all() and found[0].eq(0).all()
        assert torch.allclose(found, x)


def test_noise_takes_a_number_up_with_the_chance_of_its_distance() -> None:
    x, group = torch.full((1, 100_000), 0.3), torch.zeros(1, dtype=torch.int64)
    x[0, 0] = -4.0
    grid = uniform_quantizer(3, x.amax(1), x.amin(1), symmetric=True)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    found = quantize_to_levels(grid, x, group, noise)[0, 1:]
    assert set(found.tolist()) == {0.0, 1.0}
    assert found.mean().item() == pytest.approx(0.3, abs=0.01)  # 6 standard deviations
    assert quantize_to_levels(grid, x, group)[0, 1:].eq(0).all()


def test_ternary_and_binary_are_as_published() -> None:
    x, group = weights()
    flat = by_group(x)
    mean = flat.abs().mean(1, keepdim=True)
    binary, means = SignQuantizer(mean[:, 0], -mean[:, 0]), flat.sign() * mean
    assert torch.allclose(by_group(quantize_to_levels(binary, x, group)), means)
    beyond = flat.abs() > 0.7 * mean
    of_others = (flat.abs() * beyond).sum(1, keepdim=True) / beyond.sum(1, keepdim=True)
    ternary = SignQuantizer(of_others[:, 0], mean[:, 0] * TERNARY_THRESHOLD)
    found = by_group(quantize_to_levels(ternary, x, group))
    assert torch.allclose(found, flat.sign() * beyond * of_others)
    assert all(len(row.unique()) == 3 for row in found)


def test_a_mean_does_not_depend_on_the_order_of_its_parts() -> None:
    """Where floating point does: the sum of these in fp64 has other bits from left to right and from right to left."""
    x = (torch.randn(1, 4099, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 4099)).float()
    group, members = torch.zeros(1, dtype=torch.int64), torch.tensor([x.numel()])
    unit = MagnitudeUnit.for_groups(x.abs().amax(1), members)
    counts = unit.to_units(x, group)
    for parts in (1, 2, 3, 7):
        pieces = [piece.sum() for piece in counts[0].flip(0).tensor_split(parts)]
        assert sum(pieces) == counts.sum()
    assert unit.mean(counts.sum().view(1), members).item() == pytest.approx(x.abs().double().mean().item(), rel=1e-7)
    assert 2**60 <= int(unit.to_units(torch.full_like(x, x.abs().amax().item()), group).sum()) < 2**62
