"""The state that lasts between steps: masters, optimizer states, frozen weights, counters, module buffers.

`EngineState` is what checkpoints hold. An interrupted change is remembered: steps and saves are refused until a load.

`StateOffloader` implements `engine.offload_states()` and `reload_states()`: the engine's tensors lose their storage and
get a new one on reload; a user's view of a weight keeps the old storage. While weights are offloaded their parameters
are placeholders. State that is on the host or NVMe stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.optim.loss_scale import LossScaleState
from megatron.optim.rule import UpdateRule
from megatron.zero.bucket import FlatBucket, publish_masters
from megatron.zero.flat_buffers import BufferPool
from megatron.zero.hooks import Unit
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.moq import MoQState
from megatron.zero.offload.copy_streams import CopyEvent, CopyStreams, create_copy_streams
from megatron.zero.offload.direct_io import page_aligned_zeros
from megatron.zero.offload.storage import WEIGHT, StateSegment
from mpu.collectives import all_gather_json, broadcast_into
from mpu.groups import Group, Groups


def snapshot_module_buffers(module: nn.Module) -> Callable[[], None]:
    """A function that restores the buffers and their values: a forward may write to a buffer or replace it."""
    snapshot = [(part, name, buffer, None if buffer is None else buffer.detach().clone())
                for part in module.modules() for name, buffer in part._buffers.items()]

    @torch.no_grad()
    def restore() -> None:
        for part, name, buffer, values in snapshot:
            part._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)

    return restore


def broadcast_module_buffers(module: nn.Module, groups: Groups) -> None:
    """Broadcast the buffers from the first data parallel rank. (FlatBucket does the same for parameters.)"""
    for buffer in module.buffers() if not groups.dp.is_solo else ():
        values = buffer.contiguous()
        broadcast_into(values.view(-1).view(torch.uint8), 0, groups.dp).wait()  # bytes: not every dtype can be sent
        buffer.copy_(values)


class OffloadStateTypeEnum(str, Enum):
    """DeepSpeed's names of the states that can be offloaded."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, Enum):
    """DeepSpeed's names of the devices."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


OPTIM, MASTERS, LP_PARAMS, GRADS, GRAD_BUFFERS = (state.value for state in OffloadStateTypeEnum)


def parse_offload_states(include: object, device: object) -> list[str]:
    """Names of the states to offload; None means all. Accepts strings and members of DeepSpeed's or our enum. Raises
    ConfigError for an unknown state or another device than the host."""
    where, known = getattr(device, "value", device), [state.value for state in OffloadStateTypeEnum]
    if str(where) != OffloadDeviceEnum.cpu.value:
        raise ConfigError(f"offload_states: device is '{where}', and states can be offloaded to the host only: give "
                          "\"cpu\"")
    given = known if include is None else [include] if isinstance(include, str) else include
    if not isinstance(given, Collection):
        raise ConfigError(f"offload_states: include is a {type(include).__name__}; give a list of {', '.join(known)}")
    wanted = {str(getattr(state, "value", state)) for state in given}
    for name in wanted.difference(known):
        raise ConfigError(f"offload_states: unknown state {name!r}; known are {', '.join(known)}")
    return [state for state in known if state in wanted]


@dataclass
class _OffloadedStorage:
    """A host copy of one device storage."""

    tensors: list[tuple[Tensor, int, torch.Size]]
    """The flat tensors in the storage, each with its offset and size."""
    device: torch.device
    copy: Tensor
    copy_event: CopyEvent


class StateOffloader:
    """Offloads and reloads the states of one engine. No parameter may be gathered, and no collective may be running."""

    def __init__(self, buckets: Sequence[FlatBucket], buffer_pool: BufferPool, device: torch.device) -> None:
        self._buckets, self._buffer_pool, self._device = buckets, buffer_pool, device
        self._copy_streams = create_copy_streams(device)
        self._offloaded: dict[str, list[_OffloadedStorage]] = {}
        self._pinned_buffers: dict[int, list[Tensor]] = {}
        """Size in bytes -> pinned buffers for reuse: pinning takes longer than copying."""

    @property
    def frees_memory(self) -> bool:
        """The device has its own memory, apart from the host."""
        return self._copy_streams is not None

    def check_not_offloaded(self, what: str, *needed: str) -> None:
        """Raise ConfigError if one of the `needed` states (by default any) is offloaded."""
        for bucket in self._buckets:
            bucket.check_not_offloaded(what, *needed)

    def offload(self, states: Sequence[str], *, pinned: bool, non_blocking: bool) -> None:
        """Offload the states. If that fails (host memory), reload those of this call and raise."""
        if self._copy_streams is None:
            return
        new = [state for state in states if state not in self._offloaded]
        try:
            for state in new:
                self._offload_state(state, self._copy_streams, pinned and self._device.type == "cuda", non_blocking)
        except BaseException:
            self.reload(new)
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # so that other processes can use the memory

    def _offload_state(self, state: str, copy_streams: CopyStreams, pinned: bool, non_blocking: bool) -> None:
        if state in (GRADS, GRAD_BUFFERS):
            self._buffer_pool.clear()
            return
        device_tensors = [(bucket, tensors) for bucket in self._buckets
                          for tensors in _tensors_by_storage(bucket, state)]
        copies = self._offloaded.setdefault(state, []) if device_tensors else []
        for bucket, tensors in device_tensors:
            bucket.offloaded_states.add(state)
            if state == LP_PARAMS:
                bucket.begin_param_offload()
            storage, device = tensors[0].untyped_storage(), tensors[0].device
            copy = self._host_buffer(storage.nbytes(), pinned)
            copy_event = copy_streams.to_host.copy(copy, _byte_view(storage, device))
            copy_event.wait_on_device()  # the current stream waits: the copy is done before the memory is reused
            if not non_blocking:
                copy_event.wait_on_host()
            copies.append(_OffloadedStorage([(one, int(one.storage_offset()), one.shape) for one in tensors], device,
                                            copy, copy_event))
            for one in tensors:
                one.set_(torch.UntypedStorage(0, device=device))

    def _host_buffer(self, nbytes: int, pinned: bool) -> Tensor:
        reusable = self._pinned_buffers.get(nbytes) if pinned else None
        return reusable.pop() if reusable else page_aligned_zeros(nbytes, torch.uint8, pinned=pinned)

    def reload(self, states: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """Reload these states, by default all. If the device runs out of memory, the rest stays offloaded."""
        for state in [state for state in self._offloaded if states is None or state in states]:
            copies = self._offloaded[state]
            while copies:
                offloaded, streams = copies[-1], self._copy_streams
                assert streams is not None
                storage = torch.UntypedStorage(len(offloaded.copy), device=offloaded.device)
                copy_event = streams.to_device.copy(_byte_view(storage, offloaded.device), offloaded.copy,
                                                    [offloaded.copy_event])
                copy_event.wait_on_device()
                if not non_blocking:
                    copy_event.wait_on_host()
                for tensor, offset, size in offloaded.tensors:
                    tensor.set_(storage, offset, size, (1,))
                if offloaded.copy.is_pinned():
                    self._pinned_buffers.setdefault(len(offloaded.copy), []).append(offloaded.copy)
                copies.pop()
            for bucket in self._buckets:
                if state == LP_PARAMS:
                    bucket.end_param_offload()
                bucket.offloaded_states.discard(state)
            del self._offloaded[state]


def _tensors_by_storage(bucket: FlatBucket, state: str) -> Iterator[list[Tensor]]:
    """Yield the device tensors of a state, grouped by the storage they share."""
    if state == LP_PARAMS:
        if bucket.param_shard.is_on_device:
            yield [bucket.device_param_shard, *([] if bucket.params_are_sharded else [bucket.gathered_params])]
        return
    masters = [WEIGHT] if bucket.has_separate_masters else []
    for kind in masters if state == MASTERS else [one for one in bucket.master_state.kinds if one != WEIGHT]:
        if bucket.master_state.is_on_device:
            yield [bucket.master_state.view(kind)]


def _byte_view(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


@dataclass
class StepCounters:
    scaler: LossScaleState
    global_steps: int = 0  # optimizer steps, skipped ones included
    skipped_steps: int = 0
    micro_steps: int = 0
    optimizer_steps: int = 0  # steps since the optimizer states were reset: the bias corrections use this count

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that changed the weights; learning rate schedules count these."""
        return self.global_steps - self.skipped_steps


