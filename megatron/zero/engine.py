"""ZeroEngine: the data-parallel engine behind `zero.initialize`. It assembles the parts and counts micro-batches.

    loss = engine(batch...);  engine.backward(loss);  engine.step()

Called once per micro-batch; `step` updates at the accumulation boundary only. backward.py runs the passes, step.py the
optimizer step, state.py keeps what is saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.tree import PrecisionConfig, QuantizeConfig, ZeroConfig
from megatron.distributed.collective_log import CollectiveLog, assert_collective_call, register_owning_engine
from megatron.distributed.rank_status import OPTIMIZER_STEP, STATUS
from megatron.errors import ConfigError
from megatron.optim.loss_scale import LossScaleState
from megatron.optim.rule import ParamGroup, UpdateRule
from megatron.zero.backward import PassCoordinator, ReductionOrder
from megatron.zero.bucket import publish_masters
from megatron.zero.compression import CompressedBucketExchange
from megatron.zero.flat_buffers import BufferPool, bucket_dtypes, loss_scale_rule
from megatron.zero.hooks import refuse_state_dict_loads, register_unit_hooks
from megatron.zero.layout import Slot
from megatron.zero.moq import MoQState
from megatron.zero.offload.storage import HOST, DeviceStorage, EngineStorage, StateSegment
from megatron.zero.param_coordinator import NoopCoordinator, ParamCoordinator, units_reused_within
from megatron.zero.stages import make_comm_config, stage_policy
from megatron.zero.state import LP_PARAMS, EngineState, ModuleBufferSnapshot, StateOffloader, broadcast_module_buffers
from megatron.zero.step import OptimizerStep, StepReport
from megatron.zero.step_result import NoGradForwardChecker
from megatron.zero.units import (BucketingConfig, ModelParamGuard, attach_main_grad_writers, build_units,
                                 detach_main_grad_writers)
from mpu.device import on_accelerator
from mpu.groups import Groups

NO_OPTIMIZER = "no optimizer: give optimizer= to zero.initialize, or optimizer.type in the configuration"

MAX_EXTRA_SCALARS = 8
"""Numbers of a caller that travel in the exchange of a step; always so many, so that ranks which give others meet."""


class ZeroEngine:
    def __init__(self,
                 module: nn.Module,
                 groups: Groups,
                 *,
                 zero: ZeroConfig,
                 precision: PrecisionConfig,
                 rule: UpdateRule,
                 param_groups: list[ParamGroup],
                 device: torch.device,
                 engine_storage: EngineStorage | None = None,
                 clip_grad: float = 0.0,
                 accumulation: int = 1,
                 quantize: QuantizeConfig = QuantizeConfig(),
                 seed: int = 0) -> None:
        """`seed` is that of stochastic rounding."""
        self.module, self.groups, self.param_groups, self.rule = module, groups, param_groups, rule
        self.micro_batch: int | None = None
        """Samples of a micro-batch, where somebody says; here they are only compared with those of other ranks."""
        self._policy = stage_policy(zero.zero_stage)
        self._micro_batches = 0  # of this optimizer step, before the one under way
        self._is_boundary: bool | None = None
        self._in_no_sync = self.is_detached = False
        self._failed_backward: str | None = None  # the last one, where nothing has been accumulated since then
        self.last_report: StepReport | None = None
        self.log = CollectiveLog(reductions_in_order=not self._policy.params_are_sharded or on_accelerator(device))
        broadcast_module_buffers(module, groups)
        drop_gradients(module)
        self.set_accumulation_steps(accumulation)
        comm = make_comm_config(zero, groups.dp.size)
        group_of = {parameter: number for number, group in enumerate(param_groups) for parameter in group["params"]}
        kinds = bucket_dtypes(self._policy, precision, accumulation, masters_are_separate=quantize.quantize_training)
        self.engine_storage = engine_storage or EngineStorage(DeviceStorage(device), DeviceStorage(
            device, kinds.params))
        turns = BufferPool()
        self._units = build_units(module, BucketingConfig(
            self._policy, comm, kinds, groups.dp, device,
            zero.stage3_param_persistence_threshold, group_of.__getitem__, self.log, self.engine_storage, turns))
        attach_main_grad_writers(self._units)
        scaling = loss_scale_rule(precision)
        self.state = EngineState(self._units,
                                 rule,
                                 scaling.initial_state(),
                                 groups.world,
                                 loads_masters=zero.load_from_fp32_weights)
        self.buckets, self.frozen_buckets = self.state.buckets, self.state.frozen_buckets
        if (schedule := quantize.schedule) is not None:
            self.state.moq = MoQState(quantize, schedule, module, self.buckets, groups, seed)
            publish_masters(self.buckets)
        on_host = [bucket.storage.updates_on_host for bucket in self.buckets]
        rule.bind_device(HOST if all(on_host) else device, groups.world)
        for bucket in (*self.buckets, *self.frozen_buckets):
            register_owning_engine(bucket, self)
        self._state_offloader = StateOffloader([*self.buckets, *self.frozen_buckets], turns, device)
        self._param_guard = ModelParamGuard(module, [*self.buckets, *self.frozen_buckets])
        self._optimizer_step = OptimizerStep(self.state,
                                             self.engine_storage,
                                             groups,
                                             rule,
                                             param_groups,
                                             scaling,
                                             self.log,
                                             clip_grad=clip_grad,
                                             divisor=groups.dp.size / comm.gradient_predivide_factor,
                                             max_skipped=precision.max_skipped_in_a_row)
        self.param_coordinator = NoopCoordinator() if not self._policy.params_are_sharded else ParamCoordinator(
            self._units, max_live=zero.stage3_max_live_parameters,
            kept_for_backward=units_reused_within(zero.stage3_max_reuse_distance, self._units),
            prefetches=zero.overlap_comm and zero.stage3_prefetch_bucket_size > 0, log=self.log)
        one_by_one = self._policy.optim_is_sharded or kinds.copies_for_reduction(device)
        at_once = any(on_host) and groups.dp.is_solo  # nothing is on its way but to the host
        reductions = ReductionOrder(self._units, 0 if at_once else 1 if one_by_one else None, self.log)
        self.pass_coordinator = PassCoordinator(self._units,
                                                self.param_coordinator,
                                                reductions,
                                                self.log,
                                                NoGradForwardChecker(groups.dp, device, self.log),
                                                allows_unused=zero.ignore_unused_parameters,
                                                params_are_sharded=self._policy.params_are_sharded,
                                                current_step=lambda: self.state.counters.global_steps + 1)
        if self.engine_storage.delays_update:
            self.pass_coordinator.before_evaluation = partial(self.sync_delayed_update, "a forward of an evaluation")
        self._handles = refuse_state_dict_loads(self._units) + register_unit_hooks(self._units, self.pass_coordinator)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_forward_modules(self, modules: Sequence[nn.Module]) -> None:
        """The forward under way calls these units and no others, in this order: whoever leaves some out and says so
        here gathers nothing in vain, and keeps nobody waiting for their gradients. The same on all ranks."""
        self.pass_coordinator.set_forward_modules(modules)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of `loss` divided by the number of micro-batches (unless `scale_wrt_gas` is off); returns that
        quotient."""
        self._check_can_train("engine.backward()")
        self._state_offloader.check_not_offloaded("engine.backward()", LP_PARAMS)
        _check_loss(loss, self.module)
        divisor = self.accumulation_steps if scale_wrt_gas else 1
        part, scaled = loss / divisor, loss * (self.scaler.scale / divisor)
        self._optimizer_step.before_backward(part, first=not self.has_gradients, divisor=divisor)
        try:
            self.pass_coordinator.backward(scaled, retain_graph=retain_graph, ends_step=self.is_at_boundary,
                                           reduces=self._policy.grads_are_sharded or self.is_at_boundary)
        except BaseException as error:  # what had been accumulated is gone
            self._micro_batches, self._failed_backward = 0, type(error).__name__
            raise
        self._failed_backward = None
        return part

    def step(
            self,
            lr: float | None = None,
            extra_scalars: Sequence[Tensor | float] = (),
            engine_scalars: Sequence[float] = (),
    ) -> StepReport | None:
        """At the accumulation boundary: clip, update, publish; None in between. `lr` sets that of all groups. `riders`
        are at most MAX_EXTRA_SCALARS numbers to be summed over all ranks; those given `aside` come back beside them."""
        self._check_can_train("engine.step()")
        self._state_offloader.check_not_offloaded("engine.step()")
        if self._in_no_sync:
            raise ConfigError("engine.step() inside no_sync(): gradients are not summed over the ranks there; call it "
                              "after the block, and after a backward outside of it")
        if self._failed_backward is not None:
            raise ConfigError(f"step() after a backward that failed ({self._failed_backward}): what had been "
                              "accumulated is gone, and the step begins anew: call backward(loss) for each of its "
                              "micro-batches")
        boundary = self.is_at_boundary
        if boundary and not all(bucket.grads.is_reduced for bucket in self.buckets):
            raise ConfigError("step() without gradients that are summed over the ranks: call backward(loss) before it, "
                              "outside of no_sync() and at the accumulation boundary")
        if not boundary:
            self.state.counters.micro_steps += 1
            self._micro_batches += 1
            return None
        for group in self.param_groups if lr is not None else ():
            group["lr"] = lr
        STATUS.set_phase(OPTIMIZER_STEP)
        self.param_coordinator.release_all()  # a forward may have run since the backward
        self.finish_delayed_update()
        try:
            scalars_error = _extra_scalars_error(extra_scalars)
            veto_error = self.pass_coordinator.veto_error() or self._param_guard.veto_error(
            ) or self._user_modified_grad_error() or scalars_error
            filled = [*(extra_scalars if scalars_error is None else ()),
                      *(MAX_EXTRA_SCALARS * [0.0])][:MAX_EXTRA_SCALARS]
            self.last_report = self._optimizer_step(self.pass_coordinator.take_run_digest(), veto_error, filled,
                                                    engine_scalars, self.accumulation_steps, self.micro_batch)
            self.last_report.given_scalar_count = len(extra_scalars)
        except BaseException as error:
            self.pass_coordinator.record_interruption(error)
            self.log.raise_root_cause(error)
            raise
        self.state.counters.micro_steps += 1
        self._micro_batches = 0
        self.pass_coordinator.weight_version += not self.last_report.is_on_host or self.last_report.applied
        STATUS.set_phase("")
        return self.last_report

    def _user_modified_grad_error(self) -> str | None:
        """A gradient that the user has set since the backward, and nobody would look at."""
        try:
            for bucket in self.buckets:
                bucket.grads.check_user_modified_grads()
        except ConfigError as error:
            return str(error)
        return None

    def finish_delayed_update(self) -> None:
        """What runs beside the program is over, and the weights are those of the last step. Collective."""
        if self._optimizer_step.has_delayed_update:
            self.param_coordinator.release_all()  # a forward that has no backward yet is of the weights before
            self._optimizer_step.finish_delayed_update()
            self.increment_weight_version()

    def sync_delayed_update(self, caller: str) -> None:
        """Somebody is about to look at the weights: they are those of the last step, all here. Every rank comes here
        where an update runs beside the program."""
        if self._optimizer_step.has_delayed_update:
            self.assert_collective_call(f"{caller}, beside a delayed update")
            self.finish_delayed_update()
        self.wait_for_param_gathers()

    def finish_step(self) -> None:
        """Wait for the last step, and count it as what it was; raises what was wrong with it (step.py). Every rank
        calls it; the counters below may be asked for by one."""
        self.finish_delayed_update()
        self._optimizer_step.finish_step()
        self.pass_coordinator.forward_checker.raise_if_diverged()

    def read_step_result(self) -> StepReport | None:
        """The last step, counted as what it was, once the device knows. Local: one rank alone may ask."""
        self._optimizer_step.read_step_result()
        return self.last_report

    @property
    def is_deferred(self) -> bool:
        """The host learns of a step after it was taken."""
        return self._optimizer_step.is_deferred

    def _check_can_train(self, call: str) -> None:
        """Refuse to go on from what ended half way, and without an optimizer."""
        if not self.buckets:
            raise ConfigError(f"{call}: this engine only evaluates, for zero.initialize was given {NO_OPTIMIZER}")
        self.pass_coordinator.check_not_interrupted()
        self.state.check_no_unfinished_change()

    def zero_grad(self) -> None:
        """Forget what has been accumulated."""
        for bucket in self.buckets:
            bucket.grads.discard()

    @property
    def has_gradients(self) -> bool:
        """A step is under way: something has been accumulated for it."""
        return not all(bucket.grads.is_empty for bucket in self.buckets)

    @property
    def is_at_boundary(self) -> bool:
        """The current micro-batch is the last one of its optimizer step."""
        return self._micro_batches + 1 >= self.accumulation_steps if self._is_boundary is None else self._is_boundary

    def set_accumulation_steps(self, micro_batches: int) -> None:
        """So many are a step, from the next one on."""
        self.accumulation_steps = micro_batches
        self.log.accumulation_setting = f"gradient_accumulation_steps {micro_batches}"

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backward and step end an optimizer step; None: count micro-batches again."""
        self._is_boundary = is_boundary

    @contextmanager
    def backwards_without_step(self) -> Iterator[Callable[[], None]]:
        """Between two steps: each backward inside sums its gradients over the ranks. Afterwards gradients are forgotten
        and buffers as they were, and so they are for a forward before which what is yielded is called."""
        before, self._is_boundary = self._is_boundary, True
        buffers = ModuleBufferSnapshot(self.module)

        def reset() -> None:
            self.zero_grad()
            buffers.restore()
            self.increment_weight_version()

        try:
            with self._optimizer_step.paused():
                yield reset
        finally:
            self._is_boundary = before
            reset()
            self.pass_coordinator.take_run_digest()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside leaves gradients on the rank, to be summed over ranks by the first backward outside."""
        if self._policy.grads_are_sharded:
            raise ConfigError("no_sync needs stage 0 or 1: gradients that are split are summed after every backward")
        before = self._is_boundary, self._in_no_sync
        self._is_boundary, self._in_no_sync = False, True
        try:
            yield
        finally:
            self._is_boundary, self._in_no_sync = before

    def wait_for_param_gathers(self) -> None:
        """Wait for what is still on its way between ranks, so that this one may leave."""
        for bucket in (*self.buckets, *self.frozen_buckets):
            bucket.wait_for_param_gather()

    def offload_states(self, states: Sequence[str], *, pinned: bool, non_blocking: bool) -> bool:
        """Set these aside on the host (aside.py), between two steps; whether that wins memory. Every rank calls it."""
        if self.has_gradients:
            raise ConfigError("engine.offload_states() within a step, whose gradients are accumulated: call it after "
                              "the engine.step() that ends the step, or after engine.zero_grad()")
        for bucket in (*self.buckets, *self.frozen_buckets):
            bucket.check_not_gathered_by_user("engine.offload_states()")
        if not self._state_offloader.frees_memory:
            return False
        self._param_guard.check_params_in_buffers()
        self.finish_step()
        self.param_coordinator.release_all()
        self.wait_for_param_gathers()
        self.zero_grad()  # a forward without a backward may have begun some
        self._state_offloader.offload(states, pinned=pinned, non_blocking=non_blocking)
        return True

    def reload_states(self, *, non_blocking: bool = False) -> None:
        self._state_offloader.reload(non_blocking=non_blocking)

    def detach(self) -> None:
        """Leave the module to itself: no hooks, and whole parameters. Once: another engine may have it afterwards."""
        self.reload_states()
        self.finish_step()
        self.is_detached = True
        for handle in self._handles:
            handle.remove()
        detach_main_grad_writers(self._units)
        try:
            for bucket in (*self.buckets, *self.frozen_buckets):
                bucket.release_params()
        finally:  # of a drive that fails as well
            self.engine_storage.close()

    def unit_modules(self) -> list[nn.Module]:
        """The modules whose parameters come and go together, the whole model first."""
        return [unit.module for unit in self._units]

    # ---- things to ask ------------------------------------------------------------------------------------------

    @property
    def scaler(self) -> LossScaleState:
        return self.state.counters.scaler

    @property
    def backward_scale(self) -> float:
        """What `backward` multiplies the loss by."""
        return self.scaler.scale / self.accumulation_steps

    @property
    def global_steps(self) -> int:
        return self.state.counters.global_steps

    @property
    def skipped_steps(self) -> int:
        self._optimizer_step.read_step_result()
        return self.state.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        return self.state.counters.micro_steps

    @property
    def optimizer_steps(self) -> int:
        self._optimizer_step.read_step_result()
        return self.state.counters.optimizer_steps

    @property
    def applied_steps(self) -> int:
        self._optimizer_step.read_step_result()
        return self.state.counters.applied_steps

    # ---- what a checkpoint holds --------------------------------------------------------------------------------

    def state_segments(self, kinds: tuple[str, ...], frozen: bool = True) -> Iterator[tuple[Slot, int, StateSegment]]:
        """(slot, offset in the slot, run of the state) for everything this rank is to write."""
        return self.state.segments_to_save(kinds, frozen)

    def assert_collective_call(self, where: str) -> None:
        """Every rank comes here, whatever it exchanges then; one that is elsewhere is an error (together.py)."""
        assert_collective_call(self.log, self.groups.world, where)

    def guard_state_change(self, what: str) -> AbstractContextManager[None]:
        """Where what is inside ends half way, steps and saves are refused until a load."""
        return self.state.guard_state_change(what)

    def increment_weight_version(self) -> None:
        """A backward of a forward that ran before now would mix old and new weights."""
        self.pass_coordinator.weight_version += 1

    def check_before_save(self) -> None:
        """Refuse a state that is half a step's, or that somebody wrote to. What one rank sees the others may not: all
        must agree on this before they save."""
        self._state_offloader.check_not_offloaded("a save")
        self.finish_step()
        self.state.check_no_unfinished_change()
        self._param_guard.check_user_writes(compare_values=True)

    def check_before_load(self) -> None:
        """Refuse where new weights would not reach the model; to be agreed on as well."""
        self._state_offloader.check_not_offloaded("a load")
        self._param_guard.check_before_load()

    def load_segments(self, names: Mapping[str, Collection[str]], read: Callable[[str, Slot, int, Tensor], None],
                      all_succeed_or_raise: Callable[[Callable[[], None]], None] = lambda action: action()) -> None:
        """Fill what this rank holds of the parameters named for each kind: `read(kind, slot, offset, out)` for every
        run. Then publish the weights, which is collective: `agreed` runs an action, and raises on every rank where it
        failed on one. What has been accumulated is discarded: the next micro-batch begins a step."""
        self.finish_step()
        self.param_coordinator.release_all()
        self._param_guard.begin_load()
        self.zero_grad()
        self._micro_batches = 0
        all_succeed_or_raise(lambda: self.state.load_segments(names, read))
        self.state.publish_loaded()
        self._sync_exchange_with_rule()
        self.increment_weight_version()

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of optimizer state beside the weight."""
        return self.rule.states

    def scalar_state(self) -> dict[str, Any]:
        """Everything of the engine that a resumed run must know besides tensors."""
        self.finish_step()
        return self.state.scalar_state()

    def reset_optimizer_state(self) -> None:
        self.finish_step()  # a step that the host has not heard of is one of those
        self.state.reset_optimizer_state()
        self._sync_exchange_with_rule()

    def restore_scalar_state(self, saved: dict[str, Any]) -> None:
        self.state.restore_scalar_state(saved)
        self._sync_exchange_with_rule()

    @property
    def compressed_exchanges(self) -> Sequence[CompressedBucketExchange]:
        """What travels in the place of gradients, bucket by bucket, while something does (own_exchange.py)."""
        return (
        ) if self._optimizer_step.compressed_exchange is None else self._optimizer_step.compressed_exchange.bucket_exchanges

    def invalidate_communicated_states(self, bucket: object) -> None:
        """What was known of them from what travelled is out of date. Collective where they are split."""
        for line in self.compressed_exchanges:
            if line.bucket is bucket:
                line.states_were_modified(self.rule)

    def _sync_exchange_with_rule(self) -> None:
        if self._optimizer_step.compressed_exchange is not None:
            self._optimizer_step.compressed_exchange.sync_with_rule()


def _check_loss(loss: object, module: nn.Module) -> None:
    if not isinstance(loss, Tensor):
        raise ConfigError(f"engine.backward() was given {loss!r:.80} ({type(loss).__name__}): give it the loss, a "
                          "tensor with one number")
    if loss.numel() != 1:
        raise ConfigError(f"engine.backward() was given a tensor of shape {list(loss.shape)}: take the mean() of it")
    if not loss.requires_grad:
        advice = "run the forward outside of torch.no_grad(), on parameters that are not frozen"
        if not any(parameter.requires_grad for parameter in module.parameters()):
            advice = f"all parameters are frozen: call module.requires_grad_(True) before the forward, and {advice}"
        raise ConfigError(f"engine.backward() was given a loss that requires no gradient: {advice}")


def _extra_scalars_error(extra_scalars: Sequence[Tensor | float]) -> str | None:
    """Why these cannot travel. Each rank's caller chooses them, and the exchange has one length."""
    if len(extra_scalars) > MAX_EXTRA_SCALARS:
        return f"step(riders=...) has {len(extra_scalars)} numbers: give at most {MAX_EXTRA_SCALARS}"
    shapes = (list(value.shape) for value in extra_scalars if isinstance(value, Tensor) and value.dim())
    return next((f"step(riders=...) has a tensor of shape {shape}: give numbers, or tensors of shape []"
                 for shape in shapes), None)


def drop_gradients(module: nn.Module) -> None:
    """Those of a backward before the engine was there belong to no step of it."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            warnings.warn(f"{name}.grad, made before zero.initialize, is dropped, and so are others", stacklevel=2)
            module.zero_grad()
            return
