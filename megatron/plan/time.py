"""How long a step takes, from a configuration and the rates of a machine: pure arithmetic.

A step is cut into parts that a machine does at different rates: *products* of matrices, *attention*, the *rest* of
forward and backward (norms, activations, dropout, the softmax of the loss, and the host that starts it all), the
*optimizer*, and the *exchange* between ranks, of which some *hides* behind the computation beside it.

The exchange is in exchange.py.

Not predicted: a drive (training measures it when it starts), `--compile` (though on a GPU it is the default), a network
between nodes that is slower than inside of one, and evaluation, saves and data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import sqrt

from megatron.plan import exchange
from megatron.plan.footprint import Run
from megatron.plan.rates import Rates

HEAD_WIDTH = 64
"""Of the heads that were measured."""


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
        backward += block_again(run, rates)
    work = ((forward + backward) * run.running_blocks + ends(run, rates)) * run.accumulation
    return StepTime(work.products, work.attention, work.rest + rates.a_step, _optimizer(run, rates),
                    exchange.seconds(run, rates), exchange.hidden(run, rates, forward.total, backward.total))


# ---- computation --------------------------------------------------------------------------------------------------


def block_forward(run: Run, rates: Rates) -> Pass:
    acts, model = run.activations, run.config.model
    products = sum(2 * acts.tokens * inner * columns / rates.forward(acts.tokens, sqrt(inner * columns))
                   for inner, columns in _matrices(run))
    curve = rates.dropping_forward if model.attention_dropout else rates.attention_forward
    dropout = 2 * rates.dropout_forward(acts.tokens * model.hidden_size) if model.hidden_dropout else 0.0
    return Pass(products, _attention(run) * curve(acts.sequence), rates.block_forward(_elements(run)) + dropout)


def block_again(run: Run, rates: Rates) -> Pass:
    """Before its backward, where blocks are recomputed."""
    tokens, (inner, columns) = run.activations.tokens, _matrices(run)[-1]
    last = 2 * tokens * inner * columns / rates.forward(tokens, sqrt(inner * columns))
    return block_forward(run, rates) + Pass(products=-last * run.left_out / run.layers, rest=rates.replay)


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
