"""Every split layer equals its unsplit twin, forward and backward, and starts from the same weights. The four region
functions are transposes of each other, and harmless to the tensors around them; and the arithmetic of who owns what."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu import device
from mpu.groups import SOLO, Group, build
from mpu.layers import (WEIGHT_FIRST_ROWS, ColumnParallelLinear, ParallelEmbedding, RowParallelLinear,
                        VocabParallelEmbedding, linear)
from mpu.partition import join_local_slices, local_slice, partition_of
from mpu.regions import (copy_to_region, gather_from_region, gather_from_sequence_region, reduce_from_region,
                         reduce_scatter_to_sequence_region, replicated_to_partial, scatter_to_region,
                         split_tensor_along_last_dim)
from mpu.split import ParallelError, Partition, divide, pad_vocab, rank_grid, split_range
from tests.distributed import on_ranks, run_ranks
from tests.wires import accelerator_side

WORLDS = [1, 4]
IN, OUT = 16, 24


def _draw(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.5)


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _run_layers(rank: int, world: int) -> list[dict[str, Tensor]]:
    tp = build(world).tp if world > 1 else SOLO
    return [_run_linear(rank, world, tp, kind, options) for kind, options in LAYERS]


def _run_linear(rank: int, world: int, tp: Group, kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Forward and backward of one layer; what is split is cut here and comes back as this rank's piece."""
    torch.manual_seed(5)
    layer_type = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = layer_type(IN, OUT, init_method=_draw, tp=tp, **options)
    if layer.bias is not None:
        bias, cut = _numbers(1, OUT), partition_of(layer.bias)
        layer.bias.data.copy_(local_slice(bias, cut, rank, world) if cut else bias)
    x = _numbers(2, 3, 2, IN)
    if options.get("input_is_parallel"):
        x = local_slice(x, Partition(2, layer.stride), rank, world)
    x.requires_grad_()
    y = layer(x)
    grad = _numbers(3, 3, 2, OUT)
    if options.get("gather_output") is False:
        grad = local_slice(grad, Partition(2, layer.stride), rank, world)
    y.backward(grad)
    result = {"y": y.detach(), "weight": layer.weight.detach(), "dx": x.grad, "dw": layer.weight.grad}
    if layer.bias is not None:
        result["db"] = layer.bias.grad
    return {name: value for name, value in result.items() if value is not None}


def _twin(bias: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    weight = torch.empty(OUT, IN)
    _draw(weight)
    weight.requires_grad_()
    x, b = _numbers(2, 3, 2, IN).requires_grad_(), _numbers(1, OUT).requires_grad_()
    y = F.linear(x, weight, b if bias else None)
    y.backward(_numbers(3, 3, 2, OUT))
    assert x.grad is not None and weight.grad is not None
    result = {"y": y.detach(), "weight": weight.detach(), "dx": x.grad, "dw": weight.grad}
    return result | ({"db": b.grad} if b.grad is not None else {})


LAYERS = [(kind, {option: given, "stride": stride, "bias": bias})
          for kind, option, strides in (("column", "gather_output", (1, 3)), ("row", "input_is_parallel", (1, 2)))
          for given in (True, False) for stride in strides for bias in (True, False) if bias or stride == 1]


@pytest.mark.parametrize("world", WORLDS)
def test_split_linear_layers_equal_their_dense_twins(world: int) -> None:
    by_rank = run_ranks(_run_layers, world)
    for (kind, options), *pieces in zip(LAYERS, *by_rank, strict=True):
        stride = options["stride"]
        cuts: dict[str, Partition] = {"weight": Partition(0 if kind == "column" else 1, stride)}
        cuts["dw"] = cuts["weight"]
        if kind == "column":
            cuts["db"] = Partition(0, stride)
            if not options["gather_output"]:
                cuts["y"] = Partition(2, stride)
        elif options["input_is_parallel"]:
            cuts["dx"] = Partition(2, stride)
        for name, expected in _twin(options["bias"]).items():
            found = [piece[name] for piece in pieces]
            for value in [join_local_slices(found, cuts[name])] if name in cuts else found:
                if name == "weight":
                    assert torch.equal(value, expected), "initial weights depend on the layout"
                else:  # sums of 16 to 24 products of order 1, added in another order
                    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5,
                                               msg=lambda text: f"{name} of {kind}, {options}: {text}")


