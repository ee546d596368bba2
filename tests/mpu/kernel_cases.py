"""What the Triton kernels of the loss and of norms must do, against float64.

test_kernels.py runs these tests on a CPU in Triton's interpreter, and tests/gpu/test_loss.py on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mpu import cross_entropy, kernels
from mpu.cross_entropy import VocabShard
from mpu.device import load_kernels
from mpu.grads import NORM_ROW, row_norms
from mpu.groups import Group
from tests.covering import pairs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BLOCK = kernels._BLOCK
SHAPES = [(3, 37, 64), (5, 50, 50), (2, 1000, 1024), (2, 8 * BLOCK + 116, 8 * BLOCK + 128), (2, BLOCK, BLOCK),
          (2, BLOCK - 1, 3 * BLOCK), (1, 1, 16)]
"""Rows, real columns, width: less than a block of the kernel, several, one exactly, blocks of padding, odd widths."""

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of one number as it is stored: a unit in the last place, as Triton's interpreter cuts bf16 numbers off."""

CASES = [*pairs(SHAPES[2:], [*ROUNDING], each=1), *pairs(SHAPES[:2], [*ROUNDING])]

invalid_values = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter


def test_the_kernels_are_what_runs() -> None:
    assert load_kernels("mpu.kernels", DEVICE, "") is kernels


# ---- the loss ----------------------------------------------------------------------------------------------------


def _logits(rows: int, columns: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * width + columns)
    logits = (torch.randn(rows, width, generator=generator) * 4 + 7).to(dtype)
    logits[:, columns:] = 1000.0  # padding must not matter, whatever it holds
    target = torch.randint(0, columns, (rows,), generator=generator)
    target[0] = columns - 1
    scale = torch.rand(rows, generator=generator)
    scale[2:3] = 0.0  # a row that does not count
    return logits.to(DEVICE), target.to(DEVICE), scale.to(DEVICE)


