"""Activation checkpointing, put on blocks from outside: keep a chunk's input, run the chunk again in backward.

Dropout replays exactly: torch restores the generators of the CPU and the device, and this file the streams of the
tensor-parallel RNG tracker. Gradients are bit-equal to those without checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.model.gpt2 import run_in_order
from mpu.random import get_rng_tracker


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), recomputed in backward instead of remembered."""
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=_replay_tracker)


def _replay_tracker() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the forward and of the recomputation: the second starts from the tracker's streams of the first."""
    tracker = get_rng_tracker()
    states = tracker.get_states()

    @contextmanager
    def recomputation() -> Iterator[None]:
        present = tracker.get_states()
        tracker.set_states(states)
        try:
            yield
        finally:
            tracker.set_states(present)

    return nullcontext(), recomputation()


def in_chunks(chunk: int) -> Callable[..., Tensor]:
    """A way to run blocks (for `GPT2.run_blocks`) that checkpoints every `chunk` of them; the last chunk may be
    shorter."""

    def run(blocks: Sequence[nn.Module], x: Tensor, *args: Any) -> Tensor:
        for start in range(0, len(blocks), chunk):
            members = blocks[start : start + chunk]
            x = (
                checkpoint(partial(run_in_order, members), x, *args)
                if torch.is_grad_enabled()
                else run_in_order(members, x, *args)
            )
        return x

    return run
