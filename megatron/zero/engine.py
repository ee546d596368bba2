"""ZeroEngine: the data-parallel engine behind `zero.initialize`. It assembles the parts and takes the steps.

    loss = engine(batch...);  engine.backward(loss);  engine.step()

Called once per micro-batch; `step` updates at the accumulation boundary only. pass_coordinator.py runs forwards and
backwards, state.py keeps what is saved. A step in the order of the code, with what each part sends (P parameters, N
data parallel ranks):

    reduce   backward has reduced the gradients: each rank holds its shard of their sum, with the loss scale on it
    norm     one all-reduce over the world of a dozen numbers: squared norm, overflow, consistency, loss, stop requests
    clip     nothing: unscaling, averaging and clipping are one factor, which the update applies
    update   nothing, for elementwise rules: each rank updates the fp32 masters of its shard (update.py)
    cast     nothing: the update also writes the shard in working precision
    gather   one all-gather of parameters a bucket (P/N from each rank), started as soon as the bucket is updated (an
             accelerator updates all at once), which overlaps the next forward; at stage 3 that forward does it, but
             for the small parameters that stay gathered

A *deferred* step takes the result of the norm on the device (step_result.py), and the host reads it later:
`read_step_result` is local, `finish_step` is collective and raises the errors of the step. Steps are deferred on an
accelerator, unless the loss scale is dynamic or the rule needs numbers on the host.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from megatron.config.tree import PrecisionConfig, QuantizeConfig, ZeroConfig
from megatron.distributed.collective_log import AFTER_STEP, STEP, CollectiveLog, assert_collective_call
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.distributed.rank_status import OPTIMIZER_STEP, STATUS
from megatron.distributed.step_consistency import NoGradForwardChecker, make_step_settings, settings_digest
from megatron.errors import ConfigError
from megatron.optim.loss_scale import LossScaleRule
from megatron.optim.one_bit import OneBitRule
from megatron.optim.rule import ParamGroup, StepScalars, UpdateRule
from megatron.zero.bucket import publish_masters
from megatron.zero.compression import CompressedBucketExchange, CompressedGradExchange
from megatron.zero.flat_buffers import BucketingConfig, BufferPool, bucket_dtypes
from megatron.zero.hooks import refuse_state_dict_loads, register_unit_hooks
from megatron.zero.layout import Slot
from megatron.zero.moq import MoQState
from megatron.zero.offload.storage import HOST, DeviceStorage, EngineStorage, Location
from megatron.zero.offload_states import LP_PARAMS, StateOffloader
from megatron.zero.partitioned_param import clear_param_owner
from megatron.zero.pass_coordinator import PassCoordinator, units_reused_within
from megatron.zero.stages import stage_policy
from megatron.zero.state import EngineState, StepCounters, broadcast_buffers, snapshot_module_buffers
from megatron.zero.step_result import MAX_EXTRA_SCALARS, GradNorm, StepReport, StepResultReader, clip_factor
from megatron.zero.units import ModelParamGuard, attach_main_grad_writers, build_units, detach_main_grad_writers
from megatron.zero.update import DelayedOptimizerUpdate, OptimizerUpdate
from mpu.collectives import all_reduce_into
from mpu.device import on_accelerator, scalars_on_device
from mpu.groups import Groups, split_into_replicas

NO_OPTIMIZER = "no optimizer: give optimizer= to zero.initialize, or optimizer.type in the configuration"


class ZeroEngine:
    def __init__(self, module: nn.Module, groups: Groups, *, zero: ZeroConfig, precision: PrecisionConfig,
                 rule: UpdateRule, param_groups: list[ParamGroup], device: torch.device,
                 engine_storage: EngineStorage | None = None, clip_grad: float = 0.0,
                 spike_sigmas: float | None = None, accumulation: int = 1,
                 quantize: QuantizeConfig = QuantizeConfig(), seed: int = 0) -> None:
        """`seed` is for stochastic rounding."""
        self.module, self.groups, self.param_groups, self.rule = module, groups, param_groups, rule
        self.micro_batch = 0  # samples per micro-batch, if the caller sets it; only compared between ranks
        self._policy = stage_policy(zero.zero_stage)
        self.micro_batches_taken = 0  # of this optimizer step, before the current one
        # Whether the next backward and step end an optimizer step; None: by the number of micro-batches.
        self.forced_boundary: bool | None = None
        self._in_no_sync = self._in_trial_backward = self.is_detached = False
        self._failed_backward: str | None = None  # error class of the last backward, if it failed
        self._losses: list[Tensor] = []  # losses of the current step, or the last one, divided
        self._loss_divisors = Counter[str]()  # "1/divisor" of each of them -> how many
        self._next_note: str | None = None  # note of the next report
        self.last_report: StepReport | None = None
        self.log = CollectiveLog(reductions_in_order=not self._policy.params_are_sharded or on_accelerator(device))
        broadcast_buffers(module.buffers(), groups.dp)
        drop_gradients(module)
        self.set_accumulation_steps(accumulation)
        comm = zero if not zero.prescale_gradients else replace(
            zero, prescale_gradients=False, gradient_predivide_factor=float(groups.dp.size))
        group_of = {parameter: number for number, group in enumerate(param_groups) for parameter in group["params"]}
        dtypes = bucket_dtypes(self._policy, precision, accumulation, masters_are_separate=quantize.quantize_training)
        self.engine_storage = engine_storage or EngineStorage(DeviceStorage(device),
                                                              DeviceStorage(device, dtypes.params))
        buffer_pool, size = BufferPool(), zero.shard_ranks(groups.dp.size)
        sharding = split_into_replicas(groups.dp, size) if 1 < size < groups.dp.size else None
        self.units = build_units(module, BucketingConfig(
            self._policy, comm, dtypes, groups.dp, device,
            zero.stage3_param_persistence_threshold, group_of.__getitem__, self.log, self.engine_storage, buffer_pool,
            sharding=sharding))
        attach_main_grad_writers(self.units)
        scaling = LossScaleRule() if not precision.fp16 else LossScaleRule(
            precision.loss_scale or precision.initial_loss_scale, precision.loss_scale_window, precision.hysteresis,
            precision.min_scale, dynamic=precision.loss_scale is None, is_enabled=True)
        self.state = EngineState(self.units, rule, scaling.initial_state(), groups.world,
                                 loads_masters=zero.load_from_fp32_weights)
        self.buckets, self.frozen_buckets = self.state.buckets, self.state.frozen_buckets
        self.all_buckets = self.state.all_buckets
        if (schedule := quantize.schedule) is not None:
            self.state.moq = MoQState(quantize, schedule, module, self.buckets, groups, seed)
            publish_masters(self.buckets)
        on_host = [bucket.storage.update_location is Location.HOST for bucket in self.buckets]
        rule.bind_device(HOST if all(on_host) else device, groups.world)
        for bucket in self.all_buckets:
            bucket.engine = ref(self)
        self.state_offloader = StateOffloader(self.all_buckets, buffer_pool, device)
        self.param_guard = ModelParamGuard(module, self.all_buckets)
        self._norm = GradNorm(self.buckets, groups)
        self._clip_grad, self._sum_divisor = clip_grad, groups.dp.size / comm.gradient_predivide_factor
        for bucket in self.buckets:
            bucket.grad_mean_factor = self._mean_factor
        self.update = (DelayedOptimizerUpdate if self.engine_storage.delays_update else OptimizerUpdate)(
            self.state, self.engine_storage, groups, rule, param_groups)
        # The optimizer's compressed communication, which replaces the gradient reduction (1-bit Adam and the like).
        self.compressed_exchange = CompressedGradExchange(
            self.state, groups, rule, param_groups) if isinstance(rule, OneBitRule) else None
        self._step_results = StepResultReader(self.state, groups, scaling, self.log, precision.max_skipped_in_a_row,
                                              spike_sigmas)
        # The host reads the result of a step later.
        self.is_deferred = self.update.is_batched and not rule.needs_host_scalars and not scaling.dynamic and \
            self.compressed_exchange is None and self.state.moq is None  # MoQ counts bits on the host
        max_in_flight = 1 if self._policy.optim_is_sharded or dtypes.copies_for_reduction(device) else None
        if any(on_host) and groups.dp.is_solo:  # no collective to overlap, only the copies to the host
            max_in_flight = 0
        self.pass_coordinator = PassCoordinator(
            self.units, self.log, NoGradForwardChecker(groups.dp, device, self.log),
            params_are_sharded=self._policy.params_are_sharded, max_live=zero.stage3_max_live_parameters,
            kept_for_backward=units_reused_within(zero.stage3_max_reuse_distance, self.units),
            prefetches=zero.overlap_comm and zero.stage3_prefetch_bucket_size > 0, max_in_flight=max_in_flight,
            allows_unused=zero.ignore_unused_parameters,
            current_step=lambda: self.state.counters.global_steps + 1)
        if self.engine_storage.delays_update:
            self.pass_coordinator.before_evaluation = partial(self.sync_delayed_update, "a forward of an evaluation")
        self._handles = refuse_state_dict_loads(self.units) + register_unit_hooks(self.units, self.pass_coordinator)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of `loss` divided by the number of micro-batches (without `scale_wrt_gas`: of `loss`).
        Returns the divided loss."""
        self._check_can_train("engine.backward()", LP_PARAMS)
        self._check_loss(loss)
        divisor = self.accumulation_steps if scale_wrt_gas else 1
        part, scaled = loss / divisor, loss * (self.state.counters.scaler.scale / divisor)
        if not self._in_trial_backward:
            if not self.has_gradients:  # the first micro-batch of a step
                self._losses = []
                self._loss_divisors.clear()
                if self.compressed_exchange is not None:
                    self._next_note = self.compressed_exchange.begin_step() or self._next_note
            self._losses.append(part.detach())
            self._loss_divisors[f"1/{divisor}"] += 1
        try:
            self.pass_coordinator.backward(scaled, retain_graph=retain_graph, ends_step=self.is_at_boundary,
                                           reduces=self._policy.grads_are_sharded or self.is_at_boundary)
        except BaseException as error:
            self.micro_batches_taken, self._failed_backward = 0, type(error).__name__
            self.pass_coordinator.fail_backward(error)  # discards what the step has accumulated
            raise
        self._failed_backward = None
        return part

    def _check_loss(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor):
            raise ConfigError(f"engine.backward() was given {loss!r:.80} ({type(loss).__name__}): give it the loss, a "
                              "tensor with one number")
        if loss.numel() != 1:
            raise ConfigError(f"engine.backward() was given a tensor of shape {list(loss.shape)}: take the mean() of "
                              "it")
        if not loss.requires_grad:
            advice = "run the forward outside of torch.no_grad(), on parameters that are not frozen"
            if not any(parameter.requires_grad for parameter in self.module.parameters()):
                advice = f"all parameters are frozen: call module.requires_grad_(True) before the forward, and {advice}"
            raise ConfigError(f"engine.backward() was given a loss that requires no gradient: {advice}")

    def step(self, extra_scalars: Sequence[Tensor | float] = (), engine_scalars: Sequence[float] = ()
             ) -> StepReport | None:
        """At the accumulation boundary: clip and update the weights; otherwise only count, and return None.

        `extra_scalars`, at most MAX_EXTRA_SCALARS numbers, and `engine_scalars` are summed over all ranks; the report
        has the sums."""
        self.finish_step()
        self._check_can_step()
        if not self.is_at_boundary:
            self.state.counters.micro_steps += 1
            self.micro_batches_taken += 1
            return None
        STATUS.set_phase(OPTIMIZER_STEP)
        self.pass_coordinator.reshard_all()  # a forward may have run since the backward
        try:
            self.last_report = self._update_or_skip(extra_scalars, engine_scalars)
        except BaseException as error:
            self.pass_coordinator.record_interruption(error)
            self.log.raise_root_cause(error)
            raise
        self.state.counters.micro_steps += 1
        self.micro_batches_taken = 0
        if self.is_deferred or self.last_report.applied:
            self.pass_coordinator.weight_version += 1
        STATUS.set_phase("")
        return self.last_report

    def _update_or_skip(self, extra_scalars: Sequence[Tensor | float], engine_scalars: Sequence[float]) -> StepReport:
        """Update the weights, or skip the step if a gradient is not finite or a spike, and discard the gradients."""
        counters, world, rule, device = self.state.counters, self.groups.world, self.rule, self.state.device
        veto_error, extra_scalars = self._collect_veto(extra_scalars)
        run_digest = self.pass_coordinator.take_run_digest()  # what this rank ran, for the comparison between ranks
        self.log.record_barrier(STEP)
        self.log.purpose = AFTER_STEP

        # ---- norm: the device computes it while the host digests the settings, which must be equal on all ranks
        norm = self._unreduced_norm if rule.is_compressed else self._norm
        square = norm.norm_squared()
        settings, digest = None, 0
        if not world.is_solo:
            settings = make_step_settings(counters.global_steps + 1, self._loss_divisors, self.accumulation_steps,
                                          self.micro_batch, self.param_groups)
            digest = settings_digest(settings, run_digest, world.size)  # so few bits that the sums are exact
        sums = scalars_on_device(device, (
            square, digest, digest * digest, veto_error is not None, *extra_scalars,
            *[0.0] * (MAX_EXTRA_SCALARS - len(extra_scalars)), *engine_scalars))
        all_reduce_into(sums, world).wait()  # [4 + MAX_EXTRA_SCALARS + engine scalars], in place

        # ---- clip: one factor of the gradients (`deferred_scalars` computes it on the device, `factor` is the host's)
        report = StepReport(sums, world.size, self._mean_factor(), self._clip_grad, veto_error,
                            number=counters.global_steps + 1, settings=settings, loss_scale=counters.scaler.scale,
                            lr=self.param_groups[0]["lr"], note=self._next_note,
                            losses=self._losses,  # not reset: a refused step may be called again
                            norm=norm, norm_limit=self._step_results.norm_limit,
                            given_scalar_count=len(extra_scalars))
        self._next_note = None

        # ---- update, cast and gather, bucket by bucket (update.py)
        scalars_on: Callable[[torch.device], StepScalars] | None = None  # None: the step is skipped
        if self.is_deferred:
            scalars_on = partial(report.deferred_scalars, counters.optimizer_steps)
        elif self._step_results.applied_or_raise(report):
            if rule.is_compressed:
                assert self.compressed_exchange is not None
                factor, report.grad_norm = self.compressed_exchange(self._mean_factor() * self._sum_divisor,
                                                                    self._clip_grad)
            else:
                factor = report.mean_factor * clip_factor(report.grad_norm, report.max_norm)
            if self.state.moq is not None:
                self.state.moq.advance(counters.applied_steps + 1)
            scalars_on = partial(StepScalars.for_applied_step, factor, counters.optimizer_steps)
        with self.state.guard_state_change("step"):
            if scalars_on is not None:
                self.update(scalars_on)
            for bucket in self.buckets:
                bucket.grads.discard()
            counters.global_steps += 1
            self._step_results.unread = report
        if not self.is_deferred:
            self._step_results.finish()
        return report

    def _collect_veto(self, extra_scalars: Sequence[Tensor | float]
                      ) -> tuple[str | None, Sequence[Tensor | float]]:
        """(why this rank refuses the step, or None; the extra scalars, if they can be sent). A veto of one rank raises
        on all of them after the all-reduce, in which the others wait."""
        veto_error = self.pass_coordinator.unused_param_error
        try:
            self.param_guard.check_before_step()
        except ConfigError as error:  # the user changed the model or a gradient, and the step would ignore it
            veto_error = veto_error or str(error)
        if len(extra_scalars) > MAX_EXTRA_SCALARS:
            return veto_error or (f"step(extra_scalars=...) has {len(extra_scalars)} numbers: give at most "
                                  f"{MAX_EXTRA_SCALARS}"), ()
        for value in extra_scalars:
            if isinstance(value, Tensor) and value.dim():
                return veto_error or (f"step(extra_scalars=...) has a tensor of shape {list(value.shape)}: give "
                                      "numbers, or tensors of shape []"), ()
        return veto_error, extra_scalars

    @cached_property
    def _unreduced_norm(self) -> GradNorm:
        return GradNorm(self.buckets, self.groups, unreduced=True)

    def _mean_factor(self) -> float:
        """The factor that turns a sum of scaled gradients into their mean."""
        return 1.0 / (self.state.counters.scaler.scale * self._sum_divisor)

    def finish_delayed_update(self) -> None:
        """Wait for a delayed update, if one is running, and gather its weights. Collective."""
        if self.update.running is not None:
            self.pass_coordinator.reshard_all()  # a forward without its backward may have gathered the old weights
            with self.state.guard_state_change("step"):
                self.update.finish()
            self.pass_coordinator.weight_version += 1

    def sync_delayed_update(self, caller: str) -> None:
        """Finish the last step before `caller` reads the weights. If a delayed update is running, all ranks must call
        it; the check raises an error if one does not."""
        if self.update.running is not None:
            self.assert_collective_call(f"{caller}, beside a delayed update")
            self.finish_delayed_update()
        self.wait_for_param_gathers()

    def finish_step(self) -> None:
        """Wait for the last step, count it, and raise its error, if any. All ranks must call it; the counters below may
        be read by a single rank."""
        self.finish_delayed_update()
        self._step_results.finish()
        self.pass_coordinator.forward_checker.raise_if_diverged()

    def read_step_result(self) -> StepReport | None:
        """Wait for the device, count the last step, and return its report. Local."""
        self._step_results.read()
        return self.last_report

    def _check_can_step(self) -> None:
        self._check_can_train("engine.step()")
        if self._in_no_sync:
            raise ConfigError("engine.step() inside no_sync(): gradients are not summed over the ranks there; call it "
                              "after the block, and after a backward outside of it")
        if self._failed_backward is not None:
            raise ConfigError(f"step() after a backward that failed ({self._failed_backward}): what had been "
                              "accumulated is gone, and the step starts again: call backward(loss) for each of its "
                              "micro-batches")
        if self.is_at_boundary and not all(bucket.grads.is_reduced for bucket in self.buckets):
            raise ConfigError("step() without gradients that are summed over the ranks: call backward(loss) before it, "
                              "outside of no_sync() and at the accumulation boundary")

    def _check_can_train(self, call: str, *needed: str) -> None:
        """Raise ConfigError without an optimizer, after an interrupted backward, step or load, and if one of the
        `needed` states (by default any) is offloaded."""
        if not self.buckets:
            raise ConfigError(f"{call}: this engine only evaluates, for zero.initialize was given {NO_OPTIMIZER}")
        self.pass_coordinator.check_not_interrupted()
        self.state.check_no_unfinished_change()
        for bucket in self.all_buckets:
            bucket.check_not_offloaded(call, *needed)

    def zero_grad(self) -> None:
        """Discard the accumulated gradients."""
        for bucket in self.buckets:
            bucket.grads.discard()

    @property
    def has_gradients(self) -> bool:
        """Gradients have been accumulated since the last step."""
        return any(bucket.grads.params_with_grad for bucket in self.buckets)

    @property
    def is_at_boundary(self) -> bool:
        """The current micro-batch is the last one of its optimizer step."""
        if self.forced_boundary is not None:
            return self.forced_boundary
        return self.micro_batches_taken + 1 >= self.accumulation_steps

    def set_accumulation_steps(self, micro_batches: int) -> None:
        """Set the number of micro-batches per optimizer step, from the next step on."""
        self.accumulation_steps = micro_batches
        self.log.accumulation_setting = f"gradient_accumulation_steps {micro_batches}"

    @contextmanager
    def backwards_without_step(self) -> Iterator[Callable[[], None]]:
        """Between two steps: each backward inside reduces its gradients over the ranks. The yielded function discards
        the gradients and restores the module buffers; so does the end of the block."""
        before, self.forced_boundary = self.forced_boundary, True
        restore_buffers = snapshot_module_buffers(self.module)

        def reset() -> None:
            self.zero_grad()
            restore_buffers()
            self.pass_coordinator.weight_version += 1

        try:
            self._in_trial_backward = True
            with nullcontext() if self.compressed_exchange is None else self.compressed_exchange.paused():
                yield reset
        finally:
            self._in_trial_backward, self.forced_boundary = False, before
            reset()
            self.pass_coordinator.take_run_digest()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not reduce gradients; the first backward after the block does. Stages 0 and 1
        only; call `step` outside."""
        if self._policy.grads_are_sharded:
            raise ConfigError("no_sync needs stage 0 or 1: gradients that are split are summed after every backward")
        before = self.forced_boundary, self._in_no_sync
        self.forced_boundary, self._in_no_sync = False, True
        try:
            yield
        finally:
            self.forced_boundary, self._in_no_sync = before

    def wait_for_param_gathers(self) -> None:
        """Wait for the running all-gathers of parameters, so that this rank may exit."""
        for bucket in self.all_buckets:
            bucket.wait_for_param_gather()

    def offload_states(self, states: Sequence[str], *, pinned: bool, non_blocking: bool) -> bool:
        """Move the states to the host between two steps. Returns whether that frees device memory. Collective."""
        if self.has_gradients:
            raise ConfigError("engine.offload_states() within a step, whose gradients are accumulated: call it after "
                              "the engine.step() that ends the step, or after engine.zero_grad()")
        for bucket in self.all_buckets:
            bucket.check_not_gathered_by_user("engine.offload_states()")
        if self.state_offloader.copy_streams is None:  # the device has no memory of its own, apart from the host
            return False
        self.param_guard.check_params_in_buffers()
        self.finish_step()
        self.pass_coordinator.reshard_all()
        self.wait_for_param_gathers()
        self.zero_grad()  # a forward without a backward may have written weight gradients early
        self.state_offloader.offload(states, pinned=pinned, non_blocking=non_blocking)
        return True

    def detach(self) -> None:
        """Remove all hooks and leave full parameters in the module, once; another engine may take it afterwards."""
        self.state_offloader.reload()
        self.finish_step()
        self.is_detached = True
        for handle in self._handles:
            handle.remove()
        detach_main_grad_writers(self.units)
        try:
            for bucket in self.all_buckets:
                bucket.gather()
                for parameter in bucket.parameters:  # ordinary tensors, which no engine owns
                    clear_param_owner(parameter)
        finally:  # also if NVMe fails
            self.engine_storage.close()

    # ---- counters -----------------------------------------------------------------------------------------------

    @property
    def backward_scale(self) -> float:
        """The factor that `backward` applies to the loss."""
        return self.state.counters.scaler.scale / self.accumulation_steps

    @property
    def counters(self) -> StepCounters:
        """With the last step counted: waits for the device. (`state.counters` does not.)"""
        self._step_results.read()
        return self.state.counters

    # ---- what a checkpoint holds --------------------------------------------------------------------------------

    def assert_collective_call(self, where: str) -> None:
        """Raise an error if a rank makes another call than `where` (collective_log.py). Collective."""
        assert_collective_call(self.log, self.groups.world, where)

    def check_before_save(self) -> None:
        """Raise ConfigError if the state is incomplete, offloaded, or written to by the user. Some ranks may see no
        error: the caller makes all ranks agree before they save."""
        for bucket in self.all_buckets:
            bucket.check_not_offloaded("a save")
        self.finish_step()
        self.state.check_no_unfinished_change()
        self.param_guard.check_user_writes(compare_values=True)

    def load_segments(self, names: Mapping[str, Collection[str]],
                      read: Callable[[str, Slot, int, Tensor], None]) -> None:
        """Load this rank's part of the parameters in `names` (kind -> names), then gather the weights. Collective,
        after `param_guard.check_before_load`.

        `read(kind, slot, offset, out)` fills each segment; if it fails on one rank, all raise its error. Accumulated
        gradients are discarded: the next micro-batch begins a step. The caller clears
        `state.unfinished_change` once it has restored the rest."""
        self.finish_step()
        self.pass_coordinator.reshard_all()
        self.param_guard.steps = 0
        self.zero_grad()
        self.micro_batches_taken = 0
        all_succeed_or_raise(lambda: self.state.load_segments(names, read), self.groups.world)
        publish_masters(self.all_buckets)
        self.pass_coordinator.weight_version += 1

    @property
    def compressed_exchanges(self) -> Sequence[CompressedBucketExchange]:
        """One for each bucket while gradients are compressed (compression.py), otherwise empty."""
        return () if self.compressed_exchange is None else self.compressed_exchange.bucket_exchanges


def drop_gradients(module: nn.Module) -> None:
    """Drop the gradients from before the engine was built, with a warning."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            warnings.warn(f"{name}.grad, made before zero.initialize, is dropped, and so are others", stacklevel=2)
            module.zero_grad()
            return
