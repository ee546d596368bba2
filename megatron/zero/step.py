"""Step: the optimizer step. Norm and overflow, clipping, and an update (update.py), or what is wrong.

Gradients arrive as sums over data parallel that carry the loss scale; both are divided out by one factor, together
with clipping, so that they are read once. (What was divided before the sum is not divided again.) Nothing here knows
of modules, passes or micro-batches.

A *deferred* step is taken on the device by its own verdict (verdict.py), and the host learns of it later, in two ways.
Whoever asks its report or `learn`s of it reads the verdict: one rank alone may. `conclude`, to which all ranks come
(the next step, a save, a load), also says what was wrong with it: which gradient of which rank was not finite, in what
the ranks disagree. It has changed no weight, and is raised there. Steps are deferred where waiting would cost
something, on an accelerator, and where nothing on the host depends on them: a loss scale that moves does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.optim.loss_scale import LossScaleRule
from megatron.optim.rule import ParamGroup, Rule, StepScalars
from megatron.ranges import ranges
from megatron.zero.exchanges import AFTER_A_STEP, STEP, ExchangeLog
from megatron.zero.forwards import different_blocks
from megatron.zero.homes.shelf import Homes
from megatron.zero.norm import GradNorm
from megatron.zero.own_exchange import OwnExchange
from megatron.zero.settings import GroupReader, StepSettings, different_settings, settings_of_a_step
from megatron.zero.state import State
from megatron.zero.update import DelayedUpdate, Update
from megatron.zero.verdict import Found, Verdict, exchange
from mpu.collectives import all_gather_json
from mpu.groups import Groups

OVERFLOWS_IN_A_ROW = 20
"""How many steps in a row may be skipped at a loss scale that cannot shrink; after that the run ends, since it would
never train again."""

STRICT_STEPS, SKIPS_IN_A_ROW = 10, 3
"""Without a loss scale a gradient that is not finite is a fault. In the first steps of a run the settings are to blame,
and it ends. Later it may be one chip in a thousand, or one batch: so many steps in a row are skipped."""


class StepReport:
    """What one optimizer step did. Asking waits for the device where the verdict is not known yet, never for a rank."""

    def __init__(self, verdict: Verdict, objection: str | None, *, number: int, loss_scale: float, lr: float,
                 riders: int, settings: StepSettings | None = None) -> None:
        self.number, self.loss_scale, self.lr = number, loss_scale, lr
        """Which optimizer step it was; the scale its gradients carried; the rate of the first param group."""
        self.remark: str | None = None
        """What changes from this step on."""
        self.complaint: str | None = None
        """Why the step was skipped, where that is unusual. Known once the step is concluded."""
        self.verdict, self.objection, self._riders = verdict, objection, riders
        self.settings = settings
        """What this rank took it with; None where there is no other rank."""
        self.losses: Sequence[Tensor] = ()
        """Of this rank's micro-batches. Looked at only where a gradient is not finite."""
        self.given = riders
        """How many riders this rank gave; what fills them up to `riders` is nobody's."""
        self._found: Found | None = None

    @property
    def found(self) -> Found:
        if self._found is None:
            self._found = self.verdict.read()
        return self._found

    @property
    def is_known(self) -> bool:
        return self._found is not None

    @property
    def applied(self) -> bool:
        return self.found.applied

    @property
    def grad_norm(self) -> float:
        """Of the mean gradient, or of what an exchange of the rule's own has in its place, before clipping; not finite
        when the step was skipped."""
        return self.found.norm

    def note_norm(self, norm: float) -> None:
        """Of what is applied, where it is not the mean gradient."""
        self._found = self.found._replace(norm=norm)

    @property
    def riders(self) -> tuple[float, ...]:
        """Sums over the world of the numbers that travelled along, as many as this rank gave."""
        return self.found.riders[:self.given]

    @property
    def aside(self) -> tuple[float, ...]:
        """The same of the numbers that the engine gave, beside its caller's."""
        return self.found.riders[self._riders:]


