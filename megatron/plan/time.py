"""How long a step takes, from a configuration and the rates of a machine: pure arithmetic.

A step is cut into parts that a machine does at different rates: *products* of matrices, *attention*, the *rest* of
forward and backward (norms, activations, dropout, the softmax of the loss, and the host that starts it all), the
*optimizer*, and the *exchange* between ranks, of which some *hides* behind the computation beside it.

What hides: a unit's gradients travel while the backward of the next one runs, and split weights while the unit before
them runs; on a GPU, where both share one wire, no longer than that backward takes, and whole weights after a step while
the next forward does. What a rank does to send and receive is not hidden (`Rates.hides` is the share that is), nor is
what the first and the last unit send, and the exchange inside of tensor parallel layers.

Not predicted: a drive (training measures it when it starts), `--compile` (though on a GPU it is the default), a network
between nodes that is slower than inside of one, and evaluation, saves and data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import sqrt

from megatron.config.optimizers import ONE_BIT
from megatron.plan.activations import FP32
from megatron.plan.footprint import Run
from megatron.plan.rates import Rates
from megatron.zero.layout import FlatLayout

HEAD_WIDTH = 64
"""Of the heads that were measured."""
SUMS_OF_A_BLOCK = 2
"""In one direction, inside of tensor parallel layers: of attention, and of the MLP."""
SUMS_OF_EMBEDDING, SUMS_OF_LOSS = 2, 3


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    products: float
    attention: float
    rest: float
    optimizer: float
    exchange: float
    """All of it."""
    hidden: float
    """Of the exchange, behind computation."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.rest + self.optimizer + self.exchange - self.hidden

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Pass:
    """Seconds of computation in one direction."""

    products: float = 0.0
    attention: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.rest

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.products + other.products, self.attention + other.attention, self.rest + other.rest)

    def __mul__(self, times: float) -> Pass:
        return Pass(self.products * times, self.attention * times, self.rest * times)


def step_time(run: Run, rates: Rates) -> StepTime:
    forward, backward = block_forward(run, rates), block_backward(run, rates)
    if run.chunk is not None:
        backward += forward + Pass(rest=rates.replay)  # again
    work = ((forward + backward) * run.running_blocks + ends(run, rates)) * run.accumulation
    apart = _tensor_parallel(run, rates) * run.accumulation
    meeting = rates.all_reduce(1) if run.ranks > 1 else 0.0  # of the norm
    if run.dp > 1:
        meeting += _meetings(run, rates)
    return StepTime(work.products, work.attention, work.rest + rates.a_step, _optimizer(run, rates),
                    apart + _gradients(run, rates) + _weights(run, rates) + meeting,
                    _hidden(run, rates, forward.total, backward.total))


# ---- computation --------------------------------------------------------------------------------------------------


def block_forward(run: Run, rates: Rates) -> Pass:
    acts, model = run.activations, run.config.model
    products = sum(2 * acts.tokens * inner * columns / rates.forward(acts.tokens, sqrt(inner * columns))
                   for inner, columns in _matrices(run))
    curve = rates.dropping_forward if model.attention_dropout else rates.attention_forward
    dropout = 2 * rates.dropout_forward(acts.tokens * model.hidden_size) if model.hidden_dropout else 0.0
    return Pass(products, _attention(run) * curve(acts.sequence), rates.block_forward(_elements(run)) + dropout)


def block_backward(run: Run, rates: Rates) -> Pass:
    """Without what is computed again before it."""
    acts, model = run.activations, run.config.model
    products = sum(4 * acts.tokens * inner * columns / rates.backward(acts.tokens, sqrt(inner * columns))
                   for inner, columns in _matrices(run))
    curve = rates.dropping_backward if model.attention_dropout else rates.attention_backward
    dropout = 2 * rates.dropout_backward(acts.tokens * model.hidden_size) if model.hidden_dropout else 0.0
    return Pass(products, _attention(run) * curve(acts.sequence), rates.block_backward(_elements(run)) + dropout)


def ends(run: Run, rates: Rates) -> Pass:
    """Embeddings and loss, forward and backward; and what any micro-batch takes."""
    acts, model = run.activations, run.config.model
    width, elements = sqrt(model.hidden_size * run.columns), acts.tokens * model.hidden_size
    flops = 2 * elements * run.columns
    products = flops / rates.forward(acts.tokens, width) + 2 * flops / rates.backward(acts.tokens, width)
    dropout = rates.dropout_forward(elements) + rates.dropout_backward(elements) if model.hidden_dropout else 0.0
    units = run.split_units * rates.split_unit
    return Pass(products, 0.0, rates.loss(acts.tokens * run.columns) + rates.a_pass + dropout + units)