class EngineState:
    """The tensors of all buckets and the counters."""

    def __init__(self, units: Sequence[Unit], rule: UpdateRule, scaler: LossScaleState, world: Group, *,
                 loads_masters: bool) -> None:
        in_forward_order = [bucket for unit in units for bucket in unit.buckets]
        self.device = in_forward_order[0].device
        self.buckets = [bucket for bucket in in_forward_order if bucket.trainable]
        self.frozen_buckets = [bucket for bucket in in_forward_order if not bucket.trainable]
        self.all_buckets = [*self.buckets, *self.frozen_buckets]
        for bucket in self.buckets:
            bucket.master_state.add_kinds(rule.states)
        self.counters = StepCounters(scaler)
        self.moq: MoQState | None = None  # quantization in training, if configured
        self.unfinished_change: str | None = None
        """The operation that is writing to the tensors. If it stays set, it was interrupted (Ctrl-C, damaged file)."""
        self._rule, self._world, self._loads_masters = rule, world, loads_masters

    def check_no_unfinished_change(self) -> None:
        if self.unfinished_change is not None:
            raise ConfigError(
                f"an earlier {self.unfinished_change} ended half way, and some weights are new, others old: load "
                "a checkpoint with engine.load_checkpoint(), or end this run and resume the last one")

    @contextmanager
    def guard_state_change(self, what: str) -> Iterator[None]:
        """If the block raises, the state stays marked as incomplete: steps and saves are refused until a load. An
        earlier mark stays too."""
        before, self.unfinished_change = self.unfinished_change, self.unfinished_change or what
        yield
        self.unfinished_change = before

    # ---- tensors ------------------------------------------------------------------------------------------------

    def segments_to_save(self, kinds: tuple[str, ...], frozen: bool = True) -> Iterator[tuple[Slot, int, StateSegment]]:
        """Yield (slot, offset in the slot, segment) for the state that this rank writes. Together the ranks write each
        element once: replicas of a shard write a part of it each."""
        for bucket in self.all_buckets if frozen else self.buckets:
            layout, rank, shift = bucket.layout, bucket.shard_group.rank, 0
            if bucket.replica_group.size > 1:
                layout, rank = FlatLayout(bucket.layout.slots, bucket.replica_group.size), bucket.replica_group.rank
                shift = rank * layout.shard_numel
            for kind in kinds:
                for segment in layout.segments(rank) if kind in bucket.master_state.kinds else ():
                    yield segment.slot, segment.slot_offset, StateSegment(
                        bucket.master_state, kind, shift + segment.shard_offset, segment.count)

    def load_segments(self, names: Mapping[str, Collection[str]],
                      read: Callable[[str, Slot, int, Tensor], None]) -> None:
        """Call `read(kind, slot, offset, out)` for each segment of `names` (kind -> parameter names) on this rank.

        `publish_loaded` must follow. No parameter may be in use. A chunk that is overwritten completely is not read
        first: after an NVMe failure it may be unreadable."""
        self.unfinished_change = "load"
        for bucket in self.all_buckets:
            for chunk in bucket.master_state.chunks:
                for kind in names:
                    if kind in bucket.master_state.kinds:
                        self._load_chunk(bucket, kind, chunk, names[kind], read)

    def _load_chunk(self, bucket: FlatBucket, kind: str, chunk: slice, names: Collection[str],
                    read: Callable[[str, Slot, int, Tensor], None]) -> None:
        segments = list(bucket.layout.segments(bucket.shard_group.rank, chunk))
        reads = not all(segment.slot.name in names for segment in segments)
        with bucket.master_state.open(chunk, [kind], reads=reads, writes=True) as opened:
            values, end = opened[kind], 0
            for segment in segments:
                start = segment.shard_offset - chunk.start
                values[end:start] = 0  # padding
                end = start + segment.count
                if segment.slot.name in names:
                    read(kind, segment.slot, segment.slot_offset, values[start:end])
            values[end:] = 0
            if kind == WEIGHT and not self._loads_masters:
                values.copy_(values.to(bucket.param_shard.dtype))

    def publish_loaded(self) -> None:
        """Copy the loaded masters to the parameters on every rank. Collective."""
        publish_masters(self.all_buckets)
        self.unfinished_change = None

    # ---- counters -----------------------------------------------------------------------------------------------

    def scalar_state(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides tensors, as JSON values. Collective."""
        rule_scalars: dict[str, Any] = {}
        for scalars in all_gather_json(self._rule.scalars(), self._world):  # a rank has those of its own segments
            rule_scalars |= scalars
        counters = self.counters
        rounding = {} if self.moq is None else {"quantisation": self.moq.state_dict()}
        return {"global_steps": counters.global_steps, "skipped_steps": counters.skipped_steps,
                "micro_steps": counters.micro_steps, "optimizer_steps": counters.optimizer_steps, "rule": rule_scalars,
                "loss_scale": counters.scaler.scale, "clean_steps": counters.scaler.clean_steps,
                "hysteresis_left": counters.scaler.hysteresis_left, **rounding}

    def restore_scalar_state(self, saved: dict[str, Any]) -> None:
        """Restore the result of `scalar_state`. Collective with MoQ, because the weights are rounded again."""
        scaler = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])
        self.counters = StepCounters(scaler, saved["global_steps"], saved["skipped_steps"], saved["micro_steps"],
                                     saved["optimizer_steps"])
        self._rule.restore(saved["rule"])
        if self.moq is not None:
            self.moq.load_state_dict(saved.get("quantisation"), self.counters.applied_steps)
            publish_masters(self.buckets)

    def reset_optimizer_state(self) -> None:
        """Set the optimizer states to zero, and restart the bias corrections."""
        with self.guard_state_change("load"):
            for bucket in self.buckets:
                states = [kind for kind in bucket.master_state.kinds if kind != WEIGHT]
                for chunk in bucket.master_state.chunks if states else ():
                    with bucket.master_state.open(chunk, states, reads=False, writes=True) as opened:
                        for kind in states:
                            opened[kind].zero_()
        self.counters.optimizer_steps = 0
        self._rule.restore({})
