"""Both losses against torch's own on the whole, unpadded logits."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpu import device
from mpu.cross_entropy import SLAB_COLUMNS, linear_cross_entropy, vocab_parallel_cross_entropy
from mpu.groups import SOLO, Group, build
from mpu.regions import copy_to_region
from tests.distributed import on_ranks, run_ranks
from tests.wires import accelerator_side

VOCAB, PADDED, ROWS, HIDDEN = 37, 64, 21, 16
"""With 4 ranks of 16 columns the third holds 5 real ones and the fourth none."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype)
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    target[:2] = torch.tensor([0, VOCAB - 1])
    loss_weight = torch.rand(ROWS, generator=generator)
    loss_weight[3] = 0
    return hidden, weight, target, loss_weight


def _assert_near(actual: Tensor, expected: Tensor | None, dtype: torch.dtype) -> None:
    """fp32: another order of addition. 16-bit: one rounding of logits of order 10, and one of each gradient."""
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _splits(rank: int, world: int, cases: list[tuple[torch.dtype, float]]) -> list[tuple[Tensor, Tensor]]:
    tp = build(world).tp if world > 1 else SOLO
    return [_from_logits(rank, world, tp, *case) for case in cases]


def _from_logits(rank: int, world: int, tp: Group, dtype: torch.dtype, offset: float) -> tuple[Tensor, Tensor]:
    hidden, weight, target, loss_weight = _case(dtype)
    whole = hidden @ weight.t() + offset
    whole[:, VOCAB:] = 1e4  # padding must not matter, whatever it holds
    logits = whole.chunk(world, -1)[rank].view(3, 7, -1).contiguous().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, target.view(3, 7), tp, VOCAB)
    (losses * loss_weight.view(3, 7)).sum().backward()
    assert logits.grad is not None and losses.dtype == torch.float32
    return losses.detach().flatten(), logits.grad.view(ROWS, -1)


@pytest.mark.parametrize("world", [1, 4])
def test_loss_of_split_logits_equals_the_whole(world: int) -> None:
    for dtype, *results in zip(DTYPES, *run_ranks(_splits, world, [(dtype, 0.0) for dtype in DTYPES]), strict=True):
        hidden, weight, target, loss_weight = _case(dtype)
        logits = (hidden @ weight.t())[:, :VOCAB].float().requires_grad_()
        expected = F.cross_entropy(logits, target, reduction="none")
        (expected * loss_weight).sum().backward()
        for losses, _ in results:
            torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)  # fp32 inside for every dtype
        grad = torch.cat([grad for _, grad in results], 1).float()
        _assert_near(grad[:, :VOCAB], logits.grad, dtype)
        assert not grad[:, VOCAB:].any()


@on_ranks(2)
def test_the_backward_of_one_rank_waits_for_no_other(rank: int, world: int) -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.arange(4), build(world).tp)
    if rank == 0:
        losses.sum().backward()
    assert (logits.grad is None) == (rank == 1)


