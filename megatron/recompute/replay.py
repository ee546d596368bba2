"""Activation checkpointing: run a function and keep only its inputs; in backward run it again.

torch's non-reentrant checkpoint decides when; it also restores the generators of the CPU and of the device. Added
here: the streams of the tensor parallel RNG tracker, so that dropout replays exactly, the memory of the inputs
(keep.py), and what happens at the borders of a chunk: waiting for the device, and the clock. Gradients are bit-equal
to those without checkpointing, whatever the switches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.config.tree import RecomputeConfig, flag_name
from megatron.recompute.keep import CheckpointInputStorage
from mpu.groups import SOLO, Group
from mpu.random import get_rng_tracker

SWITCHES = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary", "profile_backward")


class Recomputation:
    """The checkpointing of one model; `tp` is the group over which kept inputs may be split."""

    def __init__(self, config: RecomputeConfig, tp: Group = SOLO) -> None:
        self._input_storage = CheckpointInputStorage(config, tp)
        self._synchronizes = config.synchronize_checkpoint_boundary or config.profile_backward
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self._profiles = config.profile_backward
        self._timings: dict[str, tuple[float, int]] = {}  # what a chunk does -> seconds, times

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs), recomputed in backward instead of stored."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # `run` must not hold an argument: tensors are handed over by torch, which saves them under the keeper's hooks.
        positional, names = len(args), tuple(kwargs)
        streams, runs = get_rng_tracker().get_states(), count()

        def run(*values: Any) -> Any:
            with self._forward_rng_streams(streams) if next(runs) else self._timed("forward"):
                return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        with self._input_storage.save_chunk_inputs():
            return torch_checkpoint(run, *args, *kwargs.values(), use_reentrant=False)

    def reset(self) -> None:
        """After a forward without a backward: start over, with new buffers."""
        self._input_storage.reset()

    def report(self) -> str:
        """What recomputation cost since the last report, with `profile_backward`; otherwise nothing."""
        parts = [f"{what} {seconds / times * 1e3:.2f} ms x {times}" for what, (seconds, times) in self._timings.items()]
        self._timings.clear()
        return f" recomputation, each chunk | {' | '.join(parts)}" if parts else ""

    @contextmanager
    def _forward_rng_streams(self, streams: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the tracker's streams are those of the forward; afterwards they are what they were."""
        tracker = get_rng_tracker()
        present = tracker.get_states()
        tracker.set_states(streams)
        try:
            with self._timed("again in backward"):
                yield
        finally:  # torch leaves by an exception once it has what backward needs
            tracker.set_states(present)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = self._time_at_boundary()
        try:
            yield
        finally:
            stop = self._time_at_boundary()
            if self._profiles:
                seconds, times = self._timings.get(what, (0.0, 0))
                self._timings[what] = seconds + stop - start, times + 1

    def _time_at_boundary(self) -> float:
        """The time at a border of a chunk; if configured, after waiting for the device."""
        if self._synchronizes:
            self._synchronize()
        return time.perf_counter()


def notes(config: RecomputeConfig, tp_size: int, device: torch.device) -> list[str]:
    """One line for each switch that is on and does nothing in this run."""
    idle = {"partition_activations": "the tensor parallel size is 1"} if tp_size == 1 else {}
    if device.type == "cpu":
        idle |= dict.fromkeys(("cpu_checkpointing", "synchronize_checkpoint_boundary"), "the device is the CPU")
    if not config.checkpoint_activations:
        idle = dict.fromkeys(SWITCHES, "--checkpoint-activations is off")
    return [f" note: {flag_name(name)} has no effect: {why}" for name, why in idle.items() if getattr(config, name)]
