"""FlatBucket: the flat buffers of one unit's parameters. Gathers and reshards them, and all-gathers updated ones.

    gathered_params  all parameters in the working precision; each `parameter.data` is a view of it
    param_shard      this rank's shard of them: a view, or the only permanent copy if parameters are sharded
    master_state     fp32 masters and optimizer states of the shard; the same object as `param_shard` if parameters are
                     fp32 on the device of the update
    grads            the gradients (gradients.py); frozen parameters have none
    shard_group      the ranks a bucket is sharded over; `replica_group`: the ranks with the same shard. One of the two
                     has one rank, unless states are sharded over a part of data parallel (hybrid sharding)

Buckets move data; pass_coordinator.py decides when, stages.py what is sharded. Each gather
allocates new storage and resharding drops only the engine's references: a tensor that a user kept stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.distributed.collective_log import NO_ENTRY, CollectiveLog
from megatron.errors import ConfigError
from megatron.zero.deferred_init import LazyInitParam, full_initial_value, init_chunk
from megatron.zero.flat_buffers import BucketingConfig, BufferPool
from megatron.zero.gradients import FlatGradients
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.offload.copy_streams import CopyEvent, GradOffloader
from megatron.zero.offload.storage import HOST, WEIGHT, DeviceShard, EngineStorage, Location, StoredShard
from megatron.zero.partitioned_param import (GatheredParamsSession, InPlaceWriteGuard, ParamOwner, full_shape,
                                             param_owner, replace_by_placeholder, set_param_data, set_param_owner)
from megatron.zero.stages import StagePolicy
from mpu.collectives import CollectiveWork, all_gather_into, broadcast_into
from mpu.device import on_accelerator
from mpu.groups import SOLO, Group, duplicate_group
from mpu.partition import partition_of
from mpu.weight_init import Initializer


class ShardState(Enum):
    SHARDED = "split: each rank has its shard"
    GATHERING = "on their way from the other ranks"
    GATHERED = "all here"


LEGAL_TRANSITIONS = {(ShardState.SHARDED, ShardState.GATHERING), (ShardState.GATHERING, ShardState.GATHERED),
                     (ShardState.GATHERED, ShardState.SHARDED),
                     (ShardState.GATHERED, ShardState.GATHERING)}  # the last one: all-gather after a step


def replace_params_by_placeholders(bucket: FlatBucket) -> None:
    """Replace sharded parameters by placeholders; using a placeholder raises an error."""
    for parameter in bucket.parameters:
        replace_by_placeholder(parameter, bucket.empty_param)


class ParamRounding(Protocol):
    """Rounds the parameters of a bucket (moq.py)."""

    def __call__(self) -> None:
        """Round this rank's parameter shard. Collective."""

    def round_masters(self, chunk: slice, masters: Tensor) -> Tensor:
        """The rounded values of one chunk of the masters, as last written to the parameters."""


