"""What is sent, and the accelerator's wire on CPU: helpers for tests of what travels between ranks.

    with accelerator_side(): ...            inside, CPU tensors take the accelerator's way (mpu/device.py)
    with counted() as sent: ...             `sent` grows by every operation that is handed to torch.distributed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import mpu.device


class Sent(NamedTuple):
    """One operation. `numel` counts what all ranks of it hold together where it gathers or scatters."""

    kind: str
    numel: int
    dtype: torch.dtype


OPERATIONS = {"all_gather_into_tensor": ("all_gather", 0), "all_gather_single": ("all_gather", 0),
              "reduce_scatter_tensor": ("reduce_scatter", 1), "reduce_scatter_single": ("reduce_scatter", 1),
              "all_reduce": ("all_reduce", 0), "broadcast": ("broadcast", 0), "P2POp": ("", 1)}
"""Name in torch.distributed -> (kind, which argument is counted); those that torch has."""


@contextmanager
def counted() -> Iterator[list[Sent]]:
    sent: list[Sent] = []

    def noted(kind: str, place: int, made: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            x = args[place]
            sent.append(Sent(kind or args[0].__name__, x.numel(), x.dtype))
            return made(*args, **kwargs)
        return operation

    with ExitStack() as stack:
        for name, (kind, place) in OPERATIONS.items():
            if (made := getattr(dist, name, None)) is not None:
                stack.enter_context(patch.object(dist, name, noted(kind, place, made)))
        yield sent


@contextmanager
def accelerator_side(value: bool = True) -> Iterator[None]:
    with patch.object(mpu.device, "FORCE_ACCELERATOR_PATH", value):
        yield
