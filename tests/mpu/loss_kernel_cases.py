"""What the fused kernel of the loss must do, against torch's operators and against float64.

test_loss_kernel.py runs these tests on a CPU in Triton's interpreter, and tests/gpu/test_loss.py on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpu import loss_chunk, loss_kernel
from mpu.groups import Group
from mpu.loss_chunk import VocabShard

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = loss_kernel._BLOCK
SHAPES = [(3, 37, 64), (5, 50, 50), (2, 1000, 1024), (2, 8 * BLOCK + 116, 8 * BLOCK + 128), (2, BLOCK, BLOCK),
          (2, BLOCK - 1, 3 * BLOCK), (1, 1, 16)]
"""Rows, real columns, width: less than a block of the kernel, several, one exactly, blocks of padding, odd widths."""

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of one number as it is stored: a unit in the last place, as Triton's interpreter cuts bf16 numbers off."""


def _logits(rows: int, columns: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * width + columns)
    logits = (torch.randn(rows, width, generator=generator) * 4 + 7).to(dtype)
    logits[:, columns:] = 1000.0  # padding must not matter, whatever it holds
    target = torch.randint(0, columns, (rows,), generator=generator)
    target[0] = columns - 1
    return logits.to(DEVICE), target.to(DEVICE), torch.rand(rows, generator=generator).to(DEVICE)


def _exact(logits: Tensor, target: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    x = logits[:, :columns].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(x, target, reduction="none")
    (losses * scale).sum().backward()
    assert x.grad is not None
    return losses.detach(), x.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_and_gradients_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    logits, target, scale = _logits(*shape, dtype)
    losses, gradient = _exact(logits, target, scale, shape[1])
    found = loss_kernel.losses_and_gradients(logits, target, shape[1], scale)
    torch.testing.assert_close(found.double(), losses, rtol=2e-6, atol=2e-6)  # fp32 inside
    torch.testing.assert_close(logits[:, :shape[1]].double(), gradient, rtol=ROUNDING[dtype], atol=1e-6)
    assert not logits[:, shape[1]:].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_of_a_split_vocabulary_compute_the_whole_softmax(
    dtype: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, one after the other: the second has the columns of the first, and the targets are the first's."""
    rows, columns, width = shape
    logits, target, scale = _logits(*shape, dtype)
    losses, gradient = _exact(torch.cat([logits[:, :columns]] * 2, 1), target, scale, 2 * columns)
    summaries = [loss_kernel.summaries_of(logits, target, first, columns) for first in (0, columns)]
    monkeypatch.setattr(loss_chunk, "load_kernels", lambda *which: loss_kernel)
    monkeypatch.setattr(loss_chunk, "on_accelerator", lambda x: True)
    monkeypatch.setattr(loss_chunk, "all_gather", lambda local, tp, dim: torch.stack(summaries, 1))
    for rank in range(2):
        place = logits.clone()
        shard = VocabShard(Group(rank, 2, (0, 1)), rank * columns, columns)
        found = loss_chunk.losses_of_chunk(place, target, shard, scale)
        torch.testing.assert_close(found.double(), losses, rtol=2e-6, atol=2e-6)  # fp32 inside
        torch.testing.assert_close(place[:, :columns].double(), gradient[:, rank * columns:][:, :columns],
                                   rtol=ROUNDING[dtype], atol=1e-6)
        assert not place[:, columns:].any()


def test_a_rank_with_nothing_but_padding_has_an_empty_summary() -> None:
    logits, target, scale = _logits(2, 1, 64, torch.float32)
    top, total, at_target = loss_kernel.summaries_of(logits, target, 640, 0)
    assert torch.isneginf(top).all() and not total.any() and not at_target.any()
    ones = torch.ones(2, device=DEVICE)
    loss_kernel.gradients_into(logits, logits, target, 640, 0, ones, ones, scale)
    assert not logits.any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_minus_infinity_has_no_probability_and_what_is_not_finite_is_not_hidden() -> None:
    x = torch.tensor([[-torch.inf, 1.0, 2.0, 0.0], [torch.nan, 1.0, 2.0, 0.0], [torch.inf, 1.0, 2.0, 0.0]],
                     device=DEVICE)
    target, scale = torch.tensor([2, 2, 2], device=DEVICE), torch.ones(3, device=DEVICE)
    losses, gradient = _exact(x, target, scale, 4)
    found = loss_kernel.losses_and_gradients(x, target, 4, scale)
    torch.testing.assert_close(found[0].double(), losses[0])
    torch.testing.assert_close(x[0].double(), gradient[0], atol=1e-6, rtol=0)
    assert not found[1:].isfinite().any() and not x[1:].isfinite().all(1).any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_what_is_not_finite_shows_in_whatever_block_it_is(value: float, block: int) -> None:
    logits, target, scale = _logits(2, 3 * BLOCK - 5, 3 * BLOCK, torch.bfloat16)
    logits[0, block * BLOCK + 7] = value
    found = loss_kernel.losses_and_gradients(logits, target, 3 * BLOCK - 5, scale)
    assert found.isfinite().tolist() == logits.isfinite().all(1).tolist() == [False, True]


@pytest.mark.parametrize("dtype, shift", [(torch.float32, -200.0), (torch.bfloat16, -3e4), (torch.float16, -6e4),
                                          (torch.float32, torch.finfo(torch.float32).min)])
def test_rows_of_very_small_logits_are_like_any(dtype: torch.dtype, shift: float) -> None:
    """Their maximum is theirs, and not where the search for it began."""
    logits, target, scale = _logits(2, BLOCK + 3, BLOCK + 16, dtype)
    logits[:, :BLOCK + 3] = logits[:, :BLOCK + 3].float().clamp(0, 1).add_(shift).to(dtype)
    losses, gradient = _exact(logits, target, scale, BLOCK + 3)
    found = loss_kernel.losses_and_gradients(logits, target, BLOCK + 3, scale)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :BLOCK + 3].double(), gradient, rtol=2 * ROUNDING[dtype], atol=1e-6)


def test_rows_that_do_not_count_get_no_gradient_at_all() -> None:
    logits, target, scale = _logits(3, 37, 64, torch.float16)
    scale[1] = 0
    loss_kernel.losses_and_gradients(logits, target, 37, scale)
    assert not logits[1].any() and logits[0].any()


def test_a_gradient_may_go_elsewhere_and_leaves_the_logits() -> None:
    logits, target, scale = _logits(3, 37, 64, torch.bfloat16)
    before, place = logits.clone(), torch.empty_like(logits)
    summaries = loss_kernel.summaries_of(logits, target, 0, 37)
    loss_kernel.gradients_into(place, logits, target, 0, 37, *summaries[:2], scale)
    assert torch.equal(logits, before)
    loss_kernel.losses_and_gradients(logits, target, 37, scale)
    assert torch.equal(place, logits)  # both ways to the gradient are one
