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
from megatron.plan.footprint import PlannedRun
from megatron.plan.rates import MachineRates

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
class PassTime:
    """Seconds of computation in one direction."""

    products: float = 0.0
    attention: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.rest

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(self.products + other.products, self.attention + other.attention, self.rest + other.rest)

    def __mul__(self, times: float) -> PassTime:
        return PassTime(self.products * times, self.attention * times, self.rest * times)


def step_time(run: PlannedRun, rates: MachineRates) -> StepTime:
    forward, backward = block_forward_time(run, rates), block_backward_time(run, rates)
    if run.chunk is not None:
        backward += block_recompute_time(run, rates)
    work = ((forward + backward) * run.mean_active_blocks + embedding_and_loss_time(run, rates)) * run.accumulation
    return StepTime(work.products, work.attention, work.rest + rates.a_step, _optimizer(run, rates),
                    exchange.exchange_seconds(run, rates),
                    exchange.hidden_exchange_seconds(run, rates, forward.total, backward.total))


# ---- computation --------------------------------------------------------------------------------------------------


def block_forward_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    acts, model = run.activations, run.config.model
    products = sum(2 * acts.tokens * inner * columns / rates.forward(acts.tokens, sqrt(inner * columns))
                   for inner, columns in _matrices(run))
    curve = rates.dropping_forward if model.attention_dropout else rates.attention_forward
    dropout = 2 * rates.dropout_forward(acts.tokens * model.hidden_size) if model.hidden_dropout else 0.0
    return PassTime(products, _attention(run) * curve(acts.sequence), rates.block_forward(_elements(run)) + dropout)


def block_recompute_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    """Before its backward, where blocks are recomputed."""
    tokens, (inner, columns) = run.activations.tokens, _matrices(run)[-1]
    last = 2 * tokens * inner * columns / rates.forward(tokens, sqrt(inner * columns))
    return block_forward_time(run, rates) + PassTime(products=-last * run.num_skipped_products / run.num_layers,
                                                     rest=rates.replay)


def block_backward_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    """Without what is computed again before it."""
    acts, model = run.activations, run.config.model
    products = sum(4 * acts.tokens * inner * columns / rates.backward(acts.tokens, sqrt(inner * columns))
                   for inner, columns in _matrices(run))
    curve = rates.dropping_backward if model.attention_dropout else rates.attention_backward
    dropout = 2 * rates.dropout_backward(acts.tokens * model.hidden_size) if model.hidden_dropout else 0.0
    return PassTime(products, _attention(run) * curve(acts.sequence), rates.block_backward(_elements(run)) + dropout)


def embedding_and_loss_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    """Embeddings and loss, forward and backward; and what any micro-batch takes."""
    acts, model = run.activations, run.config.model
    width, elements = sqrt(model.hidden_size * run.vocab_columns), acts.tokens * model.hidden_size
    flops = 2 * elements * run.vocab_columns
    products = flops / rates.forward(acts.tokens, width) + 2 * flops / rates.backward(acts.tokens, width)
    dropout = rates.dropout_forward(elements) + rates.dropout_backward(elements) if model.hidden_dropout else 0.0
    units = run.num_sharded_units * rates.split_unit
    return PassTime(products, 0.0, rates.loss(acts.tokens * run.vocab_columns) + rates.a_pass + dropout + units)


def _matrices(run: PlannedRun) -> list[tuple[int, int]]:
    """(inner, columns) of the products of a block on one rank."""
    h, f, tp = run.config.model.hidden_size, run.config.model.ffn_size, run.tp
    return [(h, 3 * h // tp), (h // tp, h), (h, f // tp), (f // tp, h)]


def _attention(run: PlannedRun) -> float:
    """Heads of this rank, over the samples of a micro-batch, as many of the width that was measured."""
    return run.activations.batch * run.config.model.hidden_size / run.tp / HEAD_WIDTH


def _elements(run: PlannedRun) -> float:
    """Of the residual stream: inside of attention and MLP a rank has its part, and of the rest all."""
    whole = run.activations.tokens * run.config.model.hidden_size
    return whole * (1 + 2 / run.tp) / 3


# ---- the optimizer ------------------------------------------------------------------------------------------------


def _optimizer(run: PlannedRun, rates: MachineRates) -> float:
    """What is on the host, by the host, with its gradients on their way down and its weights on their way up; with
    `--offload-update device` by the device, to which the state comes, and from which it goes again."""
    if run.state_is_updated_on_device:
        return rates.update(run.shard_numel) + (2 * run.offloaded_optimizer_bytes / rates.link if rates.link else 0.0)
    seconds = rates.update(run.shard_numel - run.offloaded_numel)
    if run.offloaded_numel:
        seconds += rates.host_update(run.offloaded_numel)
        if rates.link:
            seconds += run.offloaded_numel * (run.grad_sum_bytes + run.param_bytes) / rates.link
    return seconds
