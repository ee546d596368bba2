"""Collectives as functions: a new tensor from an old one, as autograd and torch.compile want them.

They are torch's functional collectives, named by their process group, so a compiler sees one operation with a known
result where an asynchronous call with a handle would break its graph, and may move its end behind other work. The
backend does them: on the CPU too an all-reduce is gloo's, bit for bit that of gloo.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed._functional_collectives  # what the operations return without running them
from torch import Tensor

from mpu.groups import Group
from mpu.wire import waits
from mpu.wire.interface import Op
from mpu.wire.native import accumulation_dtype


def via_host(collective: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """By way of the host, where ranks that share an accelerator have met over gloo. It takes tensors of a GPU as well,
    but a run of two ranks with tensor parallelism was ended by SIGSEGV inside of it (torch 2.11)."""
    @wraps(collective)
    def run_on_host(x: Tensor, group: Group, *how: Any) -> Tensor:
        if x.device.type == "cpu" or not group.gpu_tensors_use_gloo:
            return collective(x, group, *how)
        return collective(x.cpu(), group, *how).to(x.device)

    return run_on_host


@via_host
def functional_all_reduce(x: Tensor, group: Group, op: Op) -> Tensor:
    return _wait_tensor(torch.ops._c10d_functional.all_reduce(x, op, group.group_name_for(x)))


@via_host
def functional_all_gather(x: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank -> [size * n, ...] in rank order."""
    return _wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size, group.group_name_for(x)))


@via_host
def functional_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """[size * n, ...] -> this rank's [n, ...] of the sum, which is taken in fp32 where x is narrower."""
    wide, name = x.to(accumulation_dtype(x.dtype)).contiguous(), group.group_name_for(x)
    return _wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(wide, "sum", group.size, name)).to(x.dtype)


def _wait_tensor(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.ops._c10d_functional.wait_tensor(x))
    waits.mark_waiting()
    arrived = torch.ops._c10d_functional.wait_tensor(x)
    waits.mark_idle()
    return cast(Tensor, arrived)