def _exact(logits: Tensor, target: Tensor, scale: Tensor, columns: int, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    x = logits[:, :columns].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(x, target, reduction="none") + z_loss * x.logsumexp(1).square()
    (losses * scale).sum().backward()
    assert x.grad is not None
    return losses.detach(), x.grad


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("shape, dtype", CASES)
def test_losses_and_gradients_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, int, int],
                                                   z_loss: float) -> None:
    logits, target, scale = _logits(*shape, dtype)
    losses, gradient = _exact(logits, target, scale, shape[1], z_loss)
    found = kernels.losses_and_gradients(logits, target, shape[1], scale, z_loss)
    torch.testing.assert_close(found.double(), losses, rtol=2e-6, atol=2e-6)  # fp32 inside
    torch.testing.assert_close(logits[:, :shape[1]].double(), gradient, rtol=ROUNDING[dtype], atol=1e-6)
    assert not logits[:, shape[1]:].any() and not logits[2:3].any()


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("shape, dtype", CASES)
def test_the_kernels_of_a_split_vocabulary_compute_the_whole_softmax(
    dtype: torch.dtype, shape: tuple[int, int, int], z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, one after the other: the second has the columns of the first, and the targets are the first's."""
    rows, columns, width = shape
    logits, target, scale = _logits(*shape, dtype)
    losses, gradient = _exact(torch.cat([logits[:, :columns]] * 2, 1), target, scale, 2 * columns, z_loss)
    summaries = [kernels.summaries_of(logits, target, first, columns) for first in (0, columns)]
    monkeypatch.setattr(cross_entropy, "load_kernels", lambda *which: kernels)
    monkeypatch.setattr(cross_entropy, "on_accelerator", lambda x: True)
    monkeypatch.setattr(cross_entropy, "_all_ranks_have_kernels", lambda *which: True)
    monkeypatch.setattr(cross_entropy, "all_gather", lambda local, tp, dim: torch.stack(summaries, 1))
    for rank in range(2):
        place = logits.clone()
        shard = VocabShard(Group(rank, 2, (0, 1)), rank * columns, columns, z_loss)
        found = cross_entropy.losses_of_chunk(place, target, shard, scale)
        torch.testing.assert_close(found.double(), losses, rtol=2e-6, atol=2e-6)  # fp32 inside
        torch.testing.assert_close(place[:, :columns].double(), gradient[:, rank * columns:][:, :columns],
                                   rtol=ROUNDING[dtype], atol=1e-6)
        assert not place[:, columns:].any()


def test_a_rank_with_nothing_but_padding_has_an_empty_summary() -> None:
    logits, target, scale = _logits(2, 1, 64, torch.float32)
    top, total, at_target = kernels.summaries_of(logits, target, 640, 0)
    assert torch.isneginf(top).all() and not total.any() and not at_target.any()
    ones = torch.ones(2, device=DEVICE)
    kernels.write_gradients(logits, target, 640, 0, ones, ones, scale)
    assert not logits.any()


@invalid_values
def test_minus_infinity_has_no_probability() -> None:
    x = torch.tensor([[-torch.inf, 1.0, 2.0, 0.0]], device=DEVICE)
    target, scale = torch.tensor([2], device=DEVICE), torch.ones(1, device=DEVICE)
    losses, gradient = _exact(x, target, scale, 4)
    torch.testing.assert_close(kernels.losses_and_gradients(x, target, 4, scale).double(), losses)
    torch.testing.assert_close(x.double(), gradient, atol=1e-6, rtol=0)


@invalid_values
@pytest.mark.parametrize("value, block", [(torch.nan, 0), (torch.nan, 2), (torch.inf, 1), (torch.inf, 2)])
def test_what_is_not_finite_shows_in_whatever_block_it_is(value: float, block: int) -> None:
    logits, target, scale = _logits(2, 3 * BLOCK - 5, 3 * BLOCK, torch.bfloat16)
    logits[0, block * BLOCK + 7] = value
    found = kernels.losses_and_gradients(logits, target, 3 * BLOCK - 5, scale)
    assert found.isfinite().tolist() == logits.isfinite().all(1).tolist() == [False, True]


@pytest.mark.parametrize("dtype, shift", [(torch.float32, -200.0), (torch.bfloat16, -3e4), (torch.float16, -6e4),
                                          (torch.float32, torch.finfo(torch.float32).min)])
def test_rows_of_very_small_logits_are_like_any(dtype: torch.dtype, shift: float) -> None:
    """Their maximum is theirs, and not where the search for it began."""
    logits, target, scale = _logits(2, BLOCK + 3, BLOCK + 16, dtype)
    logits[:, :BLOCK + 3] = logits[:, :BLOCK + 3].float().clamp(0, 1).add_(shift).to(dtype)
    losses, gradient = _exact(logits, target, scale, BLOCK + 3)
    found = kernels.losses_and_gradients(logits, target, BLOCK + 3, scale)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :BLOCK + 3].double(), gradient, rtol=2 * ROUNDING[dtype], atol=1e-6)


# ---- norms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_norms_are_those_of_fp64(dtype: torch.dtype) -> None:
    for rows, scale in ((0, 1.0), (1, 1e-30), (15, 1e25), (16, 1e-5), (17, 1.0), (1000, 1e25)):
        x = (torch.randn(rows, NORM_ROW, generator=torch.Generator().manual_seed(rows)) * scale).to(dtype)
        x = x.where(x.isfinite(), 60000.0).to(DEVICE)
        out = torch.full((rows + 1,), 7.0, device=DEVICE)
        kernels.norms_into(out[:rows], x)
        torch.testing.assert_close(out[:rows], x.double().norm(dim=1).float(), rtol=1e-6, atol=0)
        assert out[rows] == 7, "nothing is written beside them"


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_what_is_not_finite_makes_its_row_so(dtype: torch.dtype) -> None:
    for value, place in ((math.inf, 0), (-math.inf, 64), (math.nan, 127)):
        x = torch.ones(40, NORM_ROW, dtype=dtype, device=DEVICE)
        x[5], x[21, place] = value, value
        bad = [row for row, finite in enumerate(row_norms(x.flatten()).isfinite().tolist()) if not finite]
        assert bad == [5, 21]


def test_the_largest_and_the_smallest_number_of_fp32() -> None:
    x = torch.zeros(3, NORM_ROW, device=DEVICE)
    x[0, 3], x[1, 9] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    assert row_norms(x.flatten()).tolist() == x.amax(1).tolist()
