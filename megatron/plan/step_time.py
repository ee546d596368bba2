"""Predicted time of a step, from a configuration and the measured rates of a machine: pure arithmetic.

A step has five parts: matrix products, attention, rest (norms, activations, dropout, host overhead), optimizer, and
the exchange between ranks, part of which is hidden behind computation. Not predicted: NVMe, `--compile`, networks
between nodes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import sqrt

from megatron.config.optimizer_config import ONE_BIT_OPTIMIZERS
from megatron.plan.activations import FP32
from megatron.plan.footprint import PlannedRun
from megatron.plan.machine_rates import RateCurve, MachineRates, Surface
from megatron.plan.memory import CPU_BLOCK_ROWS, cuda_logit_rows
from megatron.zero.layout import FlatLayout

SUMS_OF_A_BLOCK = 2
"""Tensor parallel all-reduces in one direction: of attention, and of the MLP."""
SUMS_OF_EMBEDDING = 2


def exchange_seconds(run: PlannedRun, rates: MachineRates) -> float:
    """All communication of a step, hidden or not."""
    norm = rates.all_reduce(1) if run.ranks > 1 else 0.0
    is_gathered = run.policy.params_are_sharded and not run.num_sharded_units
    overhead = num_collectives(run) * rates.meetings[-1 if is_gathered else run.config.zero.zero_stage]
    tensor_parallel = _tensor_parallel(run, rates) * run.accumulation
    return norm + overhead + tensor_parallel + _gradients(run, rates) + _weights(run, rates)


# ---- data parallel ------------------------------------------------------------------------------------------------


def num_collectives(run: PlannedRun) -> float:
    """Data parallel collectives of a step, per unit: gradient reductions and parameter gathers. At stage 3 the last
    block is gathered once, and the persistent parameters are one unit more."""
    if run.dp == 1:
        return 0.0
    times = run.accumulation if run.policy.grads_are_sharded else 1
    if not run.policy.params_are_sharded:
        return (run.num_layers + 1) * (times + run.policy.optim_is_sharded)
    root, resident = bool(run.root.numel), bool(run.persistent.numel)
    blocks, gathers = (run.num_layers, 2 * run.mean_active_blocks - 1) if run.block.numel else (0, 0.0)
    return times * (root + blocks + resident) + resident + run.accumulation * (root + gathers)


def _gradients(run: PlannedRun, rates: MachineRates) -> float:
    """Gradient reductions of a step."""
    times = run.accumulation if run.policy.grads_are_sharded else 1
    return times * (run.num_layers * _sum_of(run, rates, run.block) + _sum_of(run, rates, run.root, run.persistent))


def _sum_of(run: PlannedRun, rates: MachineRates, *units: FlatLayout) -> float:
    if run.dp == 1 or run.config.optim.optimizer in ONE_BIT_OPTIMIZERS:
        return 0.0
    curve = rates.reduce_scatter if run.policy.optim_is_sharded else rates.all_reduce
    return sum(curve(unit.numel * run.wire_grad_bytes) for unit in units) * _more_ranks(run.dp, rates)


def _weights(run: PlannedRun, rates: MachineRates) -> float:
    """Parameter gathers: after the step, or before each use at stage 3."""
    if run.dp == 1 or not run.policy.optim_is_sharded:
        return 0.0
    block, root, resident = (_gather_of(run, rates, unit) for unit in (run.block, run.root, run.persistent))
    if not run.policy.params_are_sharded:
        return run.num_layers * block + root
    return resident + run.accumulation * (root + 2 * run.mean_active_blocks * block)


def _gather_of(run: PlannedRun, rates: MachineRates, unit: FlatLayout) -> float:
    return rates.all_gather(unit.numel * run.param_bytes) * _more_ranks(run.dp, rates)


def hidden_exchange_seconds(run: PlannedRun, rates: MachineRates, forward: float, backward: float) -> float:
    """Communication of a step that overlaps the `forward` and the `backward` of a neighbouring block."""
    if run.dp == 1 or not run.config.zero.overlap_comm:
        return 0.0

    def overlapped(computation: float, exchange: float) -> float:
        return max(0.0, run.mean_active_blocks - 1) * min(rates.hides * exchange, computation)

    sums = _sum_of(run, rates, run.block)
    times = run.accumulation if run.policy.grads_are_sharded else 1
    if not run.policy.optim_is_sharded:
        return times * overlapped(backward, sums)
    weights, is_gpu = _gather_of(run, rates, run.block), run.device == "cuda"
    if not run.policy.params_are_sharded:
        return times * overlapped(backward, sums) + (overlapped(forward, weights) if is_gpu else 0.0)
    ahead = weights if run.config.zero.stage3_prefetch_bucket_size > 0 else 0.0
    if is_gpu:
        return times * (overlapped(forward, ahead) + overlapped(backward, ahead + sums))
    return times * overlapped(backward, sums) + times * (overlapped(forward, ahead) + overlapped(backward, ahead))


# ---- tensor parallel ----------------------------------------------------------------------------------------------


def _tensor_parallel(run: PlannedRun, rates: MachineRates) -> float:
    """Collectives inside layers, in a micro-batch: nothing overlaps them."""
    if run.tp == 1:
        return 0.0
    acts = run.activations
    split = run.config.recompute.partition_activations and acts.chunk is not None
    inputs = rates.all_gather(acts.residual_bytes) * acts.chunks if split else 0.0
    rows = _loss_rows(run)
    if run.device == "cpu":  # the largest logits; their sums, and the logits of the targets
        of_loss = rates.all_reduce(rows * FP32) + rates.all_reduce(2 * rows * FP32)
    else:
        of_loss = rates.all_gather(3 * rows * FP32 * run.tp)
    wire = _sums_of_stream(run) * rates.all_reduce(acts.residual_bytes) + inputs + -(-acts.tokens // rows) * of_loss
    return wire * _more_ranks(run.tp, rates) + num_tp_collectives(run) * rates.inner_sum


def num_tp_collectives(run: PlannedRun) -> float:
    """Tensor parallel collectives in a micro-batch."""
    return _sums_of_stream(run) + -(-run.activations.tokens // _loss_rows(run)) * (2 if run.device == "cpu" else 1)


def _sums_of_stream(run: PlannedRun) -> float:
    """All-reduces of the residual stream and of its gradient."""
    again = 0.0 if run.activations.chunk is None else SUMS_OF_A_BLOCK - run.num_skipped_products / run.num_layers
    return run.mean_active_blocks * (2 * SUMS_OF_A_BLOCK + again) + SUMS_OF_EMBEDDING


def _loss_rows(run: PlannedRun) -> int:
    """Rows between two collectives of the loss."""
    if run.device == "cpu":
        return min(run.activations.tokens, CPU_BLOCK_ROWS)
    return cuda_logit_rows(run.activations.tokens, run.vocab_columns, run.param_bytes)


def _more_ranks(ranks: int, rates: MachineRates) -> float:
    """Ring collectives: a rank sends (ranks - 1) / ranks of the tensor."""
    measured = max(2, rates.where.ranks)
    return (1 - 1 / ranks) / (1 - 1 / measured)


HEAD_WIDTH = 64
"""Width of the measured attention heads."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    products: float
    attention: float
    rest: float
    optimizer: float
    exchange: float
    """All communication."""
    hidden: float
    """The part of `exchange` behind computation."""

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
    if run.activations.chunk is not None:
        backward += block_recompute_time(run, rates)
    work = ((forward + backward) * run.mean_active_blocks + embedding_and_loss_time(run, rates)) * run.accumulation
    return StepTime(work.products, work.attention, work.rest + rates.a_step, _optimizer(run, rates),
                    exchange_seconds(run, rates), hidden_exchange_seconds(run, rates, forward.total, backward.total))


