"""Random streams: separate where they must be, the same where they must be, and restored exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from mpu.groups import Groups, build
from mpu.random import (
    MODEL_PARALLEL_STREAM, RngTracker, capture_rng, get_cuda_rng_tracker, get_rng_tracker,
    model_parallel_cuda_manual_seed, restore_rng,
)
from mpu.split import ParallelError
from tests.distributed import run_ranks


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