def _kernels_on(rank: int, world: int, ranks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The others have no C compiler, say; a kernel that is called all the same fails: the mock has no numbers."""
    with patch("mpu.cross_entropy.on_accelerator", return_value=True), \
            patch("mpu.cross_entropy.load_kernels", return_value=MagicMock() if rank in ranks else None):
        return _from_logits(rank, world, build(world).tp, torch.float32, 0.0)


def test_a_rank_without_kernels_makes_all_ranks_of_its_group_go_without() -> None:
    found, expected = run_ranks(_kernels_on, 2, (0,)), run_ranks(_kernels_on, 2, ())
    for (losses, grad), (expected_losses, expected_grad) in zip(found, expected, strict=True):
        assert torch.equal(losses, expected_losses) and torch.equal(grad, expected_grad)


def test_huge_logits_lose_nothing() -> None:
    for (losses, grad), (moved, moved_grad) in run_ranks(_splits, 2, [(torch.float64, 0.0), (torch.float64, 9000.0)]):
        # fp32 inside: numbers near 9000 are 1e-3 apart
        torch.testing.assert_close(moved, losses, rtol=0, atol=2e-3)
        torch.testing.assert_close(moved_grad, grad, rtol=0, atol=2e-3)


def in_chunks_of(rows: int) -> Any:
    return patch("mpu.cross_entropy.rows_per_chunk", lambda hidden, width: rows)


FUSED = [*product(DTYPES, (True, False), ((4, 8.0, 0.0), (100, 1.0, 0.0), (4, 1.0, 0.01)))]
"""dtype, whether the mean is wanted, and rows of a chunk (several uneven chunks, and one) with scale and z-loss."""


def _fused(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    tp = build(world).tp if world > 1 else SOLO
    return [_from_hidden(rank, world, tp, dtype, mean, *how) for dtype, mean, how in FUSED]


def _from_hidden(rank: int, world: int, tp: Group, dtype: torch.dtype, mean: bool, chunk_rows: int,
                 scale: float, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, target, loss_weight = _case(dtype)
    hidden.requires_grad_()
    local = weight.chunk(world)[rank].clone().requires_grad_()
    given: dict[str, Any] = {"vocab_size": VOCAB, "loss_weight": loss_weight if mean else None, "z_loss": z_loss}
    with in_chunks_of(chunk_rows):
        result = linear_cross_entropy(copy_to_region(hidden, tp), local, target, tp, grad_scale=scale, **given)
        total = result if mean else (result * loss_weight).sum() / loss_weight.sum()
        (total * 8).backward()
    with torch.no_grad(), in_chunks_of(5):
        again = linear_cross_entropy(hidden, local, target, tp, **given)
    torch.testing.assert_close(again, result.detach(), rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None and local.grad is not None
    return result.detach(), hidden.grad / 8, local.grad / 8


@pytest.mark.parametrize("world", [1, 4])
def test_fused_loss_and_gradients_equal_the_plain_graph(world: int) -> None:
    for (dtype, mean, (*_, z_loss)), *results in zip(FUSED, *run_ranks(_fused, world), strict=True):
        hidden, weight, target, loss_weight = _case(dtype)
        h, w = hidden.float().requires_grad_(), weight.float().requires_grad_()
        logits = F.linear(h, w[:VOCAB])
        losses = F.cross_entropy(logits, target, reduction="none") + z_loss * logits.logsumexp(1).square()
        expected = (losses * loss_weight).sum() / loss_weight.sum()
        expected.backward()
        for value, d_hidden, _ in results:
            _assert_near(value, (expected if mean else losses).detach(), dtype)
            _assert_near(d_hidden.float(), h.grad, dtype)
        d_weight = torch.cat([grad for *_, grad in results]).float()
        _assert_near(d_weight, w.grad, dtype)
        assert not d_weight[VOCAB:].any()


def test_grad_scale_keeps_small_fp16_gradients_exact() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(64, 32, generator=generator).half()
    weight = (torch.randn(4096, 32, generator=generator) * 0.1).half()
    target = torch.randint(0, 64, (64,), generator=generator)  # rows 64.. only get probabilities near 1 / 4096
    reference = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ reference.t(), target).backward()
    assert reference.grad is not None
    errors = []
    for grad_scale in (2.0**13, 1.0):
        w = weight.clone().requires_grad_()
        loss = linear_cross_entropy(hidden, w, target, SOLO, loss_weight=torch.ones(64), grad_scale=grad_scale)
        (loss * 2.0**13).backward()
        assert w.grad is not None
        difference = (w.grad.double() / 2.0**13 - reference.grad)[64:]
        errors.append((difference.norm() / reference.grad[64:].norm()).item())
    assert errors[0] < 5e-4 and errors[1] > 5 * errors[0], errors  # fp16 rounds to 2**-11 = 4.9e-4


def test_many_chunks_of_bf16_are_as_exact_as_one() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(512, 32, generator=generator).bfloat16()
    weight = torch.randn(50, 32, generator=generator).bfloat16()
    target = torch.randint(0, 50, (512,), generator=generator)
    w64 = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ w64.t(), target).backward()
    assert w64.grad is not None
    errors = []
    for chunk_rows in (512, 4):
        w = weight.clone().requires_grad_()
        with in_chunks_of(chunk_rows):
            linear_cross_entropy(hidden, w, target, SOLO, loss_weight=torch.ones(512)).backward()
        assert w.grad is not None
        errors.append((w.grad.double() - w64.grad).norm().item())
    assert errors[1] < 1.5 * errors[0], errors


class LargestProduct(TorchDispatchMode):
    """Elements of the largest matrix product."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, result.numel() if "mm" in func._schema.name else 0)
        return result


@pytest.mark.skipif(device.FORCE_ACCELERATOR_PATH,
                    reason="an accelerator has such products, and takes the gradient in one")
def test_the_weight_gradient_of_bf16_is_no_product_of_its_own_size() -> None:
    """Processors without bf16 products make them in fp32 first: of the whole it would be twice the gradient."""
    columns, width, tokens = 3 * SLAB_COLUMNS, 32, 2
    hidden, weight = (torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True) for rows in (tokens, columns))
    with LargestProduct() as seen:
        linear_cross_entropy(hidden, weight, torch.tensor([0, columns - 1]), SOLO, loss_weight=torch.ones(2)).backward()
    assert seen.numel == SLAB_COLUMNS * width


def test_a_batch_without_weight_teaches_nothing_and_a_second_backward_says_what_to_do() -> None:
    hidden, weight, target, _ = _case(torch.float32)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, SOLO, loss_weight=torch.zeros(ROWS))
    loss.backward(retain_graph=True)
    assert loss.item() == 0 and hidden.grad is not None and not hidden.grad.any()
    with pytest.raises(RuntimeError, match="second backward needs a second forward"):
        loss.backward()


def test_no_rows_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda like, **how: torch.full_like(like, torch.nan, **how))
    hidden, _, target, loss_weight = _case(torch.float32)
    for mean, accelerator in product((True, False), (False, True)):
        weight = _case(torch.float32)[1].requires_grad_()
        with accelerator_side(accelerator):
            linear_cross_entropy(hidden[:0], weight, target[:0], SOLO, loss_weight=loss_weight[:0] if mean else None,
                                 ).sum().backward()
        assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))
