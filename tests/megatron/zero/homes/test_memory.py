"""Buffers begin a page, whatever they are made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zero.homes import memory
from megatron.zero.homes.blockfile import PAGE
from megatron.zero.homes.memory import aligned


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 3 * PAGE + 5, 3 << 20])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_buffer_begins_a_page_and_holds_what_is_put_there(nbytes, pinned):
    buffer = aligned(nbytes, pinned=pinned)
    assert (buffer.dtype, buffer.shape, buffer.data_ptr() % PAGE) == (torch.uint8, (nbytes,), 0)
    buffer.fill_(7)
    assert int(buffer.sum(dtype=torch.int64)) == 7 * nbytes


def test_nothing_needs_no_memory():
    assert aligned(0, pinned=False).shape == (0,)


@pytest.mark.parametrize("begins", [0, 64])
def test_on_a_gpu_machine_it_is_page_locked(monkeypatch, begins):
    def empty(count: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        asked.append(count)
        block = torch.zeros(count + 2 * PAGE, dtype=dtype)
        start = (begins - block.data_ptr()) % PAGE
        return block[start:start + count]

    asked: list[int] = []
    monkeypatch.setattr(memory, "_TOLD", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    buffer = aligned(3 * PAGE, pinned=True)
    assert (buffer.shape, buffer.data_ptr() % PAGE) == ((3 * PAGE,), 0)
    assert memory._TOLD == []
    assert asked[0] == 3 * PAGE, "torch rounds up to a power of two: nothing may be added to one"


def test_where_no_more_memory_can_be_locked_one_line_says_so(monkeypatch, capfd):
    def refuse(*args: Any, **named: Any) -> None:
        raise RuntimeError("CUDA error: OS call failed\nand some advice")

    monkeypatch.setattr(memory, "_TOLD", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", refuse)
    for _ in range(3):
        buffer = aligned(PAGE, pinned=True)
        assert (buffer.shape, buffer.data_ptr() % PAGE) == ((PAGE,), 0)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be page-locked (CUDA error: OS call failed)" in said and "ulimit -l" in said


def test_memory_that_cannot_be_had_is_called_that(monkeypatch):
    def refuse(*args: Any, **named: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="can't allocate memory: 8192 bytes"):
        aligned(2 * PAGE, pinned=False)


def test_a_forked_child_does_not_get_it():
    """Or its parent would have to copy every page that it writes from then on."""
    buffer = aligned(3 << 20, pinned=False)
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(),
                        re.MULTILINE | re.DOTALL)
    flags = [flags.split() for begin, end, flags in ranges if int(begin, 16) <= buffer.data_ptr() < int(end, 16)]
    assert ["dc" in found for found in flags] == [True]  # "do not copy area on fork"
