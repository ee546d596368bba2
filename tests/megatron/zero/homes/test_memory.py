"""Buffers begin a page, whatever they are made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zero.offload import direct_io
from megatron.zero.offload.direct_io import PAGE_SIZE, page_aligned_bytes, page_aligned_zeros


def is_mapped(address: int) -> bool:
    """The kernel shows neighbours that are alike as one."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


class Cuda:
    """What the module asks of the CUDA runtime."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}
        self.waited_for: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        if is_mapped(address):
            del self.locked[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}: not permitted"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    runtime = Cuda()
    monkeypatch.setattr(direct_io, "_cudart", lambda: runtime)
    monkeypatch.setattr(direct_io, "_PIN_WARNINGS", [])
    monkeypatch.setattr(direct_io, "_clear_cuda_error", lambda: None)
    monkeypatch.setattr(direct_io, "_current_device", lambda: 3)
    monkeypatch.setattr(direct_io, "_synchronize", runtime.waited_for.append)
    return runtime


@pytest.mark.parametrize("nbytes", [1, PAGE_SIZE - 1, PAGE_SIZE, 3 * PAGE_SIZE + 5, 3 << 20])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_buffer_begins_a_page_and_holds_what_is_put_there(nbytes, pinned, cuda):
    buffer = page_aligned_bytes(nbytes, pinned=pinned)
    assert (buffer.dtype, buffer.shape, buffer.data_ptr() % PAGE_SIZE) == (torch.uint8, (nbytes,), 0)
    assert not buffer.any(), "new memory is zero"
    buffer.fill_(7)
    assert int(buffer.sum(dtype=torch.int64)) == 7 * nbytes


def test_nothing_needs_no_memory():
    assert page_aligned_bytes(0, pinned=False).shape == (0,)


def test_numbers_are_locked_as_long_as_somebody_has_them(cuda):
    """And CUDA is told before their memory goes; nothing is rounded up to a power of two."""
    found = page_aligned_zeros(PAGE_SIZE + 1, torch.bfloat16, pinned=True)
    assert (found.dtype, len(found), cuda.locked) == (torch.bfloat16, PAGE_SIZE + 1, {found.data_ptr(): 3 * PAGE_SIZE})
    part = found[7:9]
    del found
    assert cuda.locked
    assert not cuda.waited_for
    del part
    assert not cuda.locked and cuda.waited_for == [3], "a copy may be under way"


def test_one_beside_another_is_let_go_as_well(cuda):
    several = [page_aligned_zeros(PAGE_SIZE, torch.uint8, pinned=True) for _ in range(8)]
    assert len(cuda.locked) == 8
    while several:
        del several[len(several) // 2]
    assert not cuda.locked


def test_where_no_more_memory_can_be_locked_one_line_says_so(cuda, capfd):
    cuda.error = 800
    for _ in range(3):
        buffer = page_aligned_bytes(PAGE_SIZE, pinned=True)
        assert (buffer.shape, buffer.data_ptr() % PAGE_SIZE) == ((PAGE_SIZE,), 0)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be page-locked (error 800: not permitted)" in said and "ulimit -l" in said


def test_memory_that_cannot_be_had_is_called_that(monkeypatch):
    def refuse(*args: Any, **named: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(direct_io, "_HostMapping", refuse)
    with pytest.raises(MemoryError, match="can't allocate memory: 8192 bytes"):
        page_aligned_bytes(2 * PAGE_SIZE, pinned=False)


def test_a_forked_child_does_not_get_it():
    """Or its parent would have to copy every page that it writes from then on."""
    buffer = page_aligned_bytes(3 << 20, pinned=False)
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(),
                        re.MULTILINE | re.DOTALL)
    flags = [flags.split() for begin, end, flags in ranges if int(begin, 16) <= buffer.data_ptr() < int(end, 16)]
    assert ["dc" in found for found in flags] == [True]  # "do not copy area on fork"