@on_ranks(2)
def test_a_skipped_bias_is_the_one_to_add(rank: int, world: int) -> None:
    tp = build(world).tp
    with pytest.raises(ParallelError, match="output 7 is not divisible by 2"):
        ColumnParallelLinear(4, 7, tp=tp)
    for layer in (ColumnParallelLinear(4, 6, skip_bias_add=True, tp=SOLO),
                  ColumnParallelLinear(4, 6, skip_bias_add=True, tp=tp, stride=3),
                  RowParallelLinear(4, 6, skip_bias_add=True, tp=tp)):
        assert layer.bias is not None
        layer.bias.data.normal_()
        y, bias = layer(x := _numbers(0, 2, 4))
        layer.skip_bias_add = False
        torch.testing.assert_close(y + bias, layer(x))


VOCAB, PADDED, DIM = 10, 16, 8
TOKENS = torch.tensor([[0, 3, 4, 9], [7, 8, 3, 3]])


def _embedding(tp: Group, kind: str) -> VocabParallelEmbedding | ParallelEmbedding:
    torch.manual_seed(6)
    if kind == "vocab":
        return VocabParallelEmbedding(VOCAB, DIM, _draw, padded_size=PADDED, tp=tp)
    return ParallelEmbedding(VOCAB, DIM, _draw, tp=tp)


