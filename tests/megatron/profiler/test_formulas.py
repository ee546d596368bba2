"""Multiply-accumulates of single operations, against loops and against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from megatron.profiler.flop_recorder import FlopRecording


def macs(run: Callable[[], Any]) -> int:
    with (counting := FlopRecording(nn.Module())):
        run()
    return sum(counting.macs.values())


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


A, B, X = zeros(3, 5), zeros(5, 7), zeros(2, 3, 5)


PRODUCTS: list[tuple[Callable[[], Any], int]] = [
    (lambda: A @ B, 3 * 5 * 7),
    (lambda: torch.mm(A, B, out=zeros(3, 7)), 3 * 5 * 7),
    (lambda: zeros(3, 7).addmm_(A, B), 3 * 5 * 7),
    (lambda: torch.addmm(zeros(7), A, B), 3 * 5 * 7),
    (lambda: X @ B, 2 * 3 * 5 * 7),
    (lambda: torch.bmm(X, zeros(2, 5, 7)), 2 * 3 * 5 * 7),
    (lambda: torch.baddbmm(zeros(2, 3, 7), X, zeros(2, 5, 7)), 2 * 3 * 5 * 7),
    (lambda: torch.einsum("bik,kj->bij", X, B), 2 * 3 * 5 * 7),
    (lambda: A @ zeros(5), 3 * 5),
    (lambda: torch.addmv(zeros(3), A, zeros(5)), 3 * 5),
    (lambda: zeros(5) @ zeros(5), 5),
    (lambda: F.linear(X, zeros(7, 5), zeros(7)), 2 * 3 * 5 * 7),
    (lambda: torch._int_mm(torch.zeros(32, 16, dtype=torch.int8), torch.zeros(16, 8, dtype=torch.int8)), 32 * 16 * 8),
    (lambda: torch.cdist(zeros(30, 5), zeros(26, 5)), 30 * 26 * (5 + 2)),
    (lambda: F.gelu(F.layer_norm(X, (5,))) + X.softmax(-1) * 2, 0),
    (lambda: F.embedding(torch.zeros(4, dtype=torch.long), B), 0)]


def test_products_are_counted_by_whatever_name_they_are_called() -> None:
    for number, (run, expected) in enumerate(PRODUCTS):
        assert macs(run) == expected, number


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_what_needs_no_gradients_is_counted_alike(grad: Callable[[], Any]) -> None:
    query = zeros(2, 4, 6, 8)
    with grad():
        assert macs(lambda: F.linear(X, zeros(7, 5))) == 2 * 3 * 5 * 7
        assert macs(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)) == 2 * 4 * 21 * 16


@pytest.mark.parametrize("rows, columns, causal", [(1, 1, True), (6, 6, False), (4, 9, True), (9, 4, True)])
def test_attention_is_the_products_of_the_scores_that_it_forms(rows: int, columns: int, causal: bool) -> None:
    heads, width = 3, 8
    query = torch.zeros(2, heads, rows, width, requires_grad=True)
    key, value = (torch.zeros(2, heads, columns, width, requires_grad=True) for _ in range(2))
    pairs = sum(not causal or j <= i for i in range(rows) for j in range(columns))
    made: list[Tensor] = []
    forward = macs(lambda: made.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal)))
    assert forward == 2 * heads * pairs * 2 * width
    assert macs(lambda: made[0].sum().backward()) == 2 * heads * pairs * 5 * width


@pytest.mark.parametrize("layer, groups", [(F.conv1d, 1), (F.conv2d, 2), (F.conv_transpose2d, 2)])
def test_convolutions_apply_a_filter_at_each_point(layer: Callable[..., Tensor], groups: int) -> None:
    """A bias of a filter's own at each point is not counted; backward is one such product by the image and one by the
    weight, and without a gradient of the image only the latter."""
    one = layer is F.conv1d
    image = torch.zeros(2, 4, 9, *() if one else (7,), requires_grad=True)
    transposed = layer is F.conv_transpose2d
    shape = (4, 6 // groups) if transposed else (6, 4 // groups)
    weight = torch.zeros(*shape, 3, *() if one else (3,), requires_grad=True)
    made: list[Tensor] = []
    forward = macs(lambda: made.append(layer(image, weight, stride=2, padding=1, groups=groups)))
    points = (image if transposed else made[0])[0, 0].numel()
    assert forward == 2 * points * 4 * 6 // groups * weight[0, 0].numel()
    assert macs(lambda: made[0].sum().backward()) == 2 * forward
    fixed = image.detach()
    loss = layer(fixed, weight, stride=2, padding=1, groups=groups).sum()
    assert macs(loss.backward) == forward


def test_torch_counts_the_same_where_it_counts() -> None:
    """Its counter takes causal attention for full, and passes over products in place and of vectors."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.zeros(2, 6, 16, requires_grad=True)
    ours = macs(lambda: layer(x).sum().backward())
    with FlopCounterMode(display=False) as theirs, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        layer(x).sum().backward()
    attention = 2 * 6 * 6 * 16  # one product; a kernel's backward makes the scores again
    assert 2 * (ours - attention) == theirs.get_total_flops()


@torch.library.custom_op("profiler_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


def test_operations_of_others_are_counted_by_their_formula_and_told_without_one() -> None:
    with (counting := FlopRecording(nn.Module())):
        thrice(A)
        thrice(A)
    assert dict(counting.uncounted_ops) == {"profiler_tests.thrice.default": 2}

    @torch.library.custom_op("profiler_tests::known", mutates_args=())
    def known(x: Tensor) -> Tensor:
        return x * 4

    register_flop_formula(torch.ops.profiler_tests.known)(lambda shape, out_shape=None: 2 * shape[0] * shape[1] * 10)
    try:
        assert macs(lambda: known(A)) == 150
    finally:
        del flop_registry[torch.ops.profiler_tests.known]
