"""Lack of memory on one rank of two, anywhere in a save: both ranks end with the same line and exit code, and the save
before is loaded. Calls of the system are replaced within the rank. test_kill.py and test_broken_drives.py have the
faults of storage."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.checkpoint import writer
from megatron.checkpoint.async_save import HostSnapshot
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import LazyData, TensorPiece
from megatron.distributed import exit_codes
from megatron.errors import TrainerError
from mpu.groups import build
from mpu.split import Partition
from tests.distributed import run_ranks


def save(rank: int, world_size: int, root: str, step: int, hold: Any = None, load: Any = None) -> None:
    data = torch.full((4,), float(rank)) if load is None else LazyData(4, torch.float32, load)
    piece = TensorPiece("w", "weight", (4,), Partition(0), rank, world_size, 0, data)
    writer.save(root, f"global_step{step}", pieces=[piece], rank_state={}, shared_state={}, config={}, hold=hold,
                layout={"tp": world_size, "dp": 1}, world=build().world, run_id="job", iteration=step)


def no_tensor() -> torch.Tensor:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried "
                       "to allocate 8 bytes.\nmore of it")


def short_of_memory(kind: str, rank: int, world_size: int, root: str) -> tuple[int, str, bool]:
    lacks = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    hold = HostSnapshot(torch.device("cpu")).copy_tensors if kind == "copy" else None
    save(rank, world_size, root, 1)
    patches = {"map": (mmap, "mmap", lacks), "folder": (os, "mkdir", lacks), "rename": (os, "rename", lacks),
               "write": (os, "write", lacks), "object": (os, "fsync", MemoryError()),
               "copy": (torch, "empty", torch.OutOfMemoryError("CUDA out of memory. Tried 8 GiB"))}
    with ExitStack() as stack:
        if rank == victim_of(kind) and kind in patches:
            owner, name, error = patches[kind]
            stack.enter_context(mock.patch.object(owner, name, side_effect=error))
        try:
            save(rank, world_size, root, 2, hold, no_tensor if (kind, rank) == ("tensor", 1) else None)
        except TrainerError as error:
            failure = exit_codes.exit_reason_of(error)
            return failure.code, failure.text, failure.is_peer_loss
    return 0, "", False


def victim_of(kind: str) -> int:
    """Folder and rename are rank 0's work."""
    return 0 if kind in ("folder", "rename") else 1


MEMORY = ["map", "folder", "rename", "write", "object", "copy", "tensor"]


def each_shortage(rank: int, world_size: int, folder: str) -> list[tuple[int, str, bool]]:
    return [short_of_memory(kind, rank, world_size, str(Path(folder) / kind)) for kind in MEMORY]


def test_lack_of_memory_on_one_rank_is_told_as_memory_on_both_and_costs_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(each_shortage, 2, str(tmp_path), timeout=60)
    assert first == second
    for kind, (code, text, is_peer_loss) in zip(MEMORY, first, strict=True):
        assert (code, is_peer_loss) == (5, False), (kind, text)
        assert text.startswith(f"rank {victim_of(kind)} is out of memory, while saving global_step2: "), (kind, text)
        assert "cannot write" not in text and "--save" not in text and "\n" not in text
        assert open_checkpoint(tmp_path / kind, print_line=pytest.fail).tag == "global_step1"