class Step:
    """Takes optimizer steps: call it when the gradients of all buckets have been reduced."""

    def __init__(self, state: State, homes: Homes, groups: Groups, rule: Rule, param_groups: Sequence[ParamGroup],
                 scale_rule: LossScaleRule, log: ExchangeLog, *, clip_grad: float, divisor: float,
                 max_skipped: int | None) -> None:
        self._state, self._groups, self._param_groups = state, groups, param_groups
        self._scale_rule, self._log, self._clip_grad = scale_rule, log, clip_grad
        self._divisor = divisor  # what turns the sums over ranks into means
        self._skips_in_a_row, self._max_skipped = 0, max_skipped
        self._norm = GradNorm(state.buckets, groups)
        self._update = (DelayedUpdate if homes.delays else Update)(state, homes, groups, rule, param_groups)
        self.exchange = OwnExchange(state, groups, rule, param_groups) if rule.has_exchange else None
        """Of the rule's own, in the place of the sum of gradients."""
        self.is_deferred = self._update.is_together and not rule.waits and not scale_rule.dynamic and \
            self.exchange is None and state.quantisation is None  # whose bits the host counts
        self._own_norm: GradNorm | None = None  # of gradients that stay
        self._remark: str | None = None  # for the next report
        self._losses: list[Tensor] = []  # of the step under way, or the last one
        self._parts = Counter[str]()  # what each of them is of its micro-batch's
        self._hyper_parameters = GroupReader(param_groups)
        self._open: StepReport | None = None  # the last step, while the host has not learned of it
        self._unexplained: StepReport | None = None  # the last step, where what went wrong is still to be said
        self._taken = torch.zeros((), device=state.device)
        self._taken_is = 0  # as the host last knew it
        self._rests = False
        for bucket in state.buckets:
            bucket.gradient_unit = self._unit

    def begin_with(self, loss: Tensor, *, first: bool, divisor: int = 1) -> None:
        """A backward of `loss`, which was divided, is about to add to the gradients of the next step, or to begin
        them."""
        if self._rests:
            return
        if first:
            self._losses = []
            self._parts.clear()
            if self.exchange is not None:
                self._begin_exchange(self.exchange)
        self._losses.append(loss.detach())
        self._parts[f"1/{divisor}"] += 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Backwards inside belong to no step."""
        self._rests = True
        try:
            with nullcontext() if self.exchange is None else self.exchange.resting():
                yield
        finally:
            self._rests = False

    def _begin_exchange(self, exchange: OwnExchange) -> None:
        self._remark = exchange.begin_step() or self._remark
        if exchange.is_on and self._own_norm is None:
            self._own_norm = GradNorm(self._state.buckets, self._groups, whole=True)

    def __call__(self, trace: int, objection: str | None = None, riders: Sequence[Tensor | float] = (),
                 aside: Sequence[float] = (), accumulation: int = 1, micro_batch: int | None = None) -> StepReport:
        """Update the weights, or skip the step where a gradient is not finite; the gradients are spent. `trace` is a
        digest of what this rank ran, which all ranks must agree on, as on hyper-parameters and the sizes of batches; an
        `objection` of one rank is an error of all.
        `riders` travel along, and so do those given `aside`."""
        self.conclude()
        self._log.meet(STEP)
        self._log.purpose = AFTER_A_STEP
        square = self._gradient_norm.square()  # first: the device works at it while the host looks at the settings
        counters, world = self._state.counters, self._groups.world
        settings = None if world.is_solo else settings_of_a_step(
            counters.global_steps + 1, self._parts, accumulation, micro_batch, self._hyper_parameters())
        sums = exchange(square, world, digest=0 if settings is None else settings.digest(trace, world.size),
                        counts=self._gradients_stay or self._state.buckets[0].replicas.rank == 0,
                        objects=objection is not None, riders=(*riders, *aside))
        verdict = Verdict(sums, world.size, per_unit=self._unit(), limit=self._clip_grad)
        report = StepReport(verdict, objection, number=counters.global_steps + 1, settings=settings,
                            loss_scale=counters.scaler.scale, lr=self._param_groups[0]["lr"], riders=len(riders))
        report.remark, self._remark = self._remark, None
        report.losses = self._losses  # and a step that is refused may be called again
        if self.is_deferred:
            self._update(lambda device: self._scalars(verdict))
        elif self._undisputed(report).applied:
            factor = self._exchanged(report) if self._gradients_stay else report.found.factor
            if self._state.quantisation is not None:
                self._state.quantisation.advance(counters.applied_steps + 1)
            self._update(partial(StepScalars.of, factor, counters.optimizer_steps), factor)
        for bucket in self._state.buckets:
            bucket.grads.discard()
        counters.global_steps += 1
        self._open = report
        if not self.is_deferred:
            self.conclude()
        return report

    @property
    def _gradients_stay(self) -> bool:
        return self.exchange is not None and self.exchange.is_on

    @property
    def _gradient_norm(self) -> GradNorm:
        return self._own_norm if self._gradients_stay and self._own_norm is not None else self._norm

    def _exchanged(self, report: StepReport) -> float:
        """What came of gradients that stayed is where the update looks, once it is multiplied by this."""
        assert self.exchange is not None
        factor, norm = self.exchange(self._unit() * self._divisor, self._clip_grad)
        report.note_norm(norm)
        return factor

    def _unit(self) -> float:
        """What a sum of gradients is multiplied by to be their mean."""
        return 1.0 / (self._state.counters.scaler.scale * self._divisor)

    def _scalars(self, verdict: Verdict) -> StepScalars:
        """The count of steps is kept on the device: the host does not know yet whether this one is taken."""
        if self._taken_is != self._state.counters.optimizer_steps:  # another state was loaded
            self._taken.fill_(self._state.counters.optimizer_steps)
        self._taken += verdict.applies
        return StepScalars(self._taken, verdict.divisor(), verdict.applies.logical_not().float())

    # ---- what became of it --------------------------------------------------------------------------------------

    @property
    def has_update_under_way(self) -> bool:
        """Beside the program; the same on all ranks."""
        return self._update.is_under_way

    def finish_update(self) -> None:
        """Wait for it, and publish its weights. Collective."""
        self._update.finish()

    def learn(self) -> None:
        """Wait for the last step and count it, taken or skipped. Local: nothing is exchanged or raised."""
        report, self._open = self._open, None
        if report is None:
            return
        counters, found = self._state.counters, report.found
        if found.disputed:
            self._unexplained = report
            return
        if found.applied:
            counters.optimizer_steps += 1
            self._taken_is = counters.optimizer_steps
            self._skips_in_a_row = 0
        else:
            counters.skipped_steps += 1
            if not self._scale_rule.scales or self._scale_rule.exhausted(counters.scaler):
                self._skips_in_a_row += 1
                self._unexplained = report
        counters.scaler = self._scale_rule.after(counters.scaler, overflow=not found.applied)

    def conclude(self) -> None:
        """Learn of the last step, and raise what was wrong with it. Collective where something was: all ranks call
        it at the same place."""
        self.learn()
        report, self._unexplained = self._unexplained, None
        if report is not None:
            self._explain_skip(report, self._undisputed(report).norm)

    def _undisputed(self, report: StepReport) -> Found:
        """The verdict on the host; an error where the ranks disagree. Collective then."""
        found = report.found
        if found.objections:
            texts = all_gather_json(report.objection, self._groups.world)
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            raise ConfigError(text if None not in texts else f"{text} (so on rank {rank}, not on all)")
        if not found.alike:
            assert report.settings is not None
            raise different_settings(report.settings, self._groups.world) or \
                different_blocks(self._log, self._groups.world)
        return found

    def _explain_skip(self, report: StepReport, norm: float) -> None:
        """Everything is as it was; end the run where skipping cannot help."""
        scaled = self._scale_rule.scales
        too_many = self._skips_in_a_row > self._skips_allowed(report.number)
        if scaled and too_many:
            raise NumericsError(
                f"{self._skips_in_a_row} overflows in a row at loss scale {report.loss_scale:g}, which cannot "
                f"shrink, last at step {report.number}: {self._first_bad_parameter(report)}; resume from the last "
                "checkpoint with --bf16 or a lower --lr")
        if not scaled:
            what = f"gradient norm is {norm} at step {report.number}: {self._first_bad_parameter(report)}"
            if too_many:
                raise NumericsError(f"{what}; weights are unchanged; {self._why_not_skipped(report.number)}; resume "
                                    "from the last checkpoint with a lower --lr or other data")
            report.complaint = f"{what}; the step was skipped, weights are unchanged"

    def _why_not_skipped(self, step: int) -> str:
        allowed = self._skips_allowed(step)
        if self._max_skipped is None and not allowed:
            return f"in the first {STRICT_STEPS} steps this ends the run, unless --max-skipped-in-a-row allows it"
        return f"{self._skips_in_a_row} in a row, --max-skipped-in-a-row is {allowed}"

    def _skips_allowed(self, step: int) -> int:
        if self._scale_rule.scales:
            return OVERFLOWS_IN_A_ROW
        if self._max_skipped is not None:
            return self._max_skipped
        return SKIPS_IN_A_ROW if step > STRICT_STEPS else 0

    def _first_bad_parameter(self, report: StepReport) -> str:
        """Agreed by all ranks, so that every one of them ends with the same message. Gradients that are sums by now do
        not tell whose was bad; the losses do, where a forward made it."""
        tp = self._groups.tp
        finite = all(bool(loss.isfinite().all()) for loss in report.losses)
        known = all_gather_json([self._gradient_norm.first_bad(), tp.rank, finite], self._groups.world)
        bad = [rank for rank, (_, _, is_finite) in enumerate(known) if not is_finite]
        where = f" on {ranges(bad)}" if len(known) > 1 else ""
        loss = f"the loss{where} is not finite" if bad else "every loss is finite"
        for number, (name, rank, _) in enumerate(known):
            if name is not None:
                whose = "" if self._groups.dp.is_solo else \
                    f", in the gradient of rank {number}" if self._gradients_stay else ", in the sum over the ranks"
                return f"first in {name}" + (f" on tensor parallel rank {rank}" if not tp.is_solo else "") + \
                    f"{whose} ({loss})"
        return f"the sum of finite gradients overflowed ({loss})"
