"""Activation checkpointing: keeps the inputs of a chunk of blocks, and runs the chunk again in backward.

torch's non-reentrant checkpoint decides when. Added here: the RNG streams of tensor parallelism, so that dropout
replays exactly; storage of the inputs; synchronization and timing at chunk boundaries. Gradients are bit-equal to
those without checkpointing.

`CheckpointInputStorage` is a pair of saved-tensor hooks: it can shard inputs over tensor parallel, move them to the
host, or put them into one contiguous buffer. Other inputs (masks, positions) are kept as they are. A sharded
input must be equal on all tensor parallel ranks. Stored inputs live as long as the graph that needs them.

The functions below are `deepspeed.checkpointing`: one configuration for every `checkpoint` call of this process.

    recompute.configure(mpu, "ds_config.json", partition_activations=True)
    y = recompute.checkpoint(block, x, mask)

Before `configure` every switch is off. The trainer builds its own `Recomputation` instead.
"""

from __future__ import annotations

import difflib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.config import ds_json
from megatron.config.ds_keys import DS_KEYS
from megatron.config.schema import JsonKey
from megatron.config.tree import ParallelConfig, RecomputeConfig, flag_name, require
from megatron.errors import ConfigError
from megatron.model.gpt2 import run_in_order
from mpu import random
from mpu.collectives import all_gather_into
from mpu.groups import SOLO, Group, Groups
from mpu.parallel_state import tp_group_of


class CheckpointInputStorage:
    """Stores the inputs of a model's chunks: sharded, on the host or in contiguous buffers, as configured."""

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
        """A context in which autograd saves the arguments of one chunk, in order, and nothing else."""
        numbers = count()
        return saved_tensors_hooks(lambda x: self._pack(x, numbers), lambda stored: stored.restore()
                                   if isinstance(stored, _StoredInput) else stored)

    def reset(self) -> None:
        """Release the contiguous buffers; inputs that are still stored in them stay valid."""
        self._buffers.clear()

    def _pack(self, x: Tensor, numbers: Iterator[int]) -> Tensor | _StoredInput:
        moves = self._to_host and x.is_cuda
        # Before torch 2.13, checkpoint also saves an empty tensor.
        if not (x.is_floating_point() and x.numel()) or not (moves or self._rows or self._group.size > 1):
            return x
        each = -(-x.numel() // self._group.size)  # elements per rank, rounded up
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
        """The buffer of the n-th argument. It is allocated again for another size if no row is in use."""
        buffer = self._buffers.get(argument)
        if buffer is None or not (buffer.used_rows or buffer.fits(each, x.dtype)):
            buffer = self._buffers[argument] = _ContiguousBuffer(_allocate_like((self._rows, each), x, on_host))
        require(buffer.fits(each, x.dtype), f"{each} elements of {x.dtype} are to be kept of argument {argument} of a "
                f"chunk, in a buffer with rows of {buffer.memory.shape[1]} of {buffer.memory.dtype}: "
                "contiguous_memory_optimization needs inputs of one size; leave it out")
        return buffer


def _allocate_like(shape: tuple[int, ...], x: Tensor, on_host: bool) -> Tensor:
    """An empty tensor with the dtype of x, on its device or pinned on the host."""
    return torch.empty(shape, dtype=x.dtype, device="cpu" if on_host else x.device, pin_memory=on_host)


class _ContiguousBuffer:
    """Rows of equal length, in one allocation. A row becomes free when nothing refers to it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used_rows: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def fits(self, numel: int, dtype: torch.dtype) -> bool:
        return self.memory.shape[1] == numel and self.memory.dtype == dtype

    def acquire_row(self) -> Tensor:
        rows = len(self.memory)
        free = next((row for row in range(rows) if row not in self.used_rows), None)
        if free is None:
            raise ConfigError(f"{rows} kept inputs wait for their backward, and number_checkpoints is {rows}: "
                              "raise it to the number of chunks between a forward and its backward")
        self.used_rows[free] = row = self.memory[free]
        return row


class _StoredInput:
    """One stored input: this rank's part in `memory`, which `restore` gathers."""

    def __init__(self, x: Tensor, memory: Tensor, group: Group, copy_stream: torch.cuda.Stream | None,
                 previous: _StoredInput | None) -> None:
        self._shape, self._device, self._memory, self._group, self._copy_stream = (
            x.shape, x.device, memory, group, copy_stream)
        self._previous = None if previous is None else weakref.ref(previous)
        self._full_input: Tensor | None = None  # [ranks, part], between `start_fetch` and `restore`
        # [numel] -> [part]; the parts of the last ranks may be shorter
        mine = x.reshape(-1)[group.rank * len(memory) : (group.rank + 1) * len(memory)]
        self._copy_event = _copy_on_stream(memory[: len(mine)], mine, copy_stream)

    def start_fetch(self) -> Tensor:
        """Start to copy this rank's part into its row of the full input."""
        if self._full_input is None:
            self._full_input = self._memory.new_empty(self._group.size, len(self._memory), device=self._device)
            self._copy_event = _copy_on_stream(self._full_input[self._group.rank], self._memory, self._copy_stream)
        return self._full_input

    def restore(self) -> Tensor:
        """The full input, in new memory. Collective over tensor parallel."""
        whole, self._full_input = self.start_fetch(), None
        if self._previous is not None and (before := self._previous()) is not None:
            before.start_fetch()  # prefetch: backward restores it next
        if self._copy_event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copy_event)
        all_gather_into(whole.view(-1), whole[self._group.rank], self._group).wait()
        return whole.view(-1)[: self._shape.numel()].view(self._shape)


