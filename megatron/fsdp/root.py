"""`FSDPRoot`: runs the units of an outermost sharded module in training.

    before a forward     optimizer updates of the masters are copied to the working parameters
    during a pass        hooks report what runs; units are gathered and resharded, gradients reduced
    after a backward     ranks compare what they did, and `p.grad` is set

It uses the stage 3 mechanism of megatron/zero except for the step: that is the torch optimizer's, on views of the
masters. `clip_grad_norm_` sums squares by rows that begin at parameter borders (mpu/grads.py), so the norm is the same
to the bit for any wrapping and number of ranks.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron.checkpoint.manifest import Lineage
from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.step_consistency import NoGradForwardChecker, diverged_blocks_error
from megatron.distributed.watchdog import start_watchdog
from megatron.errors import ConfigError, NumericsError
from megatron.fsdp.gradients import FSDPLossScaler, ParamGradViews
from megatron.fsdp.hooks import before_optimizer_steps, on_backward_end, on_forward_end, scale_output_gradients
from megatron.fsdp.sharded_tensor import ShardedParam, ShardedParamViews, UnreducedGrad, bucket_of, local_tensor
from megatron.zero.bucket import FlatBucket
from megatron.zero.flat_buffers import BufferPool
from megatron.zero.hooks import register_unit_hooks
from megatron.zero.partitioned_param import param_owner
from megatron.zero.pass_coordinator import PassCoordinator
from megatron.zero.units import Unit, UnitCall, attach_main_grad_writers
from mpu.collectives import all_reduce, all_reduce_into
from mpu.device import HostScalars, on_accelerator, scalars_on_device
from mpu.grads import norm_term
from mpu.groups import SOLO, Group, Groups

# A value of `FSDPRoot.full_params_holder`: edits inside are discarded.
VOLATILE = "summon_full_params(volatile=True)"
_ALL_ROOTS: WeakSet[FSDPRoot] = WeakSet()

ReachedParams = Sequence[frozenset[int]]  # for each bucket, the indices of its parameters that backward reached


class FSDPRoot(PassCoordinator):
    """The coordinator of an outermost sharded module, `units[0]`, and the units inside."""

    def __init__(self, units: Sequence[Unit], kept_for_backward: set[Unit], dp: Group, device: torch.device,
                 log: CollectiveLog, buffer_pool: BufferPool) -> None:
        super().__init__(units, log, NoGradForwardChecker(dp, device, log), params_are_sharded=True, max_live=1 << 62,
                         kept_for_backward=kept_for_backward, prefetches=True, max_in_flight=1, allows_unused=True,
                         current_step=lambda: self.steps + 1)
        self.units, self.dp, self.device, self.log, self.buffer_pool = list(units), dp, device, log, buffer_pool
        self.module = units[0].module
        self.groups = Groups(dp, dp=dp)
        self.buckets = [bucket for unit in units for bucket in unit.buckets]
        self.trained = [bucket for bucket in self.buckets if bucket.trainable]
        self._shards = [cast(ShardedParamViews, bucket.show_sharded) for bucket in self.buckets]
        self.reduces_grads = True
        # The call that currently gathers the parameters for the user, or None.
        self.full_params_holder: str | None = None
        # Buckets whose full parameters `summon_full_params` has given to the user.
        self.summoned: set[FlatBucket] = set()
        self._grad_views = [ParamGradViews(bucket) for bucket in self.trained]
        self._loss_was_scaled = False  # this backward went through the output hook that applies the loss scale
        self._backward_is_running: Callable[[], bool] = lambda: False
        self.steps = 0  # optimizer steps that forwards have observed as writes to the masters
        self.lineage = Lineage()  # lineage of the checkpoint that the next one continues
        self._is_watched = False
        self.loss_scaler = FSDPLossScaler(any(bucket.param_shard.dtype == torch.float16 for bucket in self.trained))
        self.handles: list[RemovableHandle] = register_unit_hooks(units, self)
        self.handles += [on_forward_end(unit.module, partial(self._after_any_forward, unit)) for unit in units]
        self._forward_hook_ids = {unit: [handle.id for handle in self.handles if handle.hooks_dict_ref()
                                         is unit.module._forward_hooks] for unit in units}
        self._known_params = {id(parameter): parameter for parameter in self.module.parameters()}
        # in 16 bits an in-place sum would round differently from autograd and DistributedDataParallel
        if all(bucket.param_shard.dtype == torch.float32 for bucket in self.trained):
            attach_main_grad_writers(self.units)
        self._pending_comparison: HostScalars | None = None  # of the ranks' last backwards
        if self.loss_scaler.is_enabled:
            self.handles.append(scale_output_gradients(self.module, self._scale_for_backward))
        _ALL_ROOTS.add(self)

    def check_idle(self, what: str) -> None:
        self._abort_failed_backward()
        if self.is_running:
            raise ConfigError(f"{what} inside a forward or backward of the model: do it before or after")
        if self.full_params_holder is not None:
            raise ConfigError(f"{what} inside {self.full_params_holder}: leave it first")

    # ---- events (hooks.py) --------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        self._abort_failed_backward()
        for hook in self._forward_hook_ids[unit]:  # run after the user's hooks, which must see full parameters
            unit.module._forward_hooks.move_to_end(hook)  # type: ignore[attr-defined]  # an OrderedDict
        if not self.in_backward and (unit.is_root or not self.running_units):
            self._begin_forward()
        super().before_forward(unit)

    def _after_any_forward(self, unit: Unit) -> None:
        """Reshard after a forward that raised, and after one without gradients."""
        if self.in_backward:
            return
        has_raised = unit in self.running_units
        if has_raised:
            del self.running_units[self.running_units.index(unit):]
        if not self.running_units and (has_raised or not torch.is_grad_enabled()):
            self.reshard_model()

    def before_backward(self, unit: Unit, call: UnitCall) -> None:
        self._abort_failed_backward()
        if not self.in_backward:
            self._begin_user_backward()
        super().before_backward(unit, call)

    def param_grad_ready(self, unit: Unit, bucket: FlatBucket, index: int) -> None:
        self._abort_failed_backward()
        if not self.in_backward:  # backward from a tensor that is no unit's output
            parameter = bucket.parameters[index]
            gradient, parameter.grad = parameter.grad, None  # else `take_user_grads` would take it for the user's
            self._begin_user_backward()
            parameter.grad = gradient
        super().param_grad_ready(unit, bucket, index)

    # ---- forward ------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        self.check_not_interrupted()
        self.running_units.clear()  # left by a forward that raised
        if self.full_params_holder is not None:
            raise ConfigError(
                f"a forward inside {self.full_params_holder}: its parameters are gathered there; leave it first. (A "
                "forward needs none: every rank calls it, and parameters come as they are used.)")
        if not self._is_watched:  # roots are still merged until the first forward
            self._is_watched = True
            start_watchdog(self)
        if torch.is_grad_enabled():
            self._check_trainable()
            for shards in self._shards:
                shards.enter_pass()
        for views in self._grad_views:
            views.free_cleared_grads()
        self.apply_user_writes()

    def sync_before_access(self) -> None:
        """Before the model is read outside its passes: apply writes to the masters, and check the last backward's
        consistency."""
        self._check_pending_comparison()
        self.apply_user_writes()

    @property
    def is_running(self) -> bool:
        return self.in_backward or bool(self.running_units)

    def _check_trainable(self) -> None:
        """Raise ConfigError for parameters and hooks that would use the unreduced gradient of one rank, and for
        parameters that were added after sharding."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self.buckets:
                for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                    if not bucket.trainable and parameter.requires_grad:
                        raise ConfigError(f"{slot.name} was unfrozen after it was sharded, and its gradient would be "
                                          "that of one rank: shard it with requires_grad, and freeze it afterwards")
                    if len(parameter._post_accumulate_grad_hooks or ()) > bucket.trainable:
                        raise ConfigError(f"{slot.name} has a hook of register_post_accumulate_grad_hook, which would "
                                          "see the gradient of one rank, or none: p.grad is there when backward() "
                                          "returns; take the step after it")
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in self._known_params and not isinstance(param_owner(parameter), FlatBucket):
                raise ConfigError(f"{name} was added to {type(self.module).__name__}, or replaced in it, after it was "
                                  "sharded, and each rank would train its own: change the model before it is sharded, "
                                  "or shard the new module as well")

    def reshard_model(self) -> None:
        """The pass is over: reshard all units, and show their shards."""
        for shards in self._shards:
            shards.leave_pass()
        self.reshard_all()

    def reshard_between_passes(self) -> None:
        """Before the parameters are used as shards: reshard what a forward without a backward left gathered."""
        self._abort_failed_backward()
        if not self.is_running and self.full_params_holder is None:
            self.reshard_model()

    def apply_master_edits(self) -> None:
        """The masters were written: recompute the working parameters and invalidate gathered ones."""
        for bucket in self.buckets:
            bucket.write_guard.take_writes()
        self._copy_masters_to_params()

    def apply_user_writes(self) -> None:
        """Apply writes to the sharded parameters (an optimizer step) to the working parameters."""
        written = False
        for bucket in self.buckets:
            if not bucket.is_unsharded:
                written |= bucket.write_guard.take_writes()
        if written:
            self.steps += 1
            self._copy_masters_to_params()

    def _copy_masters_to_params(self) -> None:
        self.weight_version += 1
        for bucket in self.buckets:
            bucket.secondary_shard = None  # out of date
            bucket.copy_masters_to_params()

    # ---- backward -----------------------------------------------------------------------------------------------

    def _abort_failed_backward(self) -> None:
        """Discard the incomplete gradients of a backward that raised: autograd calls no hook for that."""
        if self.in_backward and not self._backward_is_running():
            self._loss_was_scaled = False
            self.fail_backward(RuntimeError("a backward that failed"))

    def _begin_user_backward(self) -> None:
        self.apply_user_writes()
        if self.full_params_holder is not None:
            raise ConfigError(
                f"a backward inside {self.full_params_holder}: its parameters are gathered there; leave it first")
        for views in self._grad_views:
            views.take_user_grads()
        self.begin_backward(reduces=self.reduces_grads)
        for bucket in self.trained:
            bucket.grads.set_accumulation_dtype(in_shard_dtype=not self.reduces_grads)
            bucket.grads.sum_multiplier = bucket.grads.predivide_factor / (self.dp.size * self.loss_scaler.scale)
        self._backward_is_running = on_backward_end(self._end_user_backward)

    def _scale_for_backward(self) -> float:
        self._loss_was_scaled = True
        return self.loss_scaler.scale

    def _end_user_backward(self) -> None:
        try:
            is_scaled, self._loss_was_scaled = self._loss_was_scaled, False
            if self.loss_scaler.is_enabled and not is_scaled:
                raise ConfigError("fp16: a backward that does not come from what the outermost sharded module "
                                  "returned: its gradients are not scaled. Return what the loss is made of, or use "
                                  "bf16")
            self.complete_backward(ends_step=True)
            reached: ReachedParams = [frozenset(bucket.grads.params_with_grad) for bucket in self.trained]
            if self.reduces_grads:
                overflows = [~bucket.grads.shard.isfinite().all() for bucket in self.trained
                             if bucket.grads.is_reduced] if self.loss_scaler.is_enabled else []
                reached, overflow = self._compare_backwards(reached, overflows)
                self.loss_scaler.update(overflow)
                if overflow:  # without gradients the optimizer leaves the weights unchanged
                    for bucket in self.trained:
                        bucket.grads.discard()
                    reached = [frozenset() for _ in reached]
                    if self.dp.rank == 0:
                        print("fp16: a gradient overflowed, and what was accumulated is dropped; the loss scale is now "
                              f"{self.loss_scaler.scale:g}", file=sys.stderr)
            self.end_backward(retain_graph=False)
            self.reshard_model()
            if on_accelerator(self.device):  # free buffers for the next forward
                self.buffer_pool.clear()
            for views, indices in zip(self._grad_views, reached, strict=True):
                views.set_param_grads(indices)
        except BaseException as error:
            self.fail_backward(error)
            raise

    def _compare_backwards(self, reached: ReachedParams, overflows: Sequence[Tensor]) -> tuple[ReachedParams, bool]:
        """(parameters that some rank reached, whether a gradient overflowed on some rank). `overflows` are this rank's
        flags. Collective: one all-reduce, which also tells whether all ranks ran the same modules."""
        trace = self.take_run_digest()
        if self.dp.is_solo:
            return reached, any(map(bool, overflows))
        self._check_pending_comparison()
        self.log.record_barrier("the end of a backward")
        counts = [len(bucket.parameters) for bucket in self.trained]
        marks = [index in one for one, count in zip(reached, counts, strict=True) for index in range(count)]
        # on the device without waiting for it, unless a flag on the host is set
        on_host = any(bool(flag) for flag in overflows if not on_accelerator(flag))
        on_device = [flag for flag in overflows if on_accelerator(flag)]
        overflow = torch.stack(on_device).any() if on_device and not on_host else float(on_host)
        # one max all-reduce: max(trace) == -max(-trace) only if all ranks ran the same modules
        numbers = scalars_on_device(self.device, (trace, -trace, overflow, *marks))
        all_reduce_into(numbers, self.dp, "max").wait()
        self._pending_comparison = HostScalars(numbers)
        # the step depends on an overflow, so that the host waits for it
        if on_accelerator(self.device) and all(marks) and not self.loss_scaler.is_enabled:
            return reached, False
        _, _, any_overflow, *any_marks = self._pending_comparison.values
        if not on_accelerator(self.device):
            self._check_pending_comparison()
        marked = iter(any_marks)
        return [frozenset(index for index, mark in enumerate(islice(marked, count)) if mark)
                for count in counts], bool(any_overflow)

    def _check_pending_comparison(self) -> None:
        """Raise if the ranks ran different modules in the last backward. Called by all ranks."""
        if self._pending_comparison is not None:
            trace, minus_trace, *_ = self._pending_comparison.values
            self._pending_comparison = None
            if trace != -minus_trace:
                raise diverged_blocks_error(self.log, self.dp)


