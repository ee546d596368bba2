"""Multiply-accumulates of single operations, against loops and against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from megatron.profiler.flop_recorder import FlopCountingMode


def macs(run: Callable[[], Any]) -> int:
    found: list[int] = []
    with FlopCountingMode(found.append):
        run()
    return sum(found)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


A, B, X = zeros(3, 5), zeros(5, 7), zeros(2, 3, 5)


@pytest.mark.parametrize("run, expected", [
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
    (lambda: F.embedding(torch.zeros(4, dtype=torch.long), B), 0),
])
def test_products_are_counted_by_whatever_name_they_are_called(run: Callable[[], Any], expected: int) -> None:
    assert macs(run) == expected


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_what_needs_no_gradients_is_counted_alike(grad: Callable[[], Any]) -> None:
    query = zeros(2, 4, 6, 8)
    with grad():
        assert macs(lambda: F.linear(X, zeros(7, 5))) == 2 * 3 * 5 * 7
        assert macs(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)) == 2 * 4 * 21 * 16


@pytest.mark.parametrize("rows, columns", [(1, 1), (6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_products_of_the_scores_that_it_forms(rows: int, columns: int, causal: bool) -> None:
    heads, width = 3, 8
    query = torch.zeros(2, heads, rows, width, requires_grad=True)
    key, value = (torch.zeros(2, heads, columns, width, requires_grad=True) for _ in range(2))
    pairs = sum(not causal or j <= i for i in range(rows) for j in range(columns))
    made: list[Tensor] = []
    forward = macs(lambda: made.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal)))
    assert forward == 2 * heads * pairs * 2 * width
    assert macs(lambda: made[0].sum().backward()) == 2 * heads * pairs * 5 * width


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layer", [F.conv1d, F.conv2d, F.conv_transpose2d])
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
    counting = FlopCountingMode([].append)
    with counting:
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


@pytest.mark.parametrize("run, name", [
    (lambda: torch.nn.LSTM(4, 4)(zeros(3, 2, 4)), "aten.mkldnn_rnn_layer.default"),
    (lambda: F.bilinear(zeros(2, 3), zeros(2, 5), zeros(7, 3, 5)), "aten._trilinear.default"),
    (lambda: torch.cdist(A, zeros(4, 5)), "aten._cdist_forward.default"),
    (lambda: torch.linalg.inv(torch.eye(3)), "aten.linalg_inv_ex.default"),
    (lambda: torch.fft.rfft(zeros(8)), "aten._fft_r2c.default"),
])
def test_kernels_without_a_formula_are_told(run: Callable[[], Any], name: str) -> None:
    found: list[int] = []
    counting = FlopCountingMode(found.append)
    with counting:
        run()
    assert dict(counting.uncounted_ops) == {name: 1} or sum(found)  # a build of torch without that kernel multiplies


def test_what_goes_element_by_element_is_not_told_as_unknown() -> None:
    counting = FlopCountingMode([].append)
    with counting:
        x = torch.zeros(2, 3, 8, 8, requires_grad=True)
        y = F.interpolate(F.max_pool2d(F.batch_norm(x, None, None, training=True), 2), scale_factor=2, mode="bilinear")
        (F.layer_norm(y, (8,)).softmax(-1).cummax(-1).values + y.norm() + y.lgamma()).sum().backward()
    assert not counting.uncounted_ops


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_sequences_of_several_lengths_are_counted_by_what_they_hold_or_told() -> None:
    rows = [torch.ones(3, 5), torch.ones(4, 5)]
    layer = torch.nn.Linear(5, 7)
    jagged, strided = (torch.nested.nested_tensor(rows, layout=layout) for layout in (torch.jagged, torch.strided))
    made: list[Tensor] = []
    assert macs(lambda: made.append(layer(jagged).values())) == 7 * 5 * 7
    assert macs(lambda: made[0].sum().backward()) == 7 * 5 * 7
    counting = FlopCountingMode([].append)
    with counting, torch.no_grad():
        layer(strided)
    assert list(counting.uncounted_ops) == ["aten.linear.default"]