def _copy_on_stream(to: Tensor, source: Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """to <- source. With `stream` the copy is asynchronous, and the returned event marks its end."""
    if stream is None:
        to.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
    for tensor in (to, source):
        if tensor.is_cuda:
            tensor.record_stream(stream)  # the allocator must not reuse the memory before the copy is done
    event: torch.cuda.Event = stream.record_event()
    return event


class Recomputation:
    """Activation checkpointing of one model; stored inputs may be sharded over `tp`."""

    def __init__(self, config: RecomputeConfig, tp: Group = SOLO) -> None:
        self._input_storage = CheckpointInputStorage(config, tp)
        self._synchronizes = config.synchronize_checkpoint_boundary or config.profile_backward
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self._profiles = config.profile_backward
        self._timings: dict[str, tuple[float, int]] = {}  # what a chunk does -> seconds, times

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return function(*args, **kwargs), and recompute it in backward instead of storing its activations."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # `run` must not capture an argument: torch passes the tensors, and saves them through the storage's hooks.
        positional, names = len(args), tuple(kwargs)
        tracker, runs = random.get_rng_tracker(), count()
        streams = tracker.get_states()

        def run(*values: Any) -> Any:
            again = next(runs) > 0
            with tracker.replaying(streams) if again else nullcontext(), \
                    self._timed("again in backward" if again else "forward"):
                return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        with self._input_storage.save_chunk_inputs():
            return torch_checkpoint(run, *args, *kwargs.values(), use_reentrant=False)

    def reset(self) -> None:
        """Call it after a forward without a backward: releases the contiguous buffers."""
        self._input_storage.reset()

    def report(self) -> str:
        """The time of recomputation since the last report as a text; empty without `profile_backward`."""
        parts = [f"{what} {seconds / times * 1e3:.2f} ms x {times}" for what, (seconds, times) in self._timings.items()]
        self._timings.clear()
        return f" recomputation, each chunk | {' | '.join(parts)}" if parts else ""

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = self._time_at_boundary()
        try:
            yield
        finally:
            stop = self._time_at_boundary()
            if self._profiles:
                seconds, times = self._timings.get(what, (0.0, 0))
                self._timings[what] = seconds + stop - start, times + 1

    def _time_at_boundary(self) -> float:
        """The time in seconds; if configured, after synchronizing with the device."""
        if self._synchronizes:
            self._synchronize()
        return time.perf_counter()


def notes(config: RecomputeConfig, parallel: ParallelConfig, device: torch.device) -> list[str]:
    """One line for each switch that is on but has no effect on this device or with this tensor parallelism."""
    idle = {}
    if parallel.sequence_parallel or parallel.model_parallel_size == 1:
        idle["partition_activations"] = ("the tensor parallel size is 1" if parallel.model_parallel_size == 1
                                         else "--sequence-parallel has split the inputs")
    if device.type == "cpu":
        idle |= dict.fromkeys(("cpu_checkpointing", "synchronize_checkpoint_boundary"), "the device is the CPU")
    return [f" note: {flag_name(name)} has no effect: {why}" for name, why in idle.items()
            if config.checkpoint_activations and getattr(config, name)]


# ---- deepspeed.checkpointing ----------------------------------------------------------------------------------------


SECTION = "activation_checkpointing."


class HasModelParallelGroup(Protocol):
    """What `configure` needs of an mpu, such as our package `mpu`."""

    def get_model_parallel_group(self) -> dist.ProcessGroup | None: ...


class _ActiveRecomputation:
    """The configuration of this process."""

    config = RecomputeConfig()
    tp = SOLO
    recomputation = Recomputation(config)
    is_configured = False


def configure(mpu_: HasModelParallelGroup | None = None,
              deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
              partition_activations: bool | None = None, contiguous_checkpointing: bool | None = None,
              num_checkpoints: float | None = None, checkpoint_in_cpu: bool | None = None,
              synchronize: bool | None = None, profile: bool | None = None, *, mpu: HasModelParallelGroup | None = None,
              **misspelt: object) -> None:
    """Configure `checkpoint` from the section `activation_checkpointing` of a DeepSpeed file or dict; arguments
    override it. Without an mpu (`mpu_` is DeepSpeed's name, `mpu` ours) inputs are not sharded."""
    for name in misspelt:
        near = difflib.get_close_matches(name, signature(configure).parameters, n=1, cutoff=0.6)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ConfigError(f"recompute.configure has no argument {name}{hint}")
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": None if num_checkpoints is None else math.ceil(num_checkpoints),  # scripts divide layers
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile_backward": profile,
    }
    values: dict[str, Any] = {}
    if deepspeed_config is not None:
        keys = ds_json.read_ds_json(deepspeed_config, "deepspeed_config").keys
        rows = ((DS_KEYS[path], value) for path, value in keys.items() if path.startswith(SECTION))
        values = {row.field: value for row, value in rows if isinstance(row, JsonKey)}
    values |= {name: value for name, value in given.items() if value is not None}
    layout = mpu_ or mpu
    _ActiveRecomputation.tp = SOLO if layout is None else tp_group_of(layout)
    _set_config(RecomputeConfig(**values))
    _ActiveRecomputation.is_configured = True


