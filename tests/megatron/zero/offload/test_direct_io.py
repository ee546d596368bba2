"""Host buffers begin at a page, are page-locked while somebody has them, and are not inherited by forked children."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron.zero.offload import direct_io
from megatron.zero.offload.direct_io import PAGE_SIZE, page_aligned_bytes, page_aligned_zeros


def memory_ranges() -> list[tuple[int, int, list[str]]]:
    """(begin, end, flags) of each mapping of this process."""
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(),
                       re.MULTILINE | re.DOTALL)
    return [(int(begin, 16), int(end, 16), flags.split()) for begin, end, flags in found]


class FakeCudaRuntime:
    def __init__(self) -> None:
        self.error = 0
        self.locked: dict[int, int] = {}
        self.synchronized: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        if any(begin <= address < end for begin, end, _ in memory_ranges()):  # before its memory is unmapped
            del self.locked[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}: not permitted"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCudaRuntime:
    runtime = FakeCudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronized.append)
    direct_io._warn_not_pinned.cache_clear()
    return runtime


def test_a_buffer_begins_at_a_page_and_is_zero(cuda: FakeCudaRuntime) -> None:
    for pinned, nbytes in product((False, True), (0, 1, PAGE_SIZE - 1, PAGE_SIZE, 3 * PAGE_SIZE + 5, 3 << 20)):
        buffer = page_aligned_bytes(nbytes, pinned=pinned)
        assert (buffer.dtype, buffer.shape, buffer.data_ptr() % PAGE_SIZE) == (torch.uint8, (nbytes,), 0)
        assert not buffer.any()
        buffer.fill_(7)
        assert int(buffer.sum(dtype=torch.int64)) == 7 * nbytes


def test_memory_is_page_locked_as_long_as_somebody_has_it(cuda: FakeCudaRuntime) -> None:
    """Nothing is rounded up to a power of two."""
    several = [page_aligned_zeros(PAGE_SIZE + 1, torch.bfloat16, pinned=True) for _ in range(3)]
    assert cuda.locked == {buffer.data_ptr(): 3 * PAGE_SIZE for buffer in several}
    part = several[1][7:9]
    del several
    assert len(cuda.locked) == 1 and cuda.synchronized == [3, 3], "a copy may be under way"
    del part
    assert not cuda.locked


def test_one_line_says_that_memory_cannot_be_locked(cuda: FakeCudaRuntime, capfd: pytest.CaptureFixture[str]) -> None:
    cuda.error = 800
    for _ in range(3):
        assert page_aligned_bytes(PAGE_SIZE, pinned=True).data_ptr() % PAGE_SIZE == 0
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be page-locked (error 800: not permitted)" in said and "ulimit -l" in said


def test_memory_that_cannot_be_allocated_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=f"can't allocate memory: {1 << 60} bytes"):
        page_aligned_bytes(1 << 60, pinned=False)


def test_a_forked_child_does_not_inherit_it() -> None:
    """Otherwise the parent would copy every page that it writes from then on."""
    buffer = page_aligned_bytes(3 << 20, pinned=False)
    assert ["dc" in flags for begin, end, flags in memory_ranges() if begin <= buffer.data_ptr() < end] == [True]
