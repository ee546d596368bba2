"""How long a step takes, from a configuration and the rates of a machine: pure arithmetic.

A step is cut into parts that a machine does at different rates: *products* of matrices, *attention*, the *rest* of
forward and backward (norms, activations, dropout, the softmax of the loss, and the host that starts it all), the
*optimizer*, and the *exchange* between ranks, of which some *hides* behind the computation beside it.

What hides: a unit's gradients travel while the backward of the next one runs, and split weights while the unit before
them runs. What a rank does to send and receive is not hidden (`Rates.hides` is the share that is), nor is what the
first and the last unit send, the exchange inside of tensor parallel layers, and new weights after the step.

Not predicted: a drive (training measures it when it starts), `--compile`, and evaluation, saves and data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import sqrt

from megatron.config.optimizers import ONE_BIT
from megatron.plan.activations import FP32
from megatron.plan.footprint import Run
from megatron.plan.rates import Rates

HEAD_WIDTH = 64
"""Of the heads that were measured."""
SUMS_OF_A_BLOCK = 2
"""In one direction, inside of tensor parallel layers: of attention, and of the MLP."""


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
        backward += forward  # again
    work = ((forward + backward) * run.running_blocks + ends(run, rates)) * run.accumulation
    apart = _tensor_parallel(run, rates) * run.accumulation
    reduced, reduced_hidden = _gradients(run, rates, backward.total)
    gathered, gathered_hidden = _weights(run, rates, forward.total, backward.total)
    meeting = rates.all_reduce(1) if run.ranks > 1 else 0.0  # of the norm
    if run.dp > 1:
        times = run.accumulation if run.policy.split_grads else 1
        meeting += rates.meetings[run.config.zero.zero_stage] * (run.layers + 1) * times
    return StepTime(work.products, work.attention, work.rest + rates.a_step, _optimizer(run, rates),
                    apart + reduced + gathered + meeting, reduced_hidden + gathered_hidden)


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
    units = (run.layers + 1) * rates.split_unit if run.policy.split_params else 0.0
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
    """What is on the host, by the host, with its gradients on their way down and its weights on their way up."""
    seconds = rates.update(run.shard_numel - run.away_numel)
    if run.away_numel:
        seconds += rates.host_update(run.away_numel)
        if rates.link:
            seconds += run.away_numel * (run.sums + run.work) / rates.link
    return seconds


# ---- exchange -----------------------------------------------------------------------------------------------------


def _gradients(run: Run, rates: Rates, backward: float) -> tuple[float, float]:
    """(seconds, of which hidden) of the sums over data parallel in a step."""
    if run.dp == 1 or run.config.optim.optimizer in ONE_BIT:
        return 0.0, 0.0
    curve = rates.reduce_scatter if run.policy.split_optim else rates.all_reduce
    scale, times = _more_ranks(run.dp, rates), run.accumulation if run.policy.split_grads else 1
    block = curve(run.block.numel * run.grads) * scale
    others = curve(run.root.numel * run.grads) + curve(run.resident.numel * run.grads)
    hidden = _hidden(rates, block, backward, run.running_blocks) if run.config.zero.overlap_comm else 0.0
    return times * (run.layers * block + others * scale), times * hidden


def _weights(run: Run, rates: Rates, forward: float, backward: float) -> tuple[float, float]:
    """(seconds, of which hidden) of collecting weights: after the step, or whenever split ones are used."""
    if run.dp == 1 or not run.policy.split_optim:
        return 0.0, 0.0
    scale = _more_ranks(run.dp, rates)
    block, root, resident = (rates.all_gather(layout.numel * run.work) * scale
                             for layout in (run.block, run.root, run.resident))
    if not run.policy.split_params:
        return run.layers * block + root, 0.0
    blocks, zero = run.running_blocks, run.config.zero
    ahead = zero.overlap_comm and zero.stage3_prefetch_bucket_size > 0
    hidden = _hidden(rates, block, forward, blocks) + _hidden(rates, block, backward, blocks) if ahead else 0.0
    return resident + run.accumulation * (root + 2 * blocks * block), run.accumulation * hidden


def _hidden(rates: Rates, exchange: float, beside: float, blocks: float) -> float:
    """Of the exchange of so many blocks, each beside the computation of a neighbour."""
    return max(0.0, blocks - 1) * min(rates.hides * exchange, beside)


def _tensor_parallel(run: Run, rates: Rates) -> float:
    """The sums inside of layers in a micro-batch: nothing can be done meanwhile."""
    if run.tp == 1:
        return 0.0
    stream = rates.all_reduce(run.activations.stream) * _more_ranks(run.tp, rates)
    passes = 2 if run.chunk is None else 3
    split = run.config.recompute.partition_activations and run.chunk is not None
    inputs = rates.all_gather(run.activations.stream) * run.layers / (run.chunk or 1) if split else 0.0
    ends = 2 * stream + 3 * rates.all_reduce(run.activations.tokens * FP32)  # of the embedding, and of the loss
    return run.running_blocks * SUMS_OF_A_BLOCK * passes * stream + ends + inputs


def _more_ranks(ranks: int, rates: Rates) -> float:
    """By rings: what each sends grows with the ranks from a half of the whole to all of it."""
    measured = max(2, rates.where.ranks)
    return (1 - 1 / ranks) / (1 - 1 / measured)