def reshard_models_with(parameters: Iterable[Tensor]) -> None:
    """Reshard the models that have one of these parameters, for an optimizer step or clipping: a forward with gradients
    leaves the outermost module gathered for its backward. Raises ConfigError after an interrupted backward."""
    wanted = {id(one) for one in parameters} if _ALL_ROOTS else set()
    for root in list(_ALL_ROOTS):
        if (root.gathered_numel or root.is_interrupted) and any(
                id(one) in wanted for bucket in root.buckets for one in bucket.parameters):
            root.check_not_interrupted()
            root.reshard_between_passes()


def _before_step(parameters: list[Tensor], has_closure: bool) -> None:
    reshard_models_with(parameters)
    with torch._C.DisableTorchFunctionSubclass():
        # a closure computes new gradients; otherwise raise before the optimizer changes any weight
        if not has_closure and any(isinstance(one.grad, UnreducedGrad) for one in parameters):
            raise UnreducedGrad.error()


before_optimizer_steps(_before_step)


# ---- clipping -------------------------------------------------------------------------------------------------------


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, but collective. Parameters that are not sharded count once."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    reshard_models_with(given)
    by_bucket: dict[FlatBucket, list[ShardedParam]] = defaultdict(list)
    for one in given:
        if isinstance(one, ShardedParam):
            by_bucket[bucket_of(one)].append(one)
    groups = {bucket.dp for bucket in by_bucket}
    if len(groups) > 1:
        raise ConfigError("the parameters are sharded over different groups of ranks: clip those of each group by "
                          "themselves")
    group = next(iter(groups), SOLO)
    sharded = [grad for bucket, members in by_bucket.items() for grad in _local_grads(bucket, members)]
    others = [one.grad for one in given if not isinstance(one, ShardedParam) and one.grad is not None]
    first = next(iter(by_bucket), None)
    if first is None:
        norm_device = others[0].device if others else torch.device("cpu")
    else:  # the same device on all ranks, even if one has no gradient
        norm_device = first.update_device if first.dp.own_backend_serves_cpu else first.device
        first.log.record_barrier("clip_grad_norm_()")
    # unsharded gradients are equal on all ranks: count rank 0's only
    counted = [*sharded, *(others if group.rank == 0 else ())]
    order = float(norm_type)
    terms = [norm_term(one, order).to(norm_device) for one in counted if one.numel()]
    # summed in fp64 over this rank and the group, then fp32
    stacked = torch.stack(terms) if terms else torch.zeros(1, dtype=torch.float64, device=norm_device)
    norm = (all_reduce(stacked.max(), group, "max") if order == math.inf
            else all_reduce(stacked.sum(), group).pow(1 / order)).float()
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise NumericsError(f"the norm of order {norm_type} of all gradients is {float(norm)}: they cannot be clipped")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for grad in (*sharded, *others):
        by_kind[grad.dtype, grad.device].append(grad)
    for (dtype, device), grads in by_kind.items():
        torch._foreach_mul_(grads, factor.to(device, dtype))
    return norm


def _local_grads(bucket: FlatBucket, parameters: Sequence[ShardedParam]) -> Iterator[Tensor]:
    """This rank's gradients of these parameters: the bucket's flat shard in one piece if the user replaced none."""
    with torch._C.DisableTorchFunctionSubclass():
        grads = [None if one.grad is None else local_tensor(one.grad) for one in parameters]
    if len(parameters) == len(bucket.parameters) and bucket.grads.is_reduced:
        address = bucket.grads.shard.untyped_storage().data_ptr()
        if all(one is not None and (not one.numel() or one.untyped_storage().data_ptr() == address) for one in grads):
            yield bucket.grads.shard
            return
    yield from (one for one in grads if one is not None)