# ---- computation --------------------------------------------------------------------------------------------------


def block_forward_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    attention = rates.dropping_forward if run.config.model.attention_dropout else rates.attention_forward
    return _block_time(run, 2, rates.forward, attention, rates.block_forward, rates.dropout_forward)


def block_recompute_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    """The forward that activation checkpointing repeats before a block's backward."""
    tokens, (inner, columns) = run.activations.tokens, _matrices(run)[-1]
    last = 2 * tokens * inner * columns / rates.forward(tokens, sqrt(inner * columns))
    return block_forward_time(run, rates) + PassTime(products=-last * run.num_skipped_products / run.num_layers,
                                                     rest=rates.replay)


def block_backward_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    """Without recomputation."""
    attention = rates.dropping_backward if run.config.model.attention_dropout else rates.attention_backward
    return _block_time(run, 4, rates.backward, attention, rates.block_backward, rates.dropout_backward)


def _block_time(run: PlannedRun, flops: int, products: Surface, attention: RateCurve, rest: RateCurve,
                dropout: RateCurve) -> PassTime:
    """`flops`: per element of a product's [tokens, inner, columns]."""
    acts, model, tp = run.activations, run.config.model, run.tp
    elements = acts.tokens * model.hidden_size
    heads = acts.batch * model.hidden_size / tp / HEAD_WIDTH  # of this rank, all samples, at the measured width
    # attention and MLP have their share of the elements on this rank, the rest of the block has all
    other = rest(elements * (1 + 2 / tp) / 3) + (2 * dropout(elements) if model.hidden_dropout else 0.0)
    return PassTime(sum(flops * acts.tokens * inner * columns / products(acts.tokens, sqrt(inner * columns))
                        for inner, columns in _matrices(run)), heads * attention(acts.sequence), other)


def embedding_and_loss_time(run: PlannedRun, rates: MachineRates) -> PassTime:
    """Embeddings and loss, forward and backward, and the fixed cost of a micro-batch."""
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


def _optimizer(run: PlannedRun, rates: MachineRates) -> float:
    """The host updates offloaded state: gradients are copied to it, and weights back. With `--offload-update device`
    the device does, and the state is copied there and back."""
    def copy_seconds(count: int) -> float:
        return count / rates.link if rates.link else 0.0

    if run.state_is_updated_on_device:
        return rates.update(run.shard_numel) + copy_seconds(2 * run.offloaded_optimizer_bytes)
    seconds = rates.update(run.shard_numel - run.offloaded_numel)
    if run.offloaded_numel:
        seconds += rates.host_update(run.offloaded_numel)
        seconds += copy_seconds(run.offloaded_numel * (run.grad_sum_bytes + run.param_bytes))
    return seconds