def _set_config(config: RecomputeConfig) -> None:
    _ActiveRecomputation.config, _ActiveRecomputation.recomputation = config, Recomputation(
        config, _ActiveRecomputation.tp)


def is_configured() -> bool:
    return _ActiveRecomputation.is_configured


def reset() -> None:
    """Call it after a forward without a backward: releases the contiguous buffers."""
    _ActiveRecomputation.recomputation.reset()


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpoints per forward, which is the number of rows of a contiguous buffer."""
    _set_config(replace(_ActiveRecomputation.config, number_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set whether stored inputs are sharded over tensor parallel."""
    _set_config(replace(_ActiveRecomputation.config, partition_activations=partition_activation))


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed dropout. Ranks of the configured tensor parallel group get equal streams, except for sharded activations."""
    random.model_parallel_cuda_manual_seed(seed, Groups(tp=_ActiveRecomputation.tp))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed the RNG stream of sharded activations."""
    random.reseed_model_parallel_stream(seed, _ActiveRecomputation.tp)


def report() -> str:
    """The time of recomputation since the last report as a text; empty without `configure(profile=True)`."""
    return _ActiveRecomputation.recomputation.report()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), and recompute it in backward instead of storing its activations."""
    return _ActiveRecomputation.recomputation.checkpoint(function, *args, **kwargs)


get_cuda_rng_tracker = random.get_cuda_rng_tracker

non_reentrant_checkpoint = checkpoint  # `checkpoint` is non-reentrant too


def in_chunks(chunk: int, checkpoint: Callable[..., Any] = checkpoint) -> Callable[..., Tensor]:
    """A function for `GPT2.run_blocks` that checkpoints `chunk` blocks at a time; the last chunk may be shorter."""

    def run(blocks: Sequence[Callable[..., Tensor]], x: Tensor, *args: Any) -> Tensor:
        for start in range(0, len(blocks), chunk):
            x = checkpoint(partial(run_in_order, blocks[start : start + chunk]), x, *args)
        return x

    return run
