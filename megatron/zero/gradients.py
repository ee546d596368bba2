"""Gradients of one bucket: from autograd into a flat buffer, and reduced into this rank's shard.

The *full buffer* has the gradients of all parameters, in the bucket's slots. The *shard* is this rank's part of their
sum over data parallel, which the optimizer reads. Gradients arrive one by one (`accept_grad`), or the operation that
computes them writes into the slot (`MainGradWriter`). A CPU copies each when it arrives, an accelerator all of them
with one kernel. `start_reduction` launches the reduce-scatter or all-reduce, `wait_for_reduction` waits for it.

Where gradients are sharded the shard accumulates over micro-batches, and the full buffer goes back to the pool;
otherwise the full buffer accumulates until the boundary, and `parameter.grad` is a view of it if dtypes are equal: user
changes to it count. Where the host updates, the shard is offloaded as soon as it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.distributed.collective_log import NO_REDUCTION
from megatron.errors import ConfigError
from megatron.zero.flat_buffers import BucketingConfig, FlatBuffer
from megatron.zero.layout import FlatLayout
from megatron.zero.offload.copy_streams import CopyEvent, GradOffloader
from megatron.zero.stages import StagePolicy
from mpu.collectives import CollectiveWork, all_reduce_into, reduce_scatter_into
from mpu.device import on_accelerator
from mpu.grads import row_norms
from mpu.groups import Group

STAGE3_OUTPUT_RULE = ("at ZeRO stage 3 what a block computes must leave it in its output (tensors, or tuples, lists, "
                      "dicts or dataclasses of them), not as an attribute that is read later or inside another object, "
                      "and its parameters are used in its forward alone; return it, or use stage 2")


class GradState(Enum):
    UNREDUCED = "gradients in the full buffer, or none; the shard, if any, holds sums of earlier backwards"
    REDUCING = "this backward has started the reduction: no other gradient may arrive"
    REDUCED = "the shard holds the sums of all gradients so far, and the full buffer is free"
    REDUCED_IN_BUFFER = "the same, in the full buffer, which is to be kept until the step"


class PendingReduction(NamedTuple):
    work: CollectiveWork
    output: Tensor  # this rank's part of the sum, [shard_numel]
    output_is_in_buffer: bool  # a view of the full buffer; otherwise a tensor of its own
    number: int  # in the collective log
    replica_sum: Tensor | None = None  # of this replica's ranks; its all-reduce over replicas is still to be started


class FlatGradients:
    """The full buffer and the reduced shard of one bucket's gradients."""

    def __init__(self, name: str, layout: FlatLayout, parameters: Sequence[nn.Parameter], config: BucketingConfig,
                 policy: StagePolicy, shard_group: Group, replica_group: Group,
                 offloader: GradOffloader | None) -> None:
        device, dtypes, comm = config.device, config.dtypes, config.comm
        self.name, self.layout, self.parameters = name, layout, parameters
        self._accumulates_shard, self._params_are_sharded = policy.grads_are_sharded, policy.params_are_sharded
        self._dp, self._shard_group, self._replica_group = config.dp, shard_group, replica_group
        self._shard_slice = layout.shard_slice(shard_group.rank)
        self._device, self._dtypes, self._comm = device, dtypes, comm
        self.buffer_pool, self.log, self.offloader = config.buffer_pool, config.log, offloader
        self._copies_each_grad = comm.contiguous_gradients and not on_accelerator(device)
        self._grads_are_views = not policy.grads_are_sharded and dtypes.grads == dtypes.params
        self._slots_with_grad_view: set[int] = set()  # slots that `parameter.grad` is a view of
        # Parameters whose gradient came from autograd in this backward. Gradients that an operation wrote in place do
        # not count, since autograd does not report them: their bucket is complete at the end of the backward.
        self._arrived_in_backward: set[int] = set()
        self.params_with_grad: set[int] = set()  # parameters with a gradient since the last `discard`
        self.filled_slots: set[int] = set()  # slots that already hold a gradient; the next one is added
        self.state = GradState.UNREDUCED
        # The backward that ends a step has run, and the shard holds all gradients of the step.
        self.has_all_step_grads = False
        # Keep each rank's full gradients without reduction; the optimizer communicates them (compression.py).
        self.skip_reduction = False
        # Full gradients are divided by the first before the reduction, and the sum is multiplied by the second.
        self.predivide_factor, self.sum_multiplier = comm.gradient_predivide_factor, 1.0
        self._reservations: dict[int, ReferenceType[WgradReservation]] = {}  # slots that a forward has written to
        self._pending_reduction: PendingReduction | None = None
        self.grad_hooks: list[RemovableHandle] = []  # the hooks, one per parameter, that call `accept_grad`
        self._full_buffer: FlatBuffer | None = None
        self._full_dtype = dtypes.grads  # dtype of the full buffer
        self._shard: Tensor | None = None

    # ---- from autograd ------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """All gradients of this backward have arrived."""
        return len(self._arrived_in_backward) == len(self.parameters)

    def accept_grad(self, index: int) -> bool:
        """Take the gradient of one parameter; True when it was the last one of this backward."""
        self.mark_grad_received(index)
        self._arrived_in_backward.add(index)
        is_complete = self.is_complete
        if self._copies_each_grad:
            self._copy_grads_into_buffer([index])
        elif is_complete:
            self._copy_grads_into_buffer(self._arrived_in_backward)
        return is_complete

    def mark_grad_received(self, index: int, *, in_place: bool = False) -> None:
        """Record that the parameter got a gradient, with `in_place` as the content of its slot. Raises ConfigError if
        its bucket has been reduced already."""
        if index in self._arrived_in_backward and (self.state is GradState.REDUCING
                                                   or self._params_are_sharded and self.is_complete):
            raise ConfigError(
                f"{self.layout.slots[index].name} got a second gradient in one backward, after those of its "
                "block were complete: a block that is used twice cannot be recomputed with use_reentrant=True; give "
                "torch.utils.checkpoint use_reentrant=False, or use megatron.recompute.checkpoint")
        if self.state is GradState.REDUCING:
            raise ConfigError(f"{self.layout.slots[index].name} got its gradient after the backward of its block, "
                              f"whose gradients had been summed over the ranks: {STAGE3_OUTPUT_RULE}")
        self.params_with_grad.add(index)
        if in_place:
            self._reservations.pop(index, None)
            self.filled_slots.add(index)
            # Autograd does not see these gradients, but post-accumulate hooks of the user do.
            hooks = self.grad_hooks[index].hooks_dict_ref()
            if hooks is not None and len(hooks) > 1 and self._full_dtype == self._dtypes.params:
                self._set_grad_view(index)

    def _copy_grads_into_buffer(self, indices: Iterable[int]) -> None:
        """Move gradients that autograd left into the flat buffer."""
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index in indices:
            parameter = self.parameters[index]
            grad = parameter.grad
            if grad is None:  # already in the buffer
                continue
            self._evict_reservations(index)
            if grad.is_sparse:  # nn.Embedding(sparse=True)
                grad = grad.to_dense()
            view = self._get_full_buffer().views[index]
            if grad is not view:  # else autograd has accumulated into the view in place
                views, grads = more if index in self.filled_slots else fresh
                views.append(view)
                grads.append(grad)
                self.filled_slots.add(index)
                parameter.grad = None
                if self._grads_are_views:
                    self._set_grad_view(index)
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        if more[0]:
            torch._foreach_add_(*more)

    def _copy_remaining_grads(self) -> None:
        """Where the gradients of a bucket are copied at once: those of a bucket that this backward did not complete."""
        if not self._copies_each_grad and not self.is_complete:
            self._copy_grads_into_buffer(self._arrived_in_backward)

    def _set_grad_view(self, index: int) -> None:
        self.parameters[index].grad = self._get_full_buffer().views[index]
        self._slots_with_grad_view.add(index)

    def check_user_modified_grads(self) -> None:
        """Before a backward or a step: apply user changes to a `parameter.grad` that is a view of the buffer. Raises
        ConfigError for any other `parameter.grad`, because the engine would ignore it."""
        with torch._C.DisableTorchFunctionSubclass():  # placeholders have `.grad` too
            for index, parameter in enumerate(self.parameters):
                grad = parameter.grad
                if index in self._slots_with_grad_view:
                    view = self._get_full_buffer().views[index]
                    if grad is not view:
                        view.zero_() if grad is None else view.copy_(grad)
                        parameter.grad = view
                elif grad is not None:
                    raise ConfigError(
                        f"{self.layout.slots[index].name}.grad was set by hand, where the engine does not look: call "
                        "safe_set_full_grad(parameter, value) of megatron.zero.utils after the last backward of a "
                        "step, or engine.zero_grad() to forget it")

    def _clear_param_grads(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None
        self._slots_with_grad_view.clear()

    def reserve_slot(self, index: int) -> WgradReservation | None:
        """Let a forward write to the slot early; None if the slot already holds a gradient."""
        self._evict_reservations(index)
        if index in self.filled_slots or self.state in (GradState.REDUCING, GradState.REDUCED_IN_BUFFER):
            return None
        reservation = WgradReservation(self, index, self._get_full_buffer().views[index])
        self._reservations[index] = ref(reservation)
        return reservation

    def accumulated_grad(self, index: int) -> Tensor:
        """A view of the gradient so far (zeros if there is none), to add to."""
        self._evict_reservations(index)
        is_first = index not in self.filled_slots
        self.mark_grad_received(index, in_place=True)
        view = self._get_full_buffer().views[index]
        return view.zero_() if is_first else view

    def _evict_reservations(self, *indices: int) -> None:
        """Free the slots: move the values of reservations whose backward may still run to other tensors."""
        for index in indices:
            reservation = self._reservations.pop(index, None)
            if reservation is not None and (alive := reservation()) is not None:
                alive.buffer, alive.has_moved = alive.buffer.clone(), True

    def _get_full_buffer(self) -> FlatBuffer:
        if self._full_buffer is None:
            new = self.buffer_pool.get if self._accumulates_shard else FlatBuffer.allocate
            self._full_buffer = new(self.layout, self._full_dtype, self._device)
        return self._full_buffer

    def _return_buffer(self, pending_copy: CopyEvent | None = None) -> None:
        """Return the full buffer to the pool; `pending_copy` may still read from it."""
        if self._full_buffer is not None and self._accumulates_shard:
            self.buffer_pool.put(self.layout, self._full_buffer, pending_copy)
        self._full_buffer = None

    # ---- reduction ----------------------------------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Start the reduction of the full buffer over data parallel. Parameters without a gradient count as zero."""
        assert self._pending_reduction is None, f"the gradients of {self.name} are on their way already"
        self._copy_remaining_grads()
        if self._slots_with_grad_view:  # the reduction overwrites the gradients that they are views of
            self._clear_param_grads()
        self.state = GradState.REDUCING
        self._evict_reservations(*self._reservations)
        grads = self._get_full_buffer().flat
        for index, slot in enumerate(self.layout.slots):
            if index not in self.filled_slots:
                grads[slot.offset : slot.end].zero_()
        if self.skip_reduction:
            self._shard = grads
            return
        if self.predivide_factor != 1:
            grads.mul_(1 / self.predivide_factor)
        if self.offloader is not None and self._shard is not None:
            self.offloader.prefetch_sums()
        number = self.log.record_reduction(self.name)
        scatters = not self._shard_group.is_solo and self._comm.reduce_scatter
        has_replicas = scatters and not self._replica_group.is_solo
        # The sum goes to this rank's part of the buffer. It gets its own tensor if the dtypes differ, and if it becomes
        # the shard of the next micro-batches or is summed over replicas: the buffer is free before.
        frees_buffer = self._accumulates_shard and (has_replicas or self._shard is None and self.offloader is None)
        is_in_buffer = self._dtypes.grad_shard == grads.dtype and (self._shard_group.is_solo or not frees_buffer)
        output = grads[self._shard_slice]
        if not is_in_buffer:
            output = torch.empty_like(output, dtype=self._dtypes.grad_shard)
        sent, bucket_size = grads.to(self._dtypes.communication or grads.dtype), self._comm.reduce_bucket_size
        # output, [shard_numel] <- this rank's part of the sum over ranks of `sent`, [numel]
        replica_sum = output
        if scatters:
            # what one replica has is a part of the sum: it is not rounded to 16 bits yet
            wide = self._dtypes.reduction if on_accelerator(self._device) else torch.float32
            if has_replicas and wide != output.dtype:
                replica_sum = torch.empty_like(output, dtype=wide)
            work = reduce_scatter_into(replica_sum, sent, self._shard_group, bucket_size, self._dtypes.reduction)
        else:
            work = all_reduce_into(sent, self._dp, "sum", bucket_size, self._dtypes.reduction)
            if sent is not grads or not is_in_buffer:
                work = CollectiveWork([work], partial(output.copy_, sent[self._shard_slice]))
        self._pending_reduction = PendingReduction(work, output, is_in_buffer, number,
                                                   replica_sum if has_replicas else None)
        if not self._comm.overlap_comm:
            self.wait_for_reduction()

    def wait_for_reduction(self, between_replicas: bool = True) -> None:
        """Wait for the reduction, if one is running, and put its result into `shard`. Without `between_replicas`: wait
        for the collective that is running, and let an all-reduce between replicas run that it starts."""
        if self._pending_reduction is None:
            return
        work, reduced, is_in_buffer, number, replica_sum = self._pending_reduction
        self.log.awaited_reduction = number, self.name
        work.wait()
        self.log.awaited_reduction = NO_REDUCTION
        # Dropping the work frees its communication buffers before more memory is allocated.
        self._pending_reduction = None
        del work
        if replica_sum is not None:
            summed = all_reduce_into(replica_sum, self._replica_group, "sum", self._comm.reduce_bucket_size,
                                     self._dtypes.reduction)
            if replica_sum is not reduced:
                summed = CollectiveWork([summed], partial(reduced.copy_, replica_sum))
            self._pending_reduction = PendingReduction(summed, reduced, is_in_buffer, number)
            if self._accumulates_shard:
                self._return_buffer()
            if between_replicas:
                self.wait_for_reduction()
            return
        if self.sum_multiplier != 1.0:
            reduced.mul_(self.sum_multiplier)
        if self.offloader is not None:
            copy = self.offloader.offload(reduced)
            self._return_buffer(copy if is_in_buffer else None)
            self._shard = reduced.new_empty(0)  # the sums are in the offloader
        elif self._shard is not None:  # sums of earlier micro-batches
            self._shard.add_(reduced)
            self._return_buffer()
        else:
            self._shard = reduced
            if not self._accumulates_shard:
                return  # the sums stay in the full buffer until the step
            if is_in_buffer:  # the shard keeps this memory; the pool does not get it back
                self._full_buffer = None
            self._return_buffer()
        self.filled_slots.clear()

    def zero_param_grad(self, index: int) -> None:
        """Set the parameter's gradient to zero, in the shard and in the full buffer."""
        slot = self.layout.slots[index]
        if self._shard is not None:
            for segment in self.layout.segments(self._shard_group.rank):
                if segment.slot is slot:
                    self.shard[segment.shard_range].zero_()
        if index in self.filled_slots:
            self._get_full_buffer().views[index].zero_()
        self.params_with_grad.discard(index)

    @property
    def shard(self) -> Tensor:
        """This rank's part of the sum, [shard_numel], on the device that updates the weights."""
        assert self._shard is not None, f"{self.name} has no reduced gradient"
        return self._shard if self.offloader is None else self.offloader.sums

    def set_reduced_shard(self, shard: Tensor) -> None:
        """With `skip_reduction`: the shard that the optimizer's own communication has computed, for the update."""
        self._clear_param_grads()
        self._shard = shard

    def row_norms(self, out: Tensor) -> None:
        """out <- mpu.grads.row_norms of the shard, on the device."""
        if self.offloader is None:
            row_norms(self.shard, out)
        else:
            self.offloader.row_norms(out)

    # ---- from backward to backward ------------------------------------------------------------------------------

    @property
    def is_reduced(self) -> bool:
        """The shard holds the sums of all gradients so far."""
        return self.state in (GradState.REDUCED, GradState.REDUCED_IN_BUFFER)

    def set_accumulation_dtype(self, *, in_shard_dtype: bool) -> None:
        """Before a backward, while the full buffer is free: choose its dtype. The dtype of the shard is for a backward
        that others follow before the reduction."""
        if self._full_buffer is None:
            self._full_dtype = self._dtypes.grad_shard if in_shard_dtype else self._dtypes.grads

    def begin_backward(self) -> None:
        self.check_user_modified_grads()
        for hook in self.grad_hooks:
            hooks = hook.hooks_dict_ref()
            if hooks is not None and hook.id in hooks and next(reversed(hooks)) != hook.id:
                hooks[hook.id] = hooks.pop(hook.id)  # run the user's newer hooks before the engine's
        if self.state is GradState.REDUCED_IN_BUFFER and self.skip_reduction:  # the shard was not summed over ranks
            self._shard = None
        elif self.state is GradState.REDUCED_IN_BUFFER:
            # Another backward after the reduction and before a step: keep the sums apart, so that they are not
            # reduced twice; the next reduction is added to them.
            self._shard = self.shard.clone()
            self._return_buffer()
            self.filled_slots.clear()
        self.state = GradState.UNREDUCED

    def end_backward(self, ends_step: bool) -> None:
        self._copy_remaining_grads()
        self.wait_for_reduction()
        if self.state is GradState.REDUCING:  # an accumulated or offloaded sum has released the full buffer
            self.state = GradState.REDUCED if self._full_buffer is None else GradState.REDUCED_IN_BUFFER
        elif self._shard is not None and not self.filled_slots:  # this backward has added nothing
            self.state = GradState.REDUCED
        if self._grads_are_views and self.state is not GradState.REDUCED_IN_BUFFER:
            for index in self.filled_slots - self._slots_with_grad_view:
                self._set_grad_view(index)  # gradients that an operation wrote in place
        self._arrived_in_backward.clear()
        self.has_all_step_grads = ends_step and self.state is not GradState.UNREDUCED

    def discard(self) -> None:
        """Drop all gradients, also those whose reduction is running."""
        if self._pending_reduction is not None:
            self._pending_reduction.work.wait()
            self._pending_reduction = None
        if self.offloader is not None:
            self.offloader.cancel_prefetch()
        self._clear_param_grads()
        self._evict_reservations(*self._reservations)
        for marks in (self._arrived_in_backward, self.params_with_grad, self.filled_slots):
            marks.clear()
        self._return_buffer()
        self._shard, self.state, self.has_all_step_grads = None, GradState.UNREDUCED, False


class MainGradWriter:
    """Implements `mpu.grads.MainGrad` for one parameter."""

    def __init__(self, grads: FlatGradients, index: int) -> None:
        self.reserve = partial(grads.reserve_slot, index)
        self.accumulated = partial(grads.accumulated_grad, index)


class WgradReservation:
    """A slot into which a forward has written a weight gradient early. The gradient moves to a separate tensor if
    something else needs the slot before the backward of that forward."""

    def __init__(self, grads: FlatGradients, index: int, place: Tensor) -> None:
        self._grads, self._index, self.buffer = grads, index, place
        self.has_moved = False  # out of the slot

    def commit(self, scale: Tensor | None = None) -> None:
        if scale is not None:
            self.buffer.mul_(scale)
        if self.has_moved:
            self._grads.accumulated_grad(self._index).add_(self.buffer)
        else:
            self._grads.mark_grad_received(self._index, in_place=True)
