"""Random streams: named generator states, and capture of every stream of a process.

Dropout must be equal on all tensor-parallel ranks for replicated activations, and different for split ones. So there
are two streams: the *default* one, seeded equally within a tensor-parallel group, and a *tracked* one per rank, active
inside `with get_rng_tracker().fork():`. A stream is a state of the current device's generator (CUDA if available, else
CPU); each fork continues where the last one ended. Weights use the default CPU stream.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mpu.groups import Group, Groups
from mpu.parallel_state import current_groups
from mpu.split import ParallelError

MODEL_PARALLEL_STREAM = "model-parallel-rng"
_TP_SEED_OFFSET = 2718
# Distance between the seeds of data-parallel ranks, larger than any tp size plus the offset above.
_DP_SEED_STEP = 1 << 20


def _device_rng() -> Any:
    """The module with `manual_seed`, `get_rng_state` and `set_rng_state` of the current device's generator."""
    return torch.cuda if torch.cuda.is_available() else torch


class RngTracker:
    """Named streams of the device generator. Two streams never share a seed."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace the streams, also by names that were not added here (a resumed run)."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Start stream `name` at `seed`; the default stream is unchanged."""
        if seed in self._seeds:
            raise ParallelError(f"seed {seed} already has a stream: streams would repeat each other")
        if name in self._states:
            raise ParallelError(f"random stream {name!r} already exists: reset the tracker first")
        # A stream is the generator's state: seed it, keep the state, and put the default stream back.
        rng = _device_rng()
        before = rng.get_rng_state()
        rng.manual_seed(seed)
        self._states[name] = rng.get_rng_state()
        self._seeds.add(seed)
        rng.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Use stream `name` inside; afterwards the default stream continues. Nests for different names."""
        if name not in self._states:
            raise ParallelError(f"no random stream {name!r} among {sorted(self._states)}: add it first")
        rng = _device_rng()
        before = rng.get_rng_state()
        rng.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = rng.get_rng_state()
            rng.set_rng_state(before)

    @contextmanager
    def replaying(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """The streams have `states` inside, for a forward that runs again; afterwards their present ones."""
        present = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(present)


_TRACKER = RngTracker()  # the tracker of this process, one like the device generator


def get_rng_tracker() -> RngTracker:
    return _TRACKER


get_cuda_rng_tracker = get_rng_tracker  # megatron's name; without CUDA the tracker uses the CPU generator


def model_parallel_cuda_manual_seed(seed: int, groups: Groups | None = None, *, vary_over_dp: bool = False) -> None:
    """Seed the default device stream with `seed`, and the tracked stream with seed + 2718 + tp rank. As in Megatron,
    all data parallel ranks get the same dropout masks, unless `vary_over_dp`."""
    layout = current_groups() if groups is None else groups
    base = seed + (_DP_SEED_STEP * layout.dp.rank if vary_over_dp else 0)
    _TRACKER.reset()
    _device_rng().manual_seed(base)
    _TRACKER.add(MODEL_PARALLEL_STREAM, base + _TP_SEED_OFFSET + layout.tp.rank)


def reseed_model_parallel_stream(seed: int, tp: Group) -> None:
    """Restart the tracked stream at seed + tp rank; the default stream is unchanged."""
    with _TRACKER.fork():
        _device_rng().manual_seed(seed + tp.rank)


# -- capture: everything an exact resume needs ---------------------------------------------------------------------


def capture_rng() -> dict[str, object]:
    """The state of every stream of this process, as JSON values and uint8 tensors (nested dicts of them)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, object] = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "tracker": _TRACKER.get_states()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # reading the state would initialize CUDA
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, object]) -> None:
    """Restore every stream from `capture_rng`; ParallelError if the state has a CUDA stream and this process no GPU."""
    fields = cast("dict[str, Any]", state)
    version, words, gauss = fields["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = fields["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(fields["torch"])
    _TRACKER.set_states(fields["tracker"])
    if "cuda" in fields:
        if not torch.cuda.is_available():
            raise ParallelError("the state holds a CUDA stream and there is no CUDA device: resume on a GPU")
        torch.cuda.set_rng_state(fields["cuda"])
