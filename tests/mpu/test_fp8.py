"""Products with 8-bit factors against a slow reference: the nearest representable numbers, multiplied in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpu.cross_entropy import linear_cross_entropy
from mpu.fp8 import BACKWARD_FORMAT, FORWARD_FORMAT, fp8_linear, fp8_mm, to_fp8
from mpu.groups import SOLO, build
from mpu.layers import ColumnParallelLinear, RowParallelLinear, linear, use_fp8
from tests.distributed import on_ranks


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.randn(shape[-1], generator=generator).exp()).to(dtype)


def all_values(dtype: torch.dtype) -> Tensor:
    """Every finite number of an 8-bit format, in order."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with each element replaced by the nearest multiple of the scale, found by looking at all of them."""
    known = all_values(dtype)
    scale = x.double().abs().max() / known[-1]
    return known[(x.double().unsqueeze(-1) / scale - known).abs().argmin(-1)] * scale


def close(found: Tensor, expected: Tensor, rel: float = 2 ** -7) -> None:
    """As close as bf16 can say, relative to the largest: elements halfway between two numbers may fall either way."""
    assert (found.double() - expected).abs().max() <= rel * expected.abs().max()


@pytest.mark.parametrize("dtype", [FORWARD_FORMAT, BACKWARD_FORMAT])
def test_each_element_becomes_the_nearest_number_of_its_format(dtype: torch.dtype) -> None:
    x = numbers(48, 32)
    values, scale = to_fp8(x, dtype)
    assert values.double().abs().max() == all_values(dtype)[-1]
    close(values.double() * scale.double(), rounded(x, dtype), 1e-6)
    for special in (torch.inf, torch.nan):
        x[3, 4] = special
        assert to_fp8(x, dtype).values.float()[3, 4].isnan()
    assert not to_fp8(torch.zeros(2, 2), dtype).values.float().any()


def test_the_emulated_product_is_that_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = to_fp8(numbers(32, 64), BACKWARD_FORMAT), to_fp8(numbers(64, 48, seed=2))
    emulated = fp8_mm(a, b, torch.bfloat16)
    monkeypatch.setattr("mpu.fp8.on_accelerator", lambda x: True)
    torch.testing.assert_close(fp8_mm(a, b, torch.bfloat16), emulated)


def reference(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, d_x and d_weight of rows."""
    x, weight, grad = rounded(x, FORWARD_FORMAT), rounded(weight, FORWARD_FORMAT), rounded(grad, BACKWARD_FORMAT)
    return x @ weight.t(), grad @ weight, grad.t() @ x


def test_a_linear_layer_and_its_gradients_are_products_of_rounded_factors() -> None:
    x, weight = numbers(4, 8, 32).requires_grad_(), numbers(16, 32, seed=2).requires_grad_()
    bias, grad = numbers(16, seed=3).requires_grad_(), numbers(4, 8, 16, seed=4)
    y = fp8_linear(x, weight, bias)
    y.backward(grad)
    expected, d_x, d_weight = reference(x.detach().flatten(0, 1), weight.detach(), grad.flatten(0, 1))
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    close(y.detach().flatten(0, 1), expected + bias.detach().double())
    close(x.grad.flatten(0, 1), d_x)
    close(weight.grad, d_weight)
    torch.testing.assert_close(bias.grad, grad.flatten(0, 1).sum(0))


@on_ranks(2)
def test_split_layers_round_their_slices_with_positions_split_or_not(rank: int, world: int) -> None:
    tp, x, grad = build(world).tp, numbers(32, 32), numbers(32, 32, seed=4)
    mine = slice(rank * 16, rank * 16 + 16)  # positions
    found = []
    for splits in (False, True):
        torch.manual_seed(5)
        column, row = (kind(32, 32, bias=False, sequence_parallel=splits, tp=tp, dtype=torch.bfloat16, **more)
                       for kind, more in ((ColumnParallelLinear, {"gather_output": False}),
                                          (RowParallelLinear, {"input_is_parallel": True})))
        layers = nn.Sequential(column, row)
        use_fp8(layers)
        given = (x[mine] if splits else x).unflatten(0, (2, -1)).clone().requires_grad_()
        y = layers(given)  # [2, 16, 32], or [2, 8, 32] of this rank
        y.backward(grad[mine].view_as(y) if splits else grad.view_as(y))
        assert given.grad is not None
        found.append([*(part.flatten(0, 1) if splits else part.flatten(0, 1)[mine] for part in (y, given.grad)),
                      column.weight.grad, row.weight.grad])
    for whole, split in zip(*found):
        assert torch.equal(whole, split), "the same products, whoever holds the positions"
    close(column(x[mine].view(2, 8, 32)).detach().flatten(0, 1),
          rounded(x, FORWARD_FORMAT) @ rounded(column.weight.detach(), FORWARD_FORMAT).t())
    column.eval()
    assert torch.equal(column(x), linear(x, column.weight.detach())), "16 bits outside of training"


def test_the_logits_of_the_loss() -> None:
    hidden, weight = (numbers(32, 48) / 8).requires_grad_(), numbers(64, 48, seed=2)
    target = torch.arange(32) % 64
    loss = linear_cross_entropy(hidden, weight, target, SOLO, loss_weight=torch.ones(32), fp8=True)
    loss.backward()
    logits = (rounded(hidden.detach(), FORWARD_FORMAT) @ rounded(weight, FORWARD_FORMAT).t()).bfloat16().double()
    logits.requires_grad_()
    expected = torch.nn.functional.cross_entropy(logits, target)
    expected.backward()
    assert logits.grad is not None and hidden.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    close(hidden.grad, rounded(logits.grad, BACKWARD_FORMAT) @ rounded(weight, FORWARD_FORMAT), 0.02)
