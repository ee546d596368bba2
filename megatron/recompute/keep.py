"""What is kept of a chunk's inputs between forward and backward, and where: the memory of activation checkpointing.

Vocabulary
    part   what this rank keeps of an input, flat: all of it, or its share over tensor parallel, the last one padded
    home   where the part is kept: memory of its own or a row of one buffer, on the device or on the host

A `CheckpointInputStorage` is a pair of autograd's saved-tensor hooks. Recomputation saves its inputs, and nothing else, under them
(replay.py), so the input itself is free as soon as the model lets go of it. An input that is not split, moved or put
into a buffer is kept as it is; so are those that are not floating point (masks, positions). A split input must hold
the same values on every tensor parallel rank, as the inputs of blocks do.

What is kept lives as long as the graph that wants it back: a forward whose loss is dropped gives everything back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.tree import RecomputeConfig, require
from megatron.errors import ConfigError
from mpu.collectives import all_gather_into
from mpu.groups import SOLO, Group


class CheckpointInputStorage:
    """The kept inputs of one model, as its configuration says."""

    def __init__(self, config: RecomputeConfig, tp: Group = SOLO) -> None:
        self._group = tp if config.partition_activations else SOLO
        self._to_host = config.cpu_checkpointing
        rows = config.number_checkpoints if config.contiguous_memory_optimization else 0
        if rows is None:
            raise ConfigError("contiguous_memory_optimization needs number_checkpoints: how many chunks there are "
                              "between a forward and its backward")
        self._rows = rows
        self._buffers: dict[int, _ContiguousBuffer] = {}
        self._copy_stream: torch.cuda.Stream | None = None
        self._last_input: weakref.ref[_StoredInput] | None = None

    def save_chunk_inputs(self) -> saved_tensors_hooks:
        """A context: tensors that autograd saves inside are the arguments of one chunk, in order."""
        numbers = count()
        return saved_tensors_hooks(lambda x: self._pack(x, numbers), _unpack)

    def reset(self) -> None:
        """Release the buffers; what is still kept in them stays valid."""
        self._buffers.clear()

    def _pack(self, x: Tensor, numbers: Iterator[int]) -> Tensor | _StoredInput:
        moves = self._to_host and x.is_cuda
        # torch before 2.13 saves an empty tensor of its own beside the arguments.
        if not (x.is_floating_point() and x.numel()) or not (moves or self._rows or self._group.size > 1):
            return x
        each = -(-x.numel() // self._group.size)
        if self._rows:
            memory = self._buffer(next(numbers), each, x, moves).acquire_row()
        else:
            memory = _allocate_like((each,), x, moves)
        copy_stream, before = None, None
        if moves:
            copy_stream = self._copy_stream = self._copy_stream or torch.cuda.Stream(x.device)
            before = None if self._last_input is None else self._last_input()
        stored = _StoredInput(x.detach(), memory, self._group, copy_stream, before)
        self._last_input = weakref.ref(stored)
        return stored

    def _buffer(self, argument: int, each: int, x: Tensor, on_host: bool) -> _ContiguousBuffer:
        """The buffer of the n-th argument; one that is not in use may change its size."""
        found = self._buffers.get(argument)
        if found is None or not (found.is_used or found.fits(each, x.dtype)):
            found = self._buffers[argument] = _ContiguousBuffer(_allocate_like((self._rows, each), x, on_host))
        require(found.fits(each, x.dtype), f"{each} elements of {x.dtype} are to be kept of argument {argument} of a "
                f"chunk, in a buffer with rows of {found}: contiguous_memory_optimization needs inputs of one size; "
                "leave it out")
        return found


def _allocate_like(shape: tuple[int, ...], x: Tensor, on_host: bool) -> Tensor:
    """For values like those of x: beside it, or page-locked on the host."""
    return torch.empty(shape, dtype=x.dtype, device="cpu" if on_host else x.device, pin_memory=on_host)


class _ContiguousBuffer:
    """Rows of equal length; a row is free again when nothing refers to it."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used_rows: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __str__(self) -> str:
        return f"{self._memory.shape[1]} of {self._memory.dtype}"

    @property
    def is_used(self) -> bool:
        return bool(self._used_rows)

    def fits(self, numel: int, dtype: torch.dtype) -> bool:
        return self._memory.shape[1] == numel and self._memory.dtype == dtype

    def acquire_row(self) -> Tensor:
        rows = len(self._memory)
        free = next((row for row in range(rows) if row not in self._used_rows), None)
        if free is None:
            raise ConfigError(f"{rows} kept inputs wait for their backward, and number_checkpoints is {rows}: "
                              "raise it to the number of chunks between a forward and its backward")
        self._used_rows[free] = row = self._memory[free]
        return row


class _StoredInput:
    """One kept input: its part at home, and how to make it whole."""

    def __init__(self, x: Tensor, memory: Tensor, group: Group, copy_stream: torch.cuda.Stream | None,
                 previous: _StoredInput | None) -> None:
        self._shape, self._device, self._memory, self._group, self._copy_stream = x.shape, x.device, memory, group, copy_stream
        self._previous = None if previous is None else weakref.ref(previous)
        self._full_input: Tensor | None = None  # [ranks, part], while it is on its way back
        mine = x.reshape(-1)[group.rank * len(memory) : (group.rank + 1) * len(memory)]  # the last ones may be shorter
        self._copy_event = _copy_on_stream(memory[: len(mine)], mine, copy_stream)

    def start_fetch(self) -> Tensor:
        """Begin to bring the part to its place in the whole."""
        if self._full_input is None:
            self._full_input = self._memory.new_empty(self._group.size, len(self._memory), device=self._device)
            self._copy_event = _copy_on_stream(self._full_input[self._group.rank], self._memory, self._copy_stream)
        return self._full_input

    def restore(self) -> Tensor:
        """The input again, in memory of its own."""
        whole, self._full_input = self.start_fetch(), None
        if self._previous is not None and (before := self._previous()) is not None:
            before.start_fetch()  # backward asks for it next
        if self._copy_event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copy_event)
        all_gather_into(whole.view(-1), whole[self._group.rank], self._group).wait()
        return whole.view(-1)[: self._shape.numel()].view(self._shape)


def _unpack(stored: Tensor | _StoredInput) -> Tensor:
    return stored.restore() if isinstance(stored, _StoredInput) else stored


def _copy_on_stream(to: Tensor, source: Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """to <- source: at once, or on a lane, beside the computation; its event says when it is done."""
    if stream is None:
        to.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
    for tensor in (to, source):
        if tensor.is_cuda:
            tensor.record_stream(stream)  # its memory is not handed on before the copy is done
    event: torch.cuda.Event = stream.record_event()
    return event
