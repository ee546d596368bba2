"""Whether a drive will do, before the model is built: room for what a run keeps there, and the time a step needs it.

    drive = examine("/nvme", keeps="optimizer state", needed=..., read_a_step=..., written_a_step=...,
                    flag="--offload-optimizer-nvme-path")
    print(drive)    ` nvme /nvme for optimizer state: 512 GB free, needs 38 GB; reads 3.1 GB/s, writes 1.9 GB/s: about
                    24.6 s of a step`

Bytes are those of all ranks of the node that share the drive. What a killed start left is gone once the ranks have
their swap folders: call it after that. The probe is a file without a name, which nothing can leave behind.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import StorageError
from megatron.zero.homes.blockfile import PAGE, BlockFile
from megatron.zero.homes.memory import aligned
from megatron.zero.homes.swapfolder import usable
from megatron.zero.homes.words import free_space, in_bytes, in_time, refusal

BLOCK = 8 << 20
"""Bytes of one system call, as tilefile.py makes them by default; fewer where the probe is smaller."""

SECONDS = 0.4
"""Of writing, and of reading."""

MOST = 256 << 20
"""Bytes of the probe, at most; and at most what the run needs, and a quarter of what is free: a file system may take as
long to give room back as a drive takes to fill it."""


@dataclass(frozen=True, kw_only=True)
class Drive:
    path: Path
    keeps: str
    """What of the run."""
    free: int
    needed: int
    read_rate: float
    """Bytes a second."""
    write_rate: float
    read_a_step: int
    written_a_step: int

    @property
    def seconds_a_step(self) -> float:
        """Reads and writes share the drive."""
        return self.read_a_step / self.read_rate + self.written_a_step / self.write_rate

    def __str__(self) -> str:
        return (f" nvme {self.path} for {self.keeps}: {in_bytes(self.free)} free, needs {in_bytes(self.needed)}; "
                f"reads {in_bytes(self.read_rate)}/s, writes {in_bytes(self.write_rate)}/s: "
                f"about {in_time(self.seconds_a_step)} of a step")


def examine(nvme_path: str | os.PathLike[str], *, keeps: str, needed: int, read_a_step: int, written_a_step: int,
            flag: str, beside: int = 0) -> Drive:
    """Takes about a second. `beside`: what the run needs in other folders of the drive. Raises ConfigError if there is
    no such folder, and StorageError if it is read-only, too small or broken."""
    path = usable(nvme_path, flag)
    free = free_space(path)
    if free < needed + beside:
        other = f" and {in_bytes(beside)} in other folders of that drive" if beside else ""
        raise StorageError(f"{flag} {path}: {in_bytes(free)} free, but this run needs {in_bytes(needed)} there{other}; "
                           "free space or choose another folder")
    try:
        read_rate, write_rate = _rates(path, min(MOST, free // 4, needed))
    except OSError as error:
        raise StorageError(f"{flag} {path}: cannot write there and read back: {refusal(error, path)}") from error
    return Drive(path=path, keeps=keeps, free=free, needed=needed, read_rate=read_rate, write_rate=write_rate,
                 read_a_step=read_a_step, written_a_step=written_a_step)


def _rates(path: Path, size: int) -> tuple[float, float]:
    """Of reading and of writing, by a probe of `size` bytes, in whole pages."""
    length = max(PAGE, min(BLOCK, size) // PAGE * PAGE)
    block = aligned(length, pinned=False).numpy().data
    block[:] = os.urandom(length)  # a drive may compress
    disk = BlockFile(_nameless(path), 0)
    try:
        begin, end = time.perf_counter(), 0
        while end == 0 or (end + length <= size and time.perf_counter() - begin < SECONDS):
            disk.write(block, end)
            end += length
        os.fsync(disk.descriptor)
        write_rate = end / (time.perf_counter() - begin)
        os.posix_fadvise(disk.descriptor, 0, end, os.POSIX_FADV_DONTNEED)  # where the page cache could not be passed
        begin, at = time.perf_counter(), 0
        while at == 0 or (at < end and time.perf_counter() - begin < SECONDS):
            disk.read(block, at)
            at += length
        return at / (time.perf_counter() - begin), write_rate
    finally:
        disk.close()


def _nameless(folder: Path) -> int:
    path = folder / f".probe-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return descriptor