def _run_embedding(rank: int, world: int, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    layer = _embedding(build(world).tp if world > 1 else SOLO, kind)
    y = layer(TOKENS)
    y.backward(_numbers(4, 2, 4, DIM))
    return y.detach(), layer.weight.detach(), layer.weight.grad


@pytest.mark.parametrize("kind, world", [("vocab", 1), ("vocab", 4), ("features", 2)])
def test_a_split_embedding_equals_its_dense_twin_bit_for_bit(kind: str, world: int) -> None:
    torch.manual_seed(6)
    table = torch.empty(VOCAB, DIM)
    _draw(table)
    table.requires_grad_()
    expected = F.embedding(TOKENS, table)
    expected.backward(_numbers(4, 2, 4, DIM))
    assert table.grad is not None
    results = run_ranks(_run_embedding, world, kind)
    for y, _, _ in results:
        assert torch.equal(y, expected)
    cut = Partition(0 if kind == "vocab" else 1)
    for whole, dense in ((join_local_slices([weight for _, weight, _ in results], cut), table),
                         (join_local_slices([grad for *_, grad in results if grad is not None], cut), table.grad)):
        assert torch.equal(whole[:VOCAB], dense)
        assert not whole[VOCAB:].any(), "a padding row is not zero"


@pytest.mark.skipif(device.FORCE_ACCELERATOR_PATH,
                    reason="an accelerator would have to stop to look at the ids; the data layer does")
def test_a_token_outside_the_vocabulary_is_refused_by_its_id() -> None:
    for token in (-1, VOCAB, PADDED):
        with pytest.raises(ParallelError, match=f"token id {token} is outside the vocabulary 0..9"):
            _embedding(SOLO, "vocab")(torch.tensor([1, token]))


def test_parameters_say_how_they_are_split() -> None:
    column, row = ColumnParallelLinear(6, 6, stride=3, tp=SOLO), RowParallelLinear(6, 6, tp=SOLO)
    table = _embedding(SOLO, "vocab")
    assert partition_of(column.weight) == Partition(0, 3) and partition_of(row.weight) == Partition(1)
    assert partition_of(table.weight) == Partition(0, 1, VOCAB)
    assert row.bias is not None and partition_of(row.bias) is None and partition_of(torch.zeros(1)) is None
    weight: Any = column.weight
    assert (weight.model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 3)
    bias: Any = row.bias
    assert not bias.tensor_model_parallel


def test_the_master_weight_is_kept_for_tests_and_the_meta_device_draws_nothing() -> None:
    layer = ColumnParallelLinear(4, 6, keep_master_weight_for_test=True, tp=SOLO)
    assert layer.master_weight is not None and torch.equal(layer.master_weight, layer.weight)
    before = torch.get_rng_state()
    assert RowParallelLinear(4, 6, tp=SOLO, device="meta").weight.is_meta
    assert torch.equal(before, torch.get_rng_state())


def test_products_of_few_rows_are_those_of_torch() -> None:
    for dtype, rows, bias, accelerator in product((torch.float32, torch.bfloat16, torch.float16),
                                                  (0, 1, 2, 7, 8, 16, 17, 64, 65), (False, True), (False, True)):
        made = torch.Generator().manual_seed(rows)
        x, weight, b = (torch.randn(*shape, generator=made).to(dtype) for shape in ((rows, 96), (40, 96), (40,)))
        with torch.no_grad(), patch.object(F, "linear", wraps=F.linear) as plain, accelerator_side(accelerator):
            found = linear(x[:, None], weight, b if bias else None)
            assert plain.called == (accelerator or rows not in WEIGHT_FIRST_ROWS.get(dtype, ())), (dtype, rows)
        assert found.shape == (rows, 1, 40) and found.is_contiguous()
        expected = x.double() @ weight.double().t() + (b.double() if bias else 0)
        # sums of 96 products in fp32, rounded once (the bias may be added after): half a unit of the largest value,
        # twice
        unit = torch.finfo(dtype).eps * (1 if dtype != torch.float32 else 96)
        torch.testing.assert_close(found[:, 0].double(), expected, atol=unit * 40, rtol=unit)


def test_where_a_gradient_may_be_wanted_the_product_is_torchs() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    with patch.dict(WEIGHT_FIRST_ROWS, {torch.float32: range(1, 65)}):
        linear(torch.randn(1, 3), weight).sum().backward()
    assert weight.grad is not None


# ---- regions and the arithmetic of a split ---------------------------------------------------------------------------


def _values(rank: int, *shape: int) -> Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


@on_ranks(4)
def test_forward_and_backward_are_the_table(rank: int, world: int) -> None:
    tp = build(world).tp
    x = [_values(r, 3, 8) for r in range(world)]
    g = [_values(10 + r, 3, 8) for r in range(world)]
    g_wide = [_values(10 + r, 3, 8 * world) for r in range(world)]
    g_slim = [_values(10 + r, 3, 8 // world) for r in range(world)]
    for region, forward, backward in (
            (copy_to_region, x[rank], sum(g)), (reduce_from_region, sum(x), g[rank]),
            (scatter_to_region, x[rank].chunk(world, -1)[rank], torch.cat(g_slim, -1)),
            (gather_from_region, torch.cat(x, -1), g_wide[rank].chunk(world, -1)[rank]),
            (replicated_to_partial, x[rank] * (rank == 0), g[rank])):
        mine = x[rank].clone().requires_grad_()
        y = region(mine, tp)
        (grad,) = torch.autograd.grad(y, mine, _values(10 + rank, *y.shape))
        assert torch.equal(y, forward) and torch.equal(grad, backward), region
        assert region(x[0], SOLO) is x[0], "on a group of one a region is its argument"


@on_ranks(4)
def test_positions_are_gathered_and_scattered_as_the_table_says(rank: int, world: int) -> None:
    tp = build(world).tp
    share, whole = [_values(r, 3, 2, 5) for r in range(world)], [_values(10 + r, 3, 8, 5) for r in range(world)]
    gathered = torch.cat([one.flatten(0, 1) for one in share]).view(3, 8, 5)
    scattered = torch.stack(whole).sum(0).flatten(0, 1).chunk(world)[rank].view(3, 2, 5)
    for accelerator in (False, True):
        with accelerator_side(accelerator):
            for region, x, forward, grad, backward in (
                    (gather_from_sequence_region, share, gathered, whole, scattered),
                    (reduce_scatter_to_sequence_region, whole, scattered, share, gathered)):
                mine = x[rank].clone().requires_grad_()
                y = region(mine, tp)
                assert torch.equal(y, forward) and torch.equal(torch.autograd.grad(y, mine, grad[rank])[0], backward)


@on_ranks(2)
def test_a_skipped_bias_of_split_positions_has_the_gradient_of_all(rank: int, world: int) -> None:
    layer = RowParallelLinear(4, 6, input_is_parallel=True, skip_bias_add=True, sequence_parallel=True,
                              tp=build(world).tp)
    y, bias = layer(_numbers(rank, 3, 4, 2))
    assert y.shape == (3, 2, 6) and layer.bias is not None
    (y + bias).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((6,), 12.0)), "3 x 4 positions"


@on_ranks(2)
def test_a_reduction_leaves_saved_tensors_and_sibling_gradients_alone(rank: int, world: int) -> None:
    tp = build(world).tp
    a = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    reduce_from_region(torch.tanh(a), tp).sum().backward()  # tanh keeps its output for backward
    z, b = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    gradient = torch.tensor([1.0, 2.0, 3.0])
    (z + copy_to_region(b, tp)).backward(gradient.clone())  # one gradient, two receivers
    assert a.grad is not None and z.grad is not None and b.grad is not None
    torch.testing.assert_close(a.grad, 1 - a.detach().tanh().square())
    assert torch.equal(z.grad, gradient) and torch.equal(b.grad, gradient * world)


def test_split_along_the_last_dimension() -> None:
    parts = split_tensor_along_last_dim(torch.arange(12).view(2, 6), 3, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(part.is_contiguous() for part in parts)
    with pytest.raises(ParallelError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(torch.zeros(2, 6), 4)


def test_ranges_cover_the_length_once() -> None:
    for parts, length in ((1, 7), (2, 8), (4, 8), (3, 0)):
        ranges = [split_range(rank, parts, length) for rank in range(parts)]
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(length))


def test_padded_vocabulary_is_the_smallest_that_fits() -> None:
    for tp in (1, 2, 4):
        size = pad_vocab(50257, 128, tp)
        assert size % (128 * tp) == 0 and 0 <= size - 50257 < 128 * tp
        assert pad_vocab(size, 128, tp) == size


def test_every_rank_is_in_one_group_of_each_kind_and_they_meet_once() -> None:
    for world, tp in ((1, 1), (6, 3), (8, 8), (12, 4)):
        tp_groups, dp_groups = rank_grid(world, tp)
        for groups in (tp_groups, dp_groups):
            assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(len(set(a) & set(b)) == 1 for a in tp_groups for b in dp_groups)


def test_an_impossible_split_is_refused_with_both_numbers() -> None:
    for world, tp in ((4, 3), (2, 4), (4, 0)):
        with pytest.raises(ParallelError, match=f"{tp}.*{world}"):
            rank_grid(world, tp)
    with pytest.raises(ParallelError, match="heads 7 .* 2"):
        divide(7, 2, "heads")


def test_slices_join_to_the_whole_and_stride_gives_each_rank_a_slice_of_each_part() -> None:
    full = torch.arange(24 * 16).view(24, 16)
    for partition in (Partition(0), Partition(1), Partition(0, 3), Partition(1, 2)):
        for tp in (1, 2, 4):
            pieces = [local_slice(full, partition, rank, tp) for rank in range(tp)]
            assert torch.equal(join_local_slices(pieces, partition), full)
    qkv = torch.tensor([0, 1, 10, 11, 20, 21])
    assert local_slice(qkv, Partition(0, 3), 1, 2).tolist() == [1, 11, 21]
