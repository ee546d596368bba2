"""ZeroEngine: the data-parallel engine a training loop talks to. `zero.initialize` builds one.

    loss = engine(batch...);  engine.backward(loss);  engine.step()

It is called once per micro-batch; `step` does something only at the accumulation boundary. What it does is done by its
parts: passes.py (a forward and a backward), step.py (the optimizer step), state.py (what lasts, and checkpoints). Here
they are put together, and micro-batches are counted.
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
from megatron.errors import ConfigError
from megatron.optim.loss_scale import LossScaleState
from megatron.optim.rule import ParamGroup, Rule
from megatron.whereabouts import HERE, OPTIMIZER_STEP
from megatron.zero.aside import WEIGHTS, Aside
from megatron.zero.bucket import publish
from megatron.zero.buffers import BufferCopy, copy_buffers_from_first
from megatron.zero.exchanges import ExchangeLog
from megatron.zero.forwards import ForwardCheck
from megatron.zero.homes.here import Here
from megatron.zero.homes.shelf import HOST, Homes, Run
from megatron.zero.hooks import attach, guard_loading
from megatron.zero.layout import Slot
from megatron.zero.own_exchange import Line
from megatron.zero.passes import Passes
from megatron.zero.policy import policy, wire
from megatron.zero.precision import dtypes, scale_rule
from megatron.zero.quantise import Quantisation
from megatron.zero.reductions import ReductionOrder
from megatron.zero.residency import Residency, Resident, reused_within
from megatron.zero.roster import Roster
from megatron.zero.state import State
from megatron.zero.step import Step, StepReport
from megatron.zero.together import meet, own
from megatron.zero.turns import Turns
from megatron.zero.units import Cut, build_units, connect_sinks, disconnect_sinks
from mpu.device import on_accelerator
from mpu.groups import Groups


NO_OPTIMIZER = "no optimizer: give optimizer= to zero.initialize, or optimizer.type in the configuration"

MOST_RIDERS = 8
"""Numbers of a caller that travel in the exchange of a step; always so many, so that ranks which give others meet."""


class ZeroEngine:
    def __init__(self, module: nn.Module, groups: Groups, *, zero: ZeroConfig, precision: PrecisionConfig, rule: Rule,
                 param_groups: list[ParamGroup], device: torch.device, homes: Homes | None = None,
                 clip_grad: float = 0.0, accumulation: int = 1, quantize: QuantizeConfig = QuantizeConfig(),
                 seed: int = 0) -> None:
        """`seed` is that of stochastic rounding."""
        self.module, self.groups, self.param_groups, self.rule = module, groups, param_groups, rule
        self.micro_batch: int | None = None
        """Samples of a micro-batch, where somebody says; here they are only compared with those of other ranks."""
        self._policy = policy(zero.zero_stage)
        self._micro_batches = 0  # of this optimizer step, before the one under way
        self._boundary: bool | None = None
        self._in_no_sync = self.is_detached = False
        self._failed_backward: str | None = None  # the last one, where nothing has been accumulated since then
        self.last_report: StepReport | None = None
        self.log = ExchangeLog(sums_in_order=not self._policy.split_params or on_accelerator(device))
        copy_buffers_from_first(module, groups)
        forget_gradients(module)
        self.accumulate(accumulation)
        travel = wire(zero, groups.dp.size)
        group_of = {parameter: number for number, group in enumerate(param_groups) for parameter in group["params"]}
        kinds = dtypes(self._policy, precision, accumulation, apart=quantize.quantize_training)
        self.homes = homes or Homes(Here(device), Here(device, kinds.work))
        turns = Turns()
        self._units = build_units(module, Cut(
            self._policy, travel, kinds, groups.dp, device,
            zero.stage3_param_persistence_threshold, group_of.__getitem__, self.log, self.homes, turns))
        connect_sinks(self._units)
        scaling = scale_rule(precision)
        self.state = State(self._units, rule, scaling.start(), groups.world, loads_masters=zero.load_from_fp32_weights)
        self.buckets, self.frozen = self.state.buckets, self.state.frozen
        if (schedule := quantize.schedule) is not None:
            self.state.quantisation = Quantisation(quantize, schedule, module, self.buckets, groups, seed)
            publish(self.buckets)
        on_host = [bucket.home.walks_on_host for bucket in self.buckets]
        rule.settle_on(HOST if all(on_host) else device, groups.world)
        for bucket in (*self.buckets, *self.frozen):
            own(bucket, self)
        self._aside = Aside([*self.buckets, *self.frozen], turns, device)
        self._roster = Roster(module, [*self.buckets, *self.frozen])
        self._step = Step(self.state, self.homes, groups, rule, param_groups, scaling, self.log,
                          clip_grad=clip_grad, divisor=groups.dp.size / travel.predivide,
                          max_skipped=precision.max_skipped_in_a_row)
        self.residency = Resident() if not self._policy.split_params else Residency(
            self._units, max_live=zero.stage3_max_live_parameters,
            stays=reused_within(zero.stage3_max_reuse_distance, self._units),
            prefetches=zero.overlap_comm and zero.stage3_prefetch_bucket_size > 0, log=self.log)
        one_by_one = self._policy.split_optim or kinds.sends_copies(device)
        at_once = any(on_host) and groups.dp.is_solo  # nothing is on its way but to the host
        reductions = ReductionOrder(self._units, 0 if at_once else 1 if one_by_one else None, self.log)
        self.passes = Passes(self._units, self.residency, reductions, self.log,
                             ForwardCheck(groups.dp, device, self.log), allows_unused=zero.ignore_unused_parameters,
                             splits_parameters=self._policy.split_params,
                             step_under_way=lambda: self.state.counters.global_steps + 1)
        if self.homes.delays:
            self.passes.before_evaluation = partial(self.look_at_newest, "a forward of an evaluation")
        self._handles = guard_loading(self._units) + attach(self._units, self.passes)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def will_run(self, modules: Sequence[nn.Module]) -> None:
        """The forward under way calls these units and no others, in this order: whoever leaves some out and says so
        here gathers nothing in vain, and keeps nobody waiting for their gradients. The same on all ranks."""
        self.passes.announce(modules)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of `loss` divided by the number of micro-batches (unless `scale_wrt_gas` is off); returns that
        quotient."""
        self._check_trains("engine.backward()")
        self._aside.check_here("engine.backward()", WEIGHTS)
        _check_loss(loss, self.module)
        divisor = self.accumulation if scale_wrt_gas else 1
        part, scaled = loss / divisor, loss * (self.scaler.scale / divisor)
        self._step.begin_with(part, first=not self.has_gradients, divisor=divisor)
        try:
            self.passes.backward(scaled, retain_graph=retain_graph, ends_step=self.at_boundary,
                                 reduces=self._policy.split_grads or self.at_boundary)
        except BaseException as error:  # what had been accumulated is gone
            self._micro_batches, self._failed_backward = 0, type(error).__name__
            raise
        self._failed_backward = None
        return part

    def step(self, lr: float | None = None, riders: Sequence[Tensor | float] = (), aside: Sequence[float] = (),
             ) -> StepReport | None:
        """At the accumulation boundary: clip, update, publish; None in between. `lr` sets that of all groups. `riders`
        are at most MOST_RIDERS numbers to be summed over all ranks; those given `aside` come back beside them."""
        self._check_trains("engine.step()")
        self._aside.check_here("engine.step()")
        if self._in_no_sync:
            raise ConfigError("engine.step() inside no_sync(): gradients are not summed over the ranks there; call it "
                              "after the block, and after a backward outside of it")
        if self._failed_backward is not None:
            raise ConfigError(f"step() after a backward that failed ({self._failed_backward}): what had been "
                              "accumulated is gone, and the step begins anew: call backward(loss) for each of its "
                              "micro-batches")
        boundary = self.at_boundary
        if boundary and not all(bucket.grads.is_summed for bucket in self.buckets):
            raise ConfigError("step() without gradients that are summed over the ranks: call backward(loss) before it, "
                              "outside of no_sync() and at the accumulation boundary")
        if not boundary:
            self.state.counters.micro_steps += 1
            self._micro_batches += 1
            return None
        for group in self.param_groups if lr is not None else ():
            group["lr"] = lr
        HERE.enter(OPTIMIZER_STEP)
        self.residency.done_with_all()  # a forward may have run since the backward
        self.finish_update()
        try:
            unfit = _against(riders)
            objection = self.passes.objection() or self._roster.objection() or self._set_by_hand() or unfit
            filled = [*(riders if unfit is None else ()), *(MOST_RIDERS * [0.0])][:MOST_RIDERS]
            self.last_report = self._step(self.passes.take_trace(), objection, filled, aside, self.accumulation,
                                          self.micro_batch)
            self.last_report.given = len(riders)
        except BaseException as error:
            self.passes.note_interruption(error)
            self.log.explain(error)
            raise
        self.state.counters.micro_steps += 1
        self._micro_batches = 0
        self.passes.weights += not self.last_report.is_known or self.last_report.applied
        HERE.enter("")
        return self.last_report

    def _set_by_hand(self) -> str | None:
        """A gradient that the user has set since the backward, and nobody would look at."""
        try:
            for bucket in self.buckets:
                bucket.grads.heed()
        except ConfigError as error:
            return str(error)
        return None

    def finish_update(self) -> None:
        """What runs beside the program is over, and the weights are those of the last step. Collective."""
        if self._step.has_update_under_way:
            self.residency.done_with_all()  # a forward that has no backward yet is of the weights before
            self._step.finish_update()
            self.count_new_weights()

    def look_at_newest(self, who: str) -> None:
        """Somebody is about to look at the weights: they are those of the last step, all here. Every rank comes here
        where an update runs beside the program."""
        if self._step.has_update_under_way:
            self.meet(f"{who}, beside a delayed update")
            self.finish_update()
        self.settle()

    def conclude(self) -> None:
        """Wait for the last step, and count it as what it was; raises what was wrong with it (step.py). Every rank
        calls it; the counters below may be asked for by one."""
        self.finish_update()
        self._step.conclude()
        self.passes.check_forward.conclude()

    def learn(self) -> StepReport | None:
        """The last step, counted as what it was, once the device knows. Local: one rank alone may ask."""
        self._step.learn()
        return self.last_report

    @property
    def is_deferred(self) -> bool:
        """The host learns of a step after it was taken."""
        return self._step.is_deferred

    def _check_trains(self, call: str) -> None:
        """Refuse to go on from what ended half way, and without an optimizer."""
        if not self.buckets:
            raise ConfigError(f"{call}: this engine only evaluates, for zero.initialize was given {NO_OPTIMIZER}")
        self.passes.check_whole()
        self.state.check_whole()

    def zero_grad(self) -> None:
        """Forget what has been accumulated."""
        for bucket in self.buckets:
            bucket.grads.discard()

    @property
    def has_gradients(self) -> bool:
        """A step is under way: something has been accumulated for it."""
        return not all(bucket.grads.is_empty for bucket in self.buckets)

    @property
    def at_boundary(self) -> bool:
        """The current micro-batch is the last one of its optimizer step."""
        return self._micro_batches + 1 >= self.accumulation if self._boundary is None else self._boundary

    def accumulate(self, micro_batches: int) -> None:
        """So many are a step, from the next one on."""
        self.accumulation = micro_batches
        self.log.remark = f"gradient_accumulation_steps {micro_batches}"

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backward and step end an optimizer step; None: count micro-batches again."""
        self._boundary = is_boundary

    @contextmanager
    def without_a_step(self) -> Iterator[Callable[[], None]]:
        """Between two steps: each backward inside sums its gradients over the ranks. Afterwards gradients are forgotten
        and buffers as they were, and so they are for a forward before which what is yielded is called."""
        before, self._boundary = self._boundary, True
        buffers = BufferCopy(self.module)

        def begin_anew() -> None:
            self.zero_grad()
            buffers.restore()
            self.count_new_weights()

        try:
            with self._step.resting():
                yield begin_anew
        finally:
            self._boundary = before
            begin_anew()
            self.passes.take_trace()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside leaves gradients on the rank, to be summed over ranks by the first backward outside."""
        if self._policy.split_grads:
            raise ConfigError("no_sync needs stage 0 or 1: gradients that are split are summed after every backward")
        before = self._boundary, self._in_no_sync
        self._boundary, self._in_no_sync = False, True
        try:
            yield
        finally:
            self._boundary, self._in_no_sync = before

    def settle(self) -> None:
        """Wait for what is still on its way between ranks, so that this one may leave."""
        for bucket in (*self.buckets, *self.frozen):
            bucket.await_parameters()

    def offload_states(self, states: Sequence[str], *, pinned: bool, non_blocking: bool) -> bool:
        """Set these aside on the host (aside.py), between two steps; whether that wins memory. Every rank calls it."""
        if self.has_gradients:
            raise ConfigError("engine.offload_states() within a step, whose gradients are accumulated: call it after "
                              "the engine.step() that ends the step, or after engine.zero_grad()")
        for bucket in (*self.buckets, *self.frozen):
            bucket.check_not_lent("engine.offload_states()")
        if not self._aside.wins_memory:
            return False
        self._roster.check_places()
        self.conclude()
        self.residency.done_with_all()
        self.settle()
        self.zero_grad()  # a forward without a backward may have begun some
        self._aside.take(states, pinned=pinned, non_blocking=non_blocking)
        return True

    def reload_states(self, *, non_blocking: bool = False) -> None:
        self._aside.bring(non_blocking=non_blocking)

    def detach(self) -> None:
        """Leave the module to itself: no hooks, and whole parameters. Once: another engine may have it afterwards."""
        self.reload_states()
        self.conclude()
        self.is_detached = True
        for handle in self._handles:
            handle.remove()
        disconnect_sinks(self._units)
        try:
            for bucket in (*self.buckets, *self.frozen):
                bucket.give_back()
        finally:  # of a drive that fails as well
            self.homes.close()

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
        return self.scaler.scale / self.accumulation

    @property
    def global_steps(self) -> int:
        return self.state.counters.global_steps

    @property
    def skipped_steps(self) -> int:
        self._step.learn()
        return self.state.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        return self.state.counters.micro_steps

    @property
    def optimizer_steps(self) -> int:
        self._step.learn()
        return self.state.counters.optimizer_steps

    @property
    def applied_steps(self) -> int:
        self._step.learn()
        return self.state.counters.applied_steps

    # ---- what a checkpoint holds --------------------------------------------------------------------------------

    def state_runs(self, kinds: tuple[str, ...], frozen: bool = True) -> Iterator[tuple[Slot, int, Run]]:
        """(slot, offset in the slot, run of the state) for everything this rank is to write."""
        return self.state.runs(kinds, frozen)

    def meet(self, where: str) -> None:
        """Every rank comes here, whatever it exchanges then; one that is elsewhere is an error (together.py)."""
        meet(self.log, self.groups.world, where)

    def change(self, what: str) -> AbstractContextManager[None]:
        """Where what is inside ends half way, steps and saves are refused until a load."""
        return self.state.change(what)

    def count_new_weights(self) -> None:
        """A backward of a forward that ran before now would mix old and new weights."""
        self.passes.weights += 1

    def check_before_save(self) -> None:
        """Refuse a state that is half a step's, or that somebody wrote to. What one rank sees the others may not: all
        must agree on this before they save."""
        self._aside.check_here("a save")
        self.conclude()
        self.state.check_whole()
        self._roster.check_edits(thoroughly=True)

    def check_before_load(self) -> None:
        """Refuse where new weights would not reach the model; to be agreed on as well."""
        self._aside.check_here("a load")
        self._roster.check_before_load()

    def load_runs(self, names: Mapping[str, Collection[str]], read: Callable[[str, Slot, int, Tensor], None],
                  agreed: Callable[[Callable[[], None]], None] = lambda action: action()) -> None:
        """Fill what this rank holds of the parameters named for each kind: `read(kind, slot, offset, out)` for every
        run. Then publish the weights, which is collective: `agreed` runs an action, and raises on every rank where it
        failed on one. What has been accumulated is discarded: the next micro-batch begins a step."""
        self.conclude()
        self.residency.done_with_all()
        self._roster.begin_load()
        self.zero_grad()
        self._micro_batches = 0
        agreed(lambda: self.state.fill(names, read))
        self.state.publish()
        self._follow_rule()
        self.count_new_weights()

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of optimizer state beside the weight."""
        return self.rule.states

    def counters(self) -> dict[str, Any]:
        """Everything of the engine that a resumed run must know besides tensors."""
        self.conclude()
        return self.state.numbers()

    def forget_optimizer_steps(self) -> None:
        self.conclude()  # a step that the host has not heard of is one of those
        self.state.forget_optimizer_steps()
        self._follow_rule()

    def restore_counters(self, saved: dict[str, Any]) -> None:
        self.state.restore(saved)
        self._follow_rule()

    @property
    def exchanged(self) -> Sequence[Line]:
        """What travels in the place of gradients, bucket by bucket, while something does (own_exchange.py)."""
        return () if self._step.exchange is None else self._step.exchange.lines

    def count_new_states(self, bucket: object) -> None:
        """What was known of them from what travelled is out of date. Collective where they are split."""
        for line in self.exchanged:
            if line.bucket is bucket:
                line.look_again(self.rule)

    def _follow_rule(self) -> None:
        if self._step.exchange is not None:
            self._step.exchange.follow()


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


def _against(riders: Sequence[Tensor | float]) -> str | None:
    """Why these cannot travel. Each rank's caller chooses them, and the exchange has one length."""
    if len(riders) > MOST_RIDERS:
        return f"step(riders=...) has {len(riders)} numbers: give at most {MOST_RIDERS}"
    shapes = (list(value.shape) for value in riders if isinstance(value, Tensor) and value.dim())
    return next((f"step(riders=...) has a tensor of shape {shape}: give numbers, or tensors of shape []"
                 for shape in shapes), None)


def forget_gradients(module: nn.Module) -> None:
    """Those of a backward before the engine was there belong to no step of it."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            warnings.warn(f"{name}.grad, made before zero.initialize, is dropped, and so are others", stacklevel=2)
            module.zero_grad()
            return
