"""What ranks say to each other beside their tensors: JSON, flags, errors, barriers, agreements.

It travels over gloo from host to host (`Group.control`), whatever carries the tensors: a message never waits behind a
kernel, takes no memory of the device, and still gets through where a device hangs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpu.groups import Group
from mpu.wire.interface import Op
from mpu.wire.native import REDUCE_OPS, start_all_gather
from mpu.wire.waits import track_collective


@track_collective
def all_reduce_scalar(number: float, group: Group, op: Op = "max") -> float:
    """The reduction of one number per rank, on the host of every rank (exact for integers below 2**53)."""
    value = torch.tensor([number], dtype=torch.float64)
    if not group.is_solo:
        dist.all_reduce(value, REDUCE_OPS[op], group=group.control_process_group)
    return float(value.item())


@track_collective
def all_reduce_min(numbers: Sequence[float], group: Group) -> list[float]:
    """Of each of some numbers the smallest that a rank gave: one exchange, however many they are. (The largest is what
    `least` has of their negatives, negated.)"""
    values = torch.tensor(numbers, dtype=torch.float64)
    if not group.is_solo:
        dist.all_reduce(values, REDUCE_OPS["min"], group=group.control_process_group)
    found: list[float] = values.tolist()
    return found


def barrier(group: Group) -> None:
    """Return when every rank has come here."""
    all_reduce_scalar(0.0, group)


@track_collective
def all_gather_json(value: Any, group: Group) -> list[Any]:
    """Every rank's value, by way of JSON: tuples come back as lists, and nothing on the wire can run code."""
    text = json.dumps(value).encode()
    if group.is_solo:
        return [json.loads(text)]
    sizes = torch.empty(group.size, dtype=torch.int64)
    start_all_gather(sizes, torch.tensor([len(text)]), group.control_process_group).wait()
    longest = int(sizes.max())
    rows = torch.empty(group.size * longest, dtype=torch.uint8)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    start_all_gather(rows, padded, group.control_process_group).wait()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows.split(longest), sizes.tolist())]


@track_collective
def broadcast_json(value: Any, group: Group, src: int = 0) -> Any:
    """The value of the group's rank `src` on every rank, by way of JSON; those of the others are not asked for."""
    text = json.dumps(value).encode() if group.rank == src else b""
    if group.is_solo:
        return json.loads(text)
    size = torch.tensor([len(text)])
    dist.broadcast(size, group.ranks[src], group=group.control_process_group)
    row = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
    dist.broadcast(row, group.ranks[src], group=group.control_process_group)
    return json.loads(text or row.numpy().tobytes())