class FlatBucket(ParamOwner):
    is_engine_owned = True
    # FSDP2's reshard_after_forward=N: the N neighbouring ranks over which parameters are sharded between forward and
    # backward. Solo: over all ranks.
    secondary_shard_group: Group = SOLO
    # This rank's part for that group, until the backward gathers it. Drop it when the weights change.
    secondary_shard: Tensor | None = None
    # Applied when masters are copied to parameters, in addition to the cast.
    rounding: ParamRounding | None = None

    def __init__(self, name: str, members: Sequence[tuple[str, nn.Parameter]], config: BucketingConfig,
                 policy: StagePolicy) -> None:
        """`members`: the path of each parameter in the model, and the parameter."""
        self.name, self.device, self.dp, self.log = name, config.device, config.dp, config.log
        self._dtypes, self._comm, self.params_are_sharded = config.dtypes, config.comm, policy.params_are_sharded
        self.show_sharded = config.show_sharded or replace_params_by_placeholders
        self._broadcast_group = SOLO if config.values_are_equal else config.dp
        self.trainable = members[0][1].requires_grad
        # Frozen parameters have no optimizer state: their buckets are sharded at stage 3 only.
        self.shard_group, self.replica_group = (
            config.sharding or (config.dp, SOLO)) if policy.optim_is_sharded else (SOLO, config.dp)
        # An accelerator runs the collectives of a process group one after the other: in a backward at stage 3 gathers
        # would queue behind reductions.
        self._gather_group = duplicate_group(self.shard_group) \
            if policy.params_are_sharded and on_accelerator(config.device) else self.shard_group
        slots = [Slot(path, tuple(full_shape(p)), config.param_group_of(p) if p.requires_grad else 0, partition_of(p))
                 for path, p in members]
        self.layout = FlatLayout(slots, self.shard_group.size)
        self._shard_slice = self.layout.shard_slice(self.shard_group.rank)
        engine_storage, by_name = config.engine_storage, dict(members)
        self.storage = (engine_storage.storage_for_masters(self.layout.shard_numel) if self.trainable
                        else engine_storage.optimizer)
        # the device on which the optimizer step computes
        self.update_device = HOST if self.storage.update_location is Location.HOST else self.device
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        self.shard_state = ShardState.GATHERED
        self._copy_streams = engine_storage.copy_streams
        self._pending_gather: CollectiveWork | None = None
        self._pending_shard_copy: CopyEvent | None = None  # this rank's shard, host to device
        offloader = None
        if self.trainable and self.storage.update_location is Location.HOST and self._copy_streams is not None:
            offloader = GradOffloader(self.layout.shard_numel, config.dtypes.grad_shard, config.device,
                                      self._copy_streams, pinned=engine_storage.pin_memory)
        self.grads = FlatGradients(name, self.layout, self.parameters, config, policy, self.shard_group,
                                   self.replica_group, offloader)
        # Returns the factor that turns a sum of gradients into their mean.
        self.grad_mean_factor: Callable[[], float] = lambda: 1.0
        self.user_session: GatheredParamsSession | None = None  # an open zero.GatheredParameters block
        # true while the parameters have no elements: sharded, being gathered, or offloaded by engine.offload_states()
        self._versions_are_shifted = self.params_are_placeholders = False
        # Names of the states that engine.offload_states() has moved to the host.
        self.offloaded_states: set[str] = set()
        self._take_over_params(engine_storage)
        self.write_guard = InPlaceWriteGuard(self.layout, self.parameters, self.shard_group.rank)

    def rebind(self, name: str, prefix: str, log: CollectiveLog, buffer_pool: BufferPool) -> None:
        """Become a bucket of a larger model, with new names. Call it before the first collective."""
        self.name, self.log = self.grads.name, self.grads.log = name, log
        self.grads.buffer_pool = buffer_pool
        self.layout.slots = tuple(replace(slot, name=prefix + slot.name) for slot in self.layout.slots)

    @property
    def empty_param(self) -> Tensor:
        """An empty tensor with the dtype and device of the parameters: the data of a sharded parameter."""
        return self.gathered_params.new_empty(0)

    @property
    def device_param_shard(self) -> Tensor:
        """This rank's parameter shard of shape [shard_numel]; it must be on the device."""
        assert self.param_shard.is_on_device, f"the weights of {self.name} are offloaded"
        return self.param_shard.view(WEIGHT)

    def _take_over_params(self, engine_storage: EngineStorage) -> None:
        """Move the initial values into the flat buffers, one parameter at a time: the full fp32 model is never on the
        device."""
        param_dtype, layout = self._dtypes.params, self.layout
        self.gathered_params = torch.zeros(0 if self.params_are_sharded else layout.numel, dtype=param_dtype,
                                           device=self.device)
        if self.params_are_sharded:
            self.shard_state = ShardState.SHARDED
            self.param_shard: StoredShard = engine_storage.params.allocate_shard(self.name, layout.shard_numel)
        else:
            self.param_shard = DeviceShard(self.gathered_params[self._shard_slice])
        self.has_separate_masters = (self.trainable or self._dtypes.frozen_have_masters) and (
            param_dtype != self._dtypes.master or self._dtypes.masters_are_separate
            or self.storage.location is not Location.DEVICE or not self.param_shard.is_on_device)
        self.master_state: StoredShard = (self.storage.allocate_shard(self.name, layout.shard_numel)
                                          if self.has_separate_masters else self.param_shard)
        sources = [owner.source for owner in map(param_owner, self.parameters) if isinstance(owner, LazyInitParam)]
        if len(sources) == len(self.parameters):  # all are still to be drawn
            self._init_from_sources(sources)
        else:
            self._copy_initial_values()
        for parameter in self.parameters:
            set_param_owner(parameter, self, keeps_owner_alive=False)
        if self.is_unsharded:
            self._point_params_into_buffer()
        else:
            self.show_params_sharded()

    def _init_from_sources(self, sources: Sequence[Initializer]) -> None:
        """Each rank draws the random values of its own shard. The only collective is the all-gather of the parameters,
        where they are not sharded."""
        for chunk in self.master_state.chunks:
            with self.master_state.open(chunk, [WEIGHT], writes=True) as opened:
                masters = opened[WEIGHT]
                is_there = self.master_state.is_on_device or self._copy_streams is None
                wide = masters if is_there and masters.dtype == torch.float32 else torch.zeros_like(
                    masters, dtype=torch.float32, device=self.device)
                init_chunk(wide, self.layout, self.shard_group.rank, chunk, sources)
                if masters is not wide:
                    masters.copy_(wide)
                if self.has_separate_masters:
                    self.param_shard.write(WEIGHT, chunk.start, wide)
        if self.is_unsharded:
            all_gather_into(self.gathered_params, self.device_param_shard, self.shard_group).wait()

    def _copy_initial_values(self) -> None:
        """Copy existing values, one parameter and one chunk of the shard at a time."""
        values = self._initial_values()
        slot, value = next(values)
        for chunk in self.master_state.chunks:
            with self.master_state.open(chunk, [WEIGHT], writes=True) as opened:
                for segment in self.layout.segments(self.shard_group.rank, chunk):
                    while slot is not segment.slot:
                        slot, value = next(values)
                    start = segment.shard_offset - chunk.start
                    segment_values = value.flatten()[segment.slot_offset : segment.slot_offset + segment.count]
                    opened[WEIGHT][start : start + segment.count] = segment_values
                if self.has_separate_masters:
                    self.param_shard.write(WEIGHT, chunk.start, opened[WEIGHT])
        for _ in values:  # parameters with no element in this rank's shard: their broadcasts are collective
            pass

    def _initial_values(self) -> Iterator[tuple[Slot, Tensor]]:
        """Yield each parameter's full value, and copy it into the gathered buffer if there is one. Collective."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            value = full_initial_value(parameter, self._broadcast_group, self.device)
            if self.is_unsharded:
                self._param_view(slot).copy_(value)
            yield slot, value

    def _param_view(self, slot: Slot) -> Tensor:
        return self.gathered_params.as_strided(slot.shape, slot.stride, slot.offset)

    def _point_params_into_buffer(self) -> None:
        """Make each `parameter.data` a view of the gathered buffer."""
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            set_param_data(parameter, self._param_view(slot))

    def _set_shard_state(self, wanted: ShardState) -> None:
        assert (self.shard_state, wanted) in LEGAL_TRANSITIONS, \
            f"{self.name} cannot go from {self.shard_state} to {wanted}"
        self.shard_state = wanted

    @property
    def is_unsharded(self) -> bool:
        """The parameters are gathered, or a gather is running."""
        return self.shard_state is not ShardState.SHARDED

    # ---- parameters -------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start the all-gather of the parameters; `wait_for_param_gather` waits for it."""
        if self.shard_state is ShardState.SHARDED:
            self.gathered_params = self.gathered_params.new_empty(self.layout.numel)
            try:
                if not self.param_shard.is_on_device and self.secondary_shard is None:
                    self._fetch_param_shard(self.gathered_params[self._shard_slice])
                self._launch_gather()
            except BaseException:  # an NVMe read failed, say: the buffer does not hold weights
                if self._pending_gather is None:
                    if self._pending_shard_copy is not None:
                        self._pending_shard_copy.wait_on_device()
                        self._pending_shard_copy = None
                    self.shard_state = ShardState.SHARDED
                    self._free_gathered_params()
                raise

    def _fetch_param_shard(self, own: Tensor) -> None:
        if self._copy_streams is None:
            self.param_shard.read(WEIGHT, 0, own)
        else:
            self._pending_shard_copy = self.param_shard.copy_to_device(own, self._copy_streams.to_device)

    def _launch_gather(self) -> None:
        self._set_shard_state(ShardState.GATHERING)
        self._gather_entry = self.log.record_collective(self.name)
        if self.secondary_shard is not None:
            own, group, self.secondary_shard = self.secondary_shard, self.secondary_shard_group, None
        else:  # an offloaded shard was copied to its place in the output
            own = self.device_param_shard if self.param_shard.is_on_device else self.gathered_params[self._shard_slice]
            group = self._gather_group
        with nullcontext() if self._copy_streams is None \
                or self._pending_shard_copy is None else self._copy_streams.to_device.collectives_after_copies():
            # [numel] <- [numel / size] of each rank of the group
            self._pending_gather = all_gather_into(self.gathered_params, own, group, self._comm.allgather_bucket_size)
        if not self._comm.overlap_comm:
            self.wait_for_param_gather()

    def wait_for_param_gather(self) -> None:
        """Wait for the all-gather of the parameters, if one is running, and make the parameters usable."""
        if self._pending_gather is not None:
            self.log.awaited_entry = self._gather_entry
            self._pending_gather.wait()
            self.log.awaited_entry = NO_ENTRY
            if self._pending_shard_copy is not None:
                self._pending_shard_copy.wait_on_device()
                self._pending_shard_copy = None
            if self.shard_state is ShardState.GATHERING:  # otherwise Ctrl-C came between the next lines
                self._set_shard_state(ShardState.GATHERED)
            self._restore_params()
            self._pending_gather = None

    def _restore_params(self) -> None:
        if self.params_are_placeholders:
            self._point_params_into_buffer()
            self.params_are_placeholders = False
        if self._versions_are_shifted:
            self.write_guard.shift_versions(-1)
            self._versions_are_shifted = False

    def gather(self) -> None:
        self.start_gather()
        self.wait_for_param_gather()

    def reshard(self, *, keep_secondary_shard: bool = False) -> None:
        """Free the gathered parameters and keep only the shard (stage 3). Does nothing while the user has them
        gathered.

        With `keep_secondary_shard` this rank also keeps its part for `secondary_shard_group`. After an interruption by
        Ctrl-C the next call completes the reshard."""
        if not self.params_are_sharded or self.user_session is not None:
            return
        if not keep_secondary_shard:
            self.secondary_shard = None
        if self.shard_state is not ShardState.SHARDED:
            self.wait_for_param_gather()
            if keep_secondary_shard and not self.secondary_shard_group.is_solo:
                # [numel] -> [size, numel / size], of which this rank keeps one row
                self.secondary_shard = self.gathered_params.view(
                    self.secondary_shard_group.size, -1)[self.secondary_shard_group.rank].clone()
            self.write_guard.lost_write = self.write_guard.lost_write or self.write_guard.first_written()
            self.write_guard.shift_versions(+1)
            self._versions_are_shifted = True
            self._set_shard_state(ShardState.SHARDED)
        if self.gathered_params.numel():
            self._free_gathered_params()

    def _free_gathered_params(self) -> None:
        # The buffer goes last: `reshard` takes an empty buffer as a sign that all parameters are placeholders.
        self.show_params_sharded()
        self.gathered_params = self.empty_param

    def show_params_sharded(self) -> None:
        """Turn the parameters into placeholders."""
        self.params_are_placeholders = True
        self.show_sharded(self)

    def check_params_unchanged(self) -> None:
        """Raise ConfigError if the user froze, unfroze or replaced a parameter since initialize."""
        for slot, parameter in zip(self.layout.slots, self.parameters):
            if parameter.requires_grad != self.trainable:
                raise ConfigError(
                    f"{slot.name} was {'frozen' if self.trainable else 'unfrozen'} after zero.initialize, and the "
                    f"engine would {'go on changing it' if self.trainable else 'not train it'}: set requires_grad "
                    "before, or destroy() the engine and initialize again")
        self.check_params_in_buffer()

    def check_params_in_buffer(self) -> None:
        """Raise ConfigError if a gathered parameter is no longer a view of the engine's buffer. (A sharded one is a
        placeholder, which refuses new data.)"""
        if not self.is_unsharded or self.params_are_placeholders:
            return
        for slot, parameter in zip(self.layout.slots, self.parameters):
            if not self._is_in_buffer(parameter, slot):
                raise ConfigError(
                    f"{slot.name} has left the engine's buffers (half(), to() and `p.data = ...` do this), and would "
                    "not be trained: choose fp16 or bf16 in the configuration, and edit weights in place inside "
                    "zero.GatheredParameters")

    def _is_in_buffer(self, parameter: Tensor, slot: Slot) -> bool:
        place = self.gathered_params.data_ptr() + slot.offset * self.gathered_params.element_size()
        return parameter.data_ptr() == place or not slot.numel  # torch gives no address without elements

    def check_user_writes(self, *, compare_values: bool) -> None:
        """Raise ConfigError for in-place writes that the next step would undo, or that count only after the end of an
        open GatheredParameters block."""
        if self.user_session is not None:
            if self.user_session.first_modified() is not None:
                self.check_not_gathered_by_user("a save")
        elif self.params_are_sharded or self.has_separate_masters:
            self.write_guard.refuse_writes(None if self.params_are_sharded else self.device_param_shard,
                                           self.master_state, self.round_masters, compare_values=compare_values)

    def round_masters(self, chunk: slice, masters: Tensor) -> Tensor:
        """The parameter values of one chunk of the masters; the caller casts."""
        return masters if self.rounding is None else self.rounding.round_masters(chunk, masters)

    def copy_masters_to_params(self) -> None:
        """Copy this rank's masters into its parameter shard; `start_allgather_after_step` sends it to the others."""
        if self.has_separate_masters:
            self.wait_for_param_gather()  # the all-gather after an earlier step may still read the shard
            for chunk in self.master_state.chunks:
                with self.master_state.open(chunk, [WEIGHT]) as opened:
                    self.param_shard.write(WEIGHT, chunk.start, opened[WEIGHT])

    def start_allgather_after_step(self) -> None:
        """After the optimizer has changed the shard: start its all-gather, unless parameters are sharded."""
        if self.rounding is not None:
            self.rounding()
        if self.params_are_sharded:
            assert not self.is_unsharded, f"{self.name} is gathered, with the values before the step"
        elif self.shard_group.size > 1:
            self.wait_for_param_gather()
            self._launch_gather()
        self.write_guard.accept_writes()

    # ---- engine.offload_states() ------------------------------------------------------------------------------

    def check_not_offloaded(self, what: str, *needed: str) -> None:
        """Raise ConfigError if one of the `needed` states (by default any state) is offloaded."""
        offloaded = sorted(self.offloaded_states.intersection(needed) if needed else self.offloaded_states)
        if offloaded:
            raise ConfigError(f"{what} while engine.offload_states() has set {', '.join(offloaded)} aside: "
                              "call engine.reload_states() first")

    def begin_param_offload(self) -> None:
        """Turn the parameters into placeholders until `end_param_offload`; the caller then frees their memory."""
        self.is_offloaded = True
        if not self.params_are_sharded:
            self.write_guard.shift_versions(+1)
            self._versions_are_shifted = self.params_are_placeholders = True
            replace_params_by_placeholders(self)

    def end_param_offload(self) -> None:
        if self.is_offloaded and not self.params_are_sharded:
            self._restore_params()
        self.is_offloaded = False

    # ---- zero.GatheredParameters (ParamOwner in partitioned_param.py) -------------------------------------------

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        return torch.Size(self.slot_of(parameter).shape)

    def describe(self, parameter: Tensor) -> str:
        slot = self.slot_of(parameter)
        return f"parameter {slot.name!r} of shape {slot.shape}"

    def slot_of(self, parameter: Tensor) -> Slot:
        return next(slot for slot, held in zip(self.layout.slots, self.parameters) if held is parameter)

    def check_before_user_gather(self) -> None:
        self.check_not_offloaded("GatheredParameters (or what gathers like it, such as load_module_state_dict)")
        self.check_not_gathered_by_user("GatheredParameters (or what gathers like it, such as load_module_state_dict)")
        if self.params_are_sharded:
            with torch._C.DisableTorchFunctionSubclass():
                self.check_user_writes(compare_values=False)

    def gather_for_user(self) -> None:
        was_sharded, self.log.purpose = not self.is_unsharded, "GatheredParameters"
        self.gather()
        self.user_session = GatheredParamsSession(self.gathered_params, self.layout, self.shard_group.rank,
                                                  was_sharded=was_sharded)
        if self.has_separate_masters and not self.params_are_sharded:
            # Compare with the masters later, so that in-place writes from before this block count as its edits.
            for chunk in self.master_state.chunks:
                with self.master_state.open(chunk, [WEIGHT]) as opened:
                    self.user_session.shard_before[chunk] = self.round_masters(chunk, opened[WEIGHT])

    def read_master(self, start: int, out: Tensor) -> None:
        """out <- this rank's masters from `start` on. User edits count when the GatheredParameters block ends."""
        if self.user_session is None or self.has_separate_masters or self.params_are_sharded:
            self.master_state.read(WEIGHT, start, out)
        else:
            out.copy_(self.user_session.shard_before[start : start + len(out)])

    def check_before_user_reshard(self, modifier_rank: int | None) -> None:
        assert self.user_session is not None, f"bucket {self.name} was not lent"
        for slot, parameter in zip(self.layout.slots, self.parameters):
            if not self._is_in_buffer(parameter, slot):  # `p.data = ...` counts as an edit too
                view = self._param_view(slot)
                if (parameter.shape, parameter.dtype) != (view.shape, view.dtype):
                    raise ConfigError(f"{slot.name} became a tensor of {parameter.dtype} and shape "
                                      f"{list(parameter.shape)} inside GatheredParameters; the engine trains "
                                      f"{view.dtype} of shape {list(view.shape)}: give it values of that kind")
                view.copy_(parameter.detach())
                set_param_data(parameter, view)
        if modifier_rank is None and (modified := self.user_session.first_modified()) is not None:
            raise ConfigError(f"{modified} was edited inside GatheredParameters without modifier_rank, or by hand "
                              "before it: the edit would be lost; say which rank's edits count")

    def reshard_after_user(self, modifier_rank: int | None) -> None:
        assert self.user_session is not None, f"bucket {self.name} was not lent"
        if modifier_rank is not None:
            self.log.record_collective(f"edits of {self.name}")
            broadcast_into(self.gathered_params, modifier_rank, self.dp).wait()
            self.user_session.store_modified_shard(self.param_shard, self.master_state)
            if self.rounding is not None:  # gather the parameters again, rounded from the edited masters
                self.copy_masters_to_params()
                self.rounding()
                if not self.param_shard.is_on_device:
                    self._fetch_param_shard(self.gathered_params[self._shard_slice])
                self._launch_gather()
                self.wait_for_param_gather()
        self._end_user_session(self.user_session)

    def check_not_gathered_by_user(self, what: str) -> None:
        if self.user_session is not None:
            raise ConfigError(f"{what} inside zero.GatheredParameters, which has {self.layout.slots[0].name}: edits "
                              "count when the block ends; leave it first")

    def cancel_user_gather(self) -> None:
        if self.user_session is not None:
            self._point_params_into_buffer()
            self.user_session.undo_modifications()
            self._end_user_session(self.user_session)

    def _end_user_session(self, session: GatheredParamsSession) -> None:
        self.user_session = None
        self.write_guard.accept_writes()
        if session.was_sharded:
            self.reshard()


def publish_masters(buckets: Sequence[FlatBucket]) -> None:
    """Copy new masters into the parameters on every rank. Collective."""
    for bucket in buckets:
        bucket.copy_masters_to_params()
        bucket.start_allgather_after_step()