def _matrices(run: Run) -> list[tuple[int, int]]:
    """(inner, columns) of the products of a block on one rank."""
    h, f, tp = run.config.model.hidden_size, run.config.model.ffn_size, run.tp
    return [(h, 3 * h // tp), (h // tp, h), (h, f // tp), (f // tp, h)]


def _attention(run: Run) -> float:
    """Heads of this rank, over the samples of a micro-batch, as many of the width that was measured."""
    return run.activations.batch * run.config.model.hidden_size / run.tp / HEAD_WIDTH


def _elements(run: Run) -> float:
    """Of the residual stream: inside of attention and MLP a rank has its part, and of the rest all."""
    whole = run.activations.tokens * run.config.model.hidden_size
    return whole * (1 + 2 / run.tp) / 3


# ---- the optimizer ------------------------------------------------------------------------------------------------


def _optimizer(run: Run, rates: Rates) -> float:
    """What is on the host, by the host, with its gradients on their way down and its weights on their way up; with
    `--offload-update device` by the device, to which the state comes, and from which it goes again."""
    if run.streams:
        return rates.update(run.shard_numel) + (2 * run.optimizer_away / rates.link if rates.link else 0.0)
    seconds = rates.update(run.shard_numel - run.away_numel)
    if run.away_numel:
        seconds += rates.host_update(run.away_numel)
        if rates.link:
            seconds += run.away_numel * (run.sums + run.work) / rates.link
    return seconds


# ---- exchange -----------------------------------------------------------------------------------------------------


def _gradients(run: Run, rates: Rates) -> float:
    """The sums over data parallel in a step."""
    if not _sums_gradients(run):
        return 0.0
    times = run.accumulation if run.policy.split_grads else 1
    return times * (run.layers * _sum_of(run, rates, run.block) + _sum_of(run, rates, run.root, run.resident))


def _meetings(run: Run, rates: Rates) -> float:
    """What is resident under stage 3 is one unit, and its gradients go as under stage 2."""
    if run.policy.split_params:
        once = run.split_units * rates.meetings[3] + (rates.meetings[2] if run.resident.numel else 0.0)
    else:
        once = (run.layers + 1) * rates.meetings[run.config.zero.zero_stage]
    return once * (run.accumulation if run.policy.split_grads else 1)


def _sums_gradients(run: Run) -> bool:
    return run.dp > 1 and run.config.optim.optimizer not in ONE_BIT


def _sum_of(run: Run, rates: Rates, *units: FlatLayout) -> float:
    curve = rates.reduce_scatter if run.policy.split_optim else rates.all_reduce
    return sum(curve(unit.numel * run.sent) for unit in units) * _more_ranks(run.dp, rates)


def _weights(run: Run, rates: Rates) -> float:
    """Collecting weights: after the step, or whenever split ones are used."""
    if run.dp == 1 or not run.policy.split_optim:
        return 0.0
    block, root, resident = (_gather_of(run, rates, unit) for unit in (run.block, run.root, run.resident))
    if not run.policy.split_params:
        return run.layers * block + root
    return resident + run.accumulation * (root + 2 * run.running_blocks * block)


def _gather_of(run: Run, rates: Rates, unit: FlatLayout) -> float:
    return rates.all_gather(unit.numel * run.work) * _more_ranks(run.dp, rates)


def _hidden(run: Run, rates: Rates, forward: float, backward: float) -> float:
    """Of both, in a step: what travels beside the `forward` and the `backward` of a neighbouring block."""
    if run.dp == 1 or not run.config.zero.overlap_comm:
        return 0.0

    def behind(computation: float, exchange: float) -> float:
        return max(0.0, run.running_blocks - 1) * min(rates.hides * exchange, computation)

    sums = _sum_of(run, rates, run.block) if _sums_gradients(run) else 0.0
    times = run.accumulation if run.policy.split_grads else 1
    if not run.policy.split_optim:
        return times * behind(backward, sums)
    weights, is_gpu = _gather_of(run, rates, run.block), run.device == "cuda"
    if not run.policy.split_params:
        return times * behind(backward, sums) + (behind(forward, weights) if is_gpu else 0.0)
    ahead = weights if run.config.zero.stage3_prefetch_bucket_size > 0 else 0.0
    if is_gpu:
        return times * (behind(forward, ahead) + behind(backward, ahead + sums))
    return times * behind(backward, sums) + times * (behind(forward, ahead) + behind(backward, ahead))


def _tensor_parallel(run: Run, rates: Rates) -> float:
    """The sums inside of layers in a micro-batch: nothing can be done meanwhile."""
    if run.tp == 1:
        return 0.0
    stream = rates.all_reduce(run.activations.stream) * _more_ranks(run.tp, rates)
    split = run.config.recompute.partition_activations and run.chunk is not None
    inputs = rates.all_gather(run.activations.stream) * run.layers / (run.chunk or 1) if split else 0.0
    ends = SUMS_OF_EMBEDDING * stream + SUMS_OF_LOSS * rates.all_reduce(run.activations.tokens * FP32)
    return _sums_of_blocks(run) * stream + ends + inputs + inner_sums(run) * rates.inner_sum


def inner_sums(run: Run) -> float:
    """Inside of layers in a micro-batch."""
    return _sums_of_blocks(run) + SUMS_OF_EMBEDDING + SUMS_OF_LOSS


def _sums_of_blocks(run: Run) -> float:
    return run.running_blocks * SUMS_OF_A_BLOCK * (2 if run.chunk is None else 3)


def _more_ranks(ranks: int, rates: Rates) -> float:
    """By rings: what each sends grows with the ranks from a half of the whole to all of it."""
    measured = max(2, rates.where.ranks)
    return (1 - 1 / ranks) / (1 - 1 / measured)
