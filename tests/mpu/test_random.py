"""Initial weights: any run of any part of a tensor is the same numbers as in the whole, and the numbers are normal.
Random streams: separate where they must be, the same where they must be, and restored exactly."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from mpu import weight_init
from mpu.groups import Group, Groups, build
from mpu.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from mpu.partition import join_local_slices, partition_of
from mpu.random import (MODEL_PARALLEL_STREAM, RngTracker, capture_rng, get_cuda_rng_tracker, get_rng_tracker,
                        model_parallel_cuda_manual_seed, restore_rng)
from mpu.split import ParallelError, Partition
from mpu.weight_init import (ConstantInitializer, CounterRNGInit, NormalInitializer, StridedSegments, fill_normal_rows,
                             fill_uniform, rng_key, strided_segments_of)
from tests.distributed import run_ranks

KEY = rng_key(1234, "blocks.0.attn.qkv.weight")


def whole(numel: int) -> Tensor:
    out = torch.empty(numel)
    NormalInitializer(KEY, 1.0, StridedSegments(numel, numel, 0))(out, 0)
    return out


def bits_of(counter: int) -> int:
    """By Python's own integers."""
    z = (KEY + counter * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor % 2**64
    return z ^ z >> 31


def by_definition(numel: int) -> Tensor:
    numbers = []
    for place in range(numel):
        group, lane = divmod(place, 8)
        bits = bits_of(4 * group + lane % 4)
        low, high = ((half + 2**31) % 2**32 - 2**31 for half in (bits % 2**32, bits >> 32))
        radius, angle = math.sqrt(-2 * math.log(high / 2**32 + 0.5)), low / 2**32 * 2 * math.pi
        numbers.append(radius * (math.sin if lane >= 4 else math.cos)(angle))
    return torch.tensor(numbers)


def test_the_numbers_are_those_of_the_definition() -> None:
    # fp32 arithmetic: the logarithm near 1 and the angle carry a relative error of some 2**-24 each.
    torch.testing.assert_close(whole(2000), by_definition(2000), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("block", [64, 1 << 17])
def test_any_run_and_any_rows_are_those_of_the_whole(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, rng = whole(5000), random.Random(1)
    monkeypatch.setattr(weight_init, "CPU_BLOCK", block)
    for _ in range(100):
        start = rng.randrange(5000)
        out = torch.empty(rng.randrange(5001 - start))
        NormalInitializer(KEY, 1.0, StridedSegments(5000, 5000, 0))(out, start)
        assert torch.equal(out, expected[start : start + len(out)])
    for stride in (64, 24, 25, 31):
        for start, width in ((0, stride), (3, 8), (7, stride - 5), (16, 1)):
            out = torch.empty(20, width)
            fill_normal_rows(out, KEY, start, stride)
            rows = [expected[start + i * stride : start + i * stride + width] for i in range(20)]
            assert torch.equal(out, torch.stack(rows))


def normal(out: Tensor, start: int, segments: StridedSegments) -> None:
    NormalInitializer(KEY, 2.0, segments)(out, start)


def uniform(out: Tensor, start: int, segments: StridedSegments) -> None:
    fill_uniform(out, KEY, start, segments)


CUTS = [((48, 10), Partition(0)), ((48, 10), Partition(0, stride=3)), ((10, 48), Partition(1)),
        ((6, 20), Partition(1)), ((16, 6), Partition(0, size=13)), ((7, 5), None)]


def test_parts_of_ranks_are_slices_of_one_tensor() -> None:
    for (shape, partition), tp, draw in product(CUTS, (1, 2, 4), (normal, uniform)):
        assert_slices_of_one_tensor(shape, partition, tp, draw)


def assert_slices_of_one_tensor(shape: tuple[int, ...], partition: Partition | None, tp: int,
                                draw: Callable[[Tensor, int, StridedSegments], None]) -> None:
    parts = []
    for rank in range(tp):
        local = list(shape)
        if partition is not None:
            local[partition.dim] //= tp
        segments = strided_segments_of(tuple(local), partition, rank, tp)
        draw(flat := torch.empty(math.prod(local)), 0, segments)
        for start, count in ((0, 3), (5, 17), (len(flat) - 4, 4)):
            draw(run := torch.empty(count), start, segments)
            assert torch.equal(run, flat[start : start + count])
        parts.append(flat.view(local))
    joined = parts[0] if partition is None else join_local_slices(parts, partition)
    rows = shape[0] if partition is None or partition.size is None else partition.size
    numel = rows * shape[1]
    draw(expected := torch.empty(numel), 0, StridedSegments(numel, numel, 0))
    assert torch.equal(joined[:rows], expected.view(rows, shape[1]))
    assert not joined[rows:].any()


@pytest.mark.parametrize("make", [
    lambda **given: ColumnParallelLinear(16, 24, stride=3, **given), lambda **given: RowParallelLinear(24, 16, **given),
    lambda **given: VocabParallelEmbedding(13, 8, padded_size=16, **given),
    lambda **given: ParallelEmbedding(10, 16, **given)], ids=["column", "row", "vocabulary", "embedding"])
def test_a_layer_draws_its_slice(make: Callable[..., torch.nn.Module]) -> None:
    layers = [make(init_method=CounterRNGInit(KEY, 0.5), tp=Group(rank, 2, (0, 1))) for rank in range(2)]
    alone = make(init_method=CounterRNGInit(KEY, 0.5), tp=Group(0, 1, (0,)))
    partition = partition_of(alone.weight)
    assert partition is not None
    assert torch.equal(join_local_slices([layer.weight.detach() for layer in layers], partition), alone.weight)
    later = make(init_method=CounterRNGInit(KEY, 0.5, deferred=True), tp=Group(1, 2, (0, 1)))
    assert later.weight.shape == layers[1].weight.shape and later.weight.untyped_storage().nbytes() == 4
    source, flat = weight_init.initializer_of(later.weight), torch.empty(later.weight.numel())
    assert source is not None
    source(flat, 0)
    assert torch.equal(flat.view(later.weight.shape), layers[1].weight)


def test_keys_tell_seeds_and_names_apart() -> None:
    keys = {rng_key(seed, name) for seed in (1, 11) for name in ("1/a", "/a", "a")}
    assert len(keys) == 6
    out = torch.empty(3)
    ConstantInitializer(2.5)(out, 7)
    assert out.tolist() == [2.5] * 3


def test_uniform_numbers_are_those_of_the_definition() -> None:
    n = 1000
    uniform(found := torch.empty(n), 0, StridedSegments(n, n, 0))
    assert found.tolist() == [(bits_of(place) >> 40) / 2**24 for place in range(n)]


# ---- random streams --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _same_streams_after() -> Iterator[None]:
    state = capture_rng()
    yield
    restore_rng(state)


def _draw() -> list[float]:
    """From the device the tracker steers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.rand(4, device=device).tolist()


def test_a_fork_draws_from_its_own_stream_and_leaves_the_default_alone() -> None:
    tracker = RngTracker()
    torch.manual_seed(1)
    tracker.add("a", 7)
    first, second = _draw(), _draw()
    torch.manual_seed(1)
    before = _draw()
    with pytest.raises(KeyError), tracker.fork("a"):
        forked = _draw()
        raise KeyError  # also then the default stream is put back
    states = tracker.get_states()
    with tracker.fork("a"):
        continued = _draw()
    tracker.set_states(states)
    with tracker.fork("a"):
        assert _draw() == continued
    assert [before, _draw()] == [first, second]
    torch.manual_seed(7)
    assert [forked, continued] == [_draw(), _draw()]


def test_a_name_or_seed_used_twice_is_refused() -> None:
    tracker = RngTracker()
    tracker.add("a", 7)
    with pytest.raises(ParallelError, match="seed 7"):
        tracker.add("b", 7)
    with pytest.raises(ParallelError, match="'a' already exists"):
        tracker.add("a", 8)
    with pytest.raises(ParallelError, match=r"no random stream 'c' among \['a'\]"), tracker.fork("c"):
        pass
    tracker.reset()
    tracker.add("a", 7)


def _streams(rank: int, world: int, vary: bool) -> tuple[list[float], list[float]]:
    model_parallel_cuda_manual_seed(1234, build(2), vary_over_dp=vary)
    with get_cuda_rng_tracker().fork(MODEL_PARALLEL_STREAM):
        tracked = _draw()
    return _draw(), tracked


@pytest.mark.parametrize("vary", [False, True])
def test_default_stream_is_shared_within_tp_and_the_tracked_one_is_not(vary: bool) -> None:
    default, tracked = zip(*run_ranks(_streams, 4, vary))
    assert default[0] == default[1] and default[2] == default[3]
    assert tracked[0] != tracked[1] and tracked[2] != tracked[3]
    assert (default[0] != default[2]) == vary and (tracked[0] != tracked[2]) == vary
    assert len({str(draw) for draw in default + tracked}) == (6 if vary else 3)
    torch.manual_seed(1234 + 2718 + 1)  # the classic seed of rank 1
    assert tracked[1] == _draw()


def _all_draws() -> list[object]:
    with get_rng_tracker().fork():
        tracked = _draw()
    return [random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(2).tolist(), _draw(), tracked]


def test_restored_streams_repeat_every_draw_and_hold_only_json_and_bytes() -> None:
    model_parallel_cuda_manual_seed(3, Groups())
    _all_draws()  # leaves a cached half of a pair in the gaussian streams
    state = capture_rng()
    drawn = _all_draws()
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    tracker = state["tracker"]
    assert isinstance(tracker, dict)
    assert all(tensor.dtype == torch.uint8 for tensor in [*tensors, *tracker.values()])
    plain = {name: value for name, value in state.items() if name in ("python", "numpy")}
    restore_rng({**state, **json.loads(json.dumps(plain))})
    assert _all_draws() == drawn
