"""Checks before the model is built: free host memory, and free space and speed of the NVMe path.

    print(probe_nvme("/nvme", "--offload-optimizer-nvme-path", NvmeUsage("optimizer state", stored=..., ...)))

Without the memory check the kernel's OOM killer would end a process without a message. Bytes are those of all ranks of
a node. The probe file has no name.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from megatron import host_memory
from megatron.errors import ConfigError, StorageError, format_bytes
from megatron.zero.offload.direct_io import PAGE_SIZE, DirectIoFile, page_aligned_bytes
from megatron.zero.offload.swap_drive import check_nvme_path, create_unnamed_file, explain_create_error, free_space


def check_host_memory(needed: int, ranks: int, flags: str) -> None:
    """Raise ConfigError if the node's ranks, at `needed` bytes each, exceed the available host memory (if it is
    known)."""
    available = host_memory.available_bytes()
    if available is not None and needed * ranks > available:
        free_text = f"{host_memory.describe_owner('it')} has {available / 2**30:.1f} GiB available"
        raise ConfigError(f"{flags}: the {ranks} ranks of this node keep {needed * ranks / 2**30:.1f} GiB on the host, "
                          f"and {free_text}: use more nodes, or --offload-optimizer-device nvme")


PROBE_BLOCK_BYTES = 8 << 20
"""Bytes of one system call, the default of async_file.py; less if the probe is smaller."""

PROBE_SECONDS = 0.4
"""Of writing, and of reading."""

MAX_PROBE_BYTES = 256 << 20
"""Upper limit of the probe, besides what the run needs and a quarter of the free space: on some file systems freeing
space takes as long as writing it."""


@dataclass(frozen=True)
class NvmeUsage:
    """Bytes of state on NVMe, and bytes read and written in a step."""

    contents: str
    """Which state, for messages."""
    stored: int
    read: int
    written: int


def probe_nvme(nvme_path: str | os.PathLike[str], flag: str, usage: NvmeUsage, other_stored: int = 0) -> str:
    """Measure the drive in about a second; a line with its rates and the cost of a step. `other_stored`: bytes that the
    run needs in other folders of the drive. Raises ConfigError if the folder does not exist, StorageError if it is
    read-only, too small or broken."""
    path = check_nvme_path(nvme_path, flag)
    free = free_space(path)
    if free < usage.stored + other_stored:
        other = f" and {format_bytes(other_stored)} in other folders of that drive" if other_stored else ""
        raise StorageError(f"{flag} {path}: {format_bytes(free)} free, but this run needs {format_bytes(usage.stored)} "
                           f"there{other}; free space or choose another folder")
    try:
        read_rate, write_rate = measure_rates(path, min(MAX_PROBE_BYTES, free // 4, usage.stored))
    except OSError as error:
        raise StorageError(
            f"{flag} {path}: cannot write there and read back: {explain_create_error(error, path)}") from error
    seconds = usage.read / read_rate + usage.written / write_rate  # reads and writes share the drive
    return (f" nvme {path} for {usage.contents}: {format_bytes(free)} free, needs {format_bytes(usage.stored)}; reads "
            f"{format_bytes(read_rate)}/s, writes {format_bytes(write_rate)}/s: about {seconds:.3g} s of a step")


def measure_rates(path: Path, size: int) -> tuple[float, float]:
    """Read and write rate in bytes per second, with a probe of about `size` bytes in whole pages."""
    length = max(PAGE_SIZE, min(PROBE_BLOCK_BYTES, size) // PAGE_SIZE * PAGE_SIZE)
    block = page_aligned_bytes(length, pinned=False).numpy().data
    block[:] = os.urandom(length)  # a drive may compress
    disk = DirectIoFile(create_unnamed_file(path), 0)
    try:
        begin, end = time.perf_counter(), 0
        while end == 0 or (end + length <= size and time.perf_counter() - begin < PROBE_SECONDS):
            disk.write(block, end)
            end += length
        os.fsync(disk.descriptor)
        write_rate = end / (time.perf_counter() - begin)
        os.posix_fadvise(disk.descriptor, 0, end, os.POSIX_FADV_DONTNEED)  # if O_DIRECT was not available
        begin, at = time.perf_counter(), 0
        while at == 0 or (at < end and time.perf_counter() - begin < PROBE_SECONDS):
            disk.read(block, at)
            at += length
        return at / (time.perf_counter() - begin), write_rate
    finally:
        disk.close()
