"""A fault of storage or memory on one rank of two, anywhere in a save: both ranks end with the same line and exit code,
the one before is loaded, and the next save works. Calls of the system are replaced within the rank."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.checkpoint import safetensors_io, writer
from megatron.checkpoint.async_save import HostSnapshot
from megatron.checkpoint.pieces import LazyData, TensorPiece
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import verify_tag
from megatron.distributed import exit_codes
from megatron.errors import TrainerError
from mpu.groups import build
from mpu.split import Partition
from tests.distributed import run_ranks


@dataclass(frozen=True)
class Fault:
    """From the first call of `call` on a path with `where` in it, the victim gets an error."""

    victim: int
    call: str
    where: str
    number: int

    def __str__(self) -> str:
        return f"{self.victim}-{self.call}-{self.where}-{errno.errorcode[self.number]}"


STORAGE = [
    Fault(1, "write", "rank1.safetensors", errno.ENOSPC), Fault(0, "write", "rank0.json", errno.EDQUOT),
    Fault(0, "write", "manifest.json", errno.EIO), Fault(1, "write", "rank1.json", errno.EFBIG),
    Fault(1, "fsync", "rank1.safetensors", errno.EIO), Fault(0, "fsync", "shared.json", errno.ESTALE),
    Fault(0, "fsync", ".staging-global_step2", errno.EIO), Fault(1, "close", "rank1.json", errno.EIO),
    Fault(1, "open", "rank1.safetensors", errno.EACCES), Fault(0, "open", "config.json", errno.EROFS),
    Fault(0, "rename", ".staging-global_step2", errno.EIO), Fault(0, "mkdir", ".staging-global_step2", errno.EROFS),
    Fault(0, "rename", ".staging-global_step2", errno.ESTALE), Fault(1, "close", "rank1.safetensors", errno.EDQUOT),
]

AFTER_COMMIT = [Fault(0, "replace", ".latest.", errno.EIO), Fault(0, "fsync", ".latest.", errno.ENOSPC)]
"""The tag is there already: it may be found. The pointer file is staged, and so the old one stays whole."""


def path_of(first: Any) -> str:
    name = getattr(first, "name", first)
    return os.readlink(f"/proc/self/fd/{name}") if isinstance(name, int) else os.fspath(name)


def failing(real: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    def call(first: Any, *others: Any, **more: Any) -> Any:
        if fault.where in os.path.basename(path_of(first)):
            if fault.call == "close":
                real(first)
            raise OSError(fault.number, os.strerror(fault.number))
        return real(first, *others, **more)
    return call


class Closes:
    """A file whose close fails."""

    def __init__(self, file: Any, number: int) -> None:
        self._file, self._number = file, number

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        raise OSError(self._number, os.strerror(self._number))


def meeting(fault: Fault) -> Any:
    if fault.call == "close":
        def opened(path: Path, *others: Any, **more: Any) -> Any:
            file = open(path, *others, **more)
            return Closes(file, fault.number) if fault.where in path.name else file
        return mock.patch.object(safetensors_io, "open", opened, create=True)
    if fault.call == "open":
        return mock.patch.object(safetensors_io, "open", failing(open, fault), create=True)
    return mock.patch.object(os, fault.call, failing(getattr(os, fault.call), fault))


def save(rank: int, world_size: int, root: str, step: int, hold: Any = None, load: Any = None) -> None:
    data = torch.full((4,), float(rank)) if load is None else LazyData(4, torch.float32, load)
    piece = TensorPiece("w", "weight", (4,), Partition(0), rank, world_size, 0, data)
    writer.save(root, f"global_step{step}", pieces=[piece], rank_state={}, shared_state={}, config={}, hold=hold,
                layout={"tp": world_size, "dp": 1}, world=build().world, run_id="job", iteration=step)


def root_of(folder: Path, fault: Fault) -> Path:
    return folder / str((STORAGE + AFTER_COMMIT).index(fault))


def under(fault: Fault, rank: int, world_size: int, root: str) -> tuple[int, str]:
    """What the rank would leave with."""
    with ExitStack() as stack:
        if rank == fault.victim:
            stack.enter_context(meeting(fault))
        try:
            save(rank, world_size, root, 2)
        except TrainerError as error:
            failure = exit_codes.exit_reason_of(error)
            return failure.code, failure.text
    return 0, ""


def each_fault(rank: int, world_size: int, folder: str, faults: list[Fault]) -> list[tuple[int, str]]:
    found = []
    os.fsync = lambda descriptor: None  # no test can see what is on the platter
    for fault in faults:
        root = str(root_of(Path(folder), fault))
        save(rank, world_size, root, 1)
        found.append(under(fault, rank, world_size, root))
    return found


def test_a_fault_of_storage_on_one_rank_of_two_is_one_line_on_both_and_costs_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(each_fault, 2, str(tmp_path), STORAGE, timeout=60)
    assert first == second
    for fault, (code, text) in zip(STORAGE, first, strict=True):
        root = root_of(tmp_path, fault)
        assert code == 7 and text.startswith("--save: ") and f"{root}/" in text, (str(fault), text)
        assert text.count("cannot write") == 1 and "\n" not in text, (str(fault), text)
        assert f": {os.strerror(fault.number)}; " in text, (str(fault), text)
        expected = "global_step2" if fault.call == "rename" else fault.where
        assert expected in text, (str(fault), text)
        verify_tag(root, "global_step1")
        assert open_checkpoint(root, print_line=pytest.fail).tag == "global_step1", str(fault)
        assert not [name for name in os.listdir(root) if name.startswith(".")], str(fault)
    run_ranks(save, 2, str(root_of(tmp_path, STORAGE[0])), 3)
    assert open_checkpoint(root_of(tmp_path, STORAGE[0]), print_line=pytest.fail).tag == "global_step3"


def test_a_pointer_file_that_cannot_be_written_leaves_both_tags_whole(tmp_path: Path) -> None:
    first, second = run_ranks(each_fault, 2, str(tmp_path), AFTER_COMMIT, timeout=60)
    assert first == second
    for fault, (code, text) in zip(AFTER_COMMIT, first, strict=True):
        root = root_of(tmp_path, fault)
        assert code == 7 and text.startswith(f"--save: {root}/latest: cannot write: {os.strerror(fault.number)}"), text
        for step in (1, 2):
            verify_tag(root, f"global_step{step}")
        assert open_checkpoint(root, print_line=list).tag == "global_step2"


# ---- memory ---------------------------------------------------------------------------------------------------------


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
