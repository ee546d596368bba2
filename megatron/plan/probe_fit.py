"""What the probe measures (sizes, small models), its raw timings, and the machine rates fitted to them: pure
arithmetic.

Of several sweeps the element-wise minimum is used: interference only makes things slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import Any, NamedTuple

from megatron.config.tree import Config, build_config
from megatron.plan.activations import Device
from megatron.plan.footprint import PlannedRun
from megatron.plan.machine_rates import NUM_COLLECTIVE_COSTS, RateCurve, MachineRates, Surface, Where
from megatron.plan.step_time import (HEAD_WIDTH, block_backward_time, block_forward_time, block_recompute_time,
                                     embedding_and_loss_time, num_collectives, num_tp_collectives, step_time)


class PassTimings(NamedTuple):
    forward: float
    backward: float


class StepTimings(NamedTuple):
    """Seconds of a step's three calls."""

    forward: float
    backward: float
    step: float


class CollectiveTimings(NamedTuple):
    all_reduce: float
    reduce_scatter: float
    all_gather: float


class OverlapTimings(NamedTuple):
    """Products and an all-reduce of about the same time, alone and together."""

    products: float
    exchange: float
    both: float


class VariantTimings(NamedTuple):
    """Timings of the first shape at stage 0, at stage 3, and with activation checkpointing."""

    whole: StepTimings
    split: StepTimings
    recomputed: StepTimings


class ProbeResult(NamedTuple):
    products: tuple[tuple[PassTimings, ...], ...]
    """[rows, width] x [width, width], and the two products of its gradients; indexed by rows, then width."""
    attention: tuple[PassTimings, ...]
    """All heads, by sequence length."""
    dropping: tuple[PassTimings, ...]
    """The same with dropout."""
    dropout: tuple[PassTimings, ...]
    loss: tuple[float, ...]
    """With its products; the forward also computes the gradients."""
    exchanges: tuple[CollectiveTimings, ...]
    """() on one rank."""
    beside: tuple[OverlapTimings, ...]
    """() on one rank."""
    link: float
    """A copy from device to host, and back; 0 on a CPU."""
    blocks: tuple[tuple[StepTimings, StepTimings], ...]
    """Of each shape, with few blocks and with more."""
    largest: StepTimings
    variants: VariantTimings
    together: tuple[StepTimings, ...]
    """The first shape with more blocks, data parallel over all ranks: `ProbeModelShape.together`; () on one rank."""
    cut: tuple[StepTimings, ...]
    """`ProbeSizes.cut`; () without tensor parallelism."""
    training: float
    """The first shape with more blocks, in the training loop, data parallel over all ranks at stage 0."""
    host: tuple[float, ...]
    """Optimizer steps on the host; () on a CPU."""


def elementwise_min(*sweeps: Any) -> Any:
    """Of equally nested tuples, a ProbeResult for example."""
    first = sweeps[0]
    if not isinstance(first, tuple):
        return min(sweeps)
    parts = [elementwise_min(*column) for column in zip(*sweeps, strict=True)]
    return tuple(parts) if type(first) is tuple else type(first)(*parts)


def spread(*sweeps: ProbeResult) -> float:
    """Median ratio of the second lowest time to the lowest: about 1 on an idle machine."""
    columns = (sorted(column) for column in zip(*map(_numbers, sweeps), strict=True))
    return float(median(second / first for first, second, *_ in columns if first > 0))


def _numbers(part: Any) -> Iterator[float]:
    if not isinstance(part, tuple):
        yield part
        return
    for inner in part:
        yield from _numbers(inner)


VOCABULARY = 512
STEPS_IN_TRAINING = 100
MORE_LAYERS = 2
"""Additional layers of the larger model of a shape."""


class ProbeModelShape(NamedTuple):
    hidden: int
    batch: int
    sequence: int
    layers: int = 1
    stage: int = 0
    recomputes: bool = False
    is_whole: bool = False
    """Stage 3 shards no parameter."""
    tp: int = 1

    @property
    def larger(self) -> ProbeModelShape:
        return self._replace(layers=self.layers + MORE_LAYERS)

    @property
    def together(self) -> list[ProbeModelShape]:
        """At every stage, and at stage 3 with unsharded parameters, as in MachineRates.meetings."""
        return [*(self._replace(stage=stage) for stage in range(4)), self._replace(stage=3, is_whole=True)]

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_WIDTH

    def config(self, precision: str) -> Config:
        return build_config({
            "num_layers": self.layers, "hidden_size": self.hidden, "vocab_size": VOCABULARY, "lr": 1e-6,
            "num_attention_heads": self.heads, "model_parallel_size": self.tp, "max_position_embeddings": self.sequence,
            "batch_size": self.batch, "attention_dropout": 0.0, "hidden_dropout": 0.0, "zero_stage": self.stage,
            "stage3_param_persistence_threshold": 1 << 60 if self.is_whole else 0,
            "checkpoint_activations": self.recomputes,
            "clip_grad": 1.0, "mock_data": True, "eval_interval": 0,
            "train_iters": STEPS_IN_TRAINING, "log_interval": 2 * STEPS_IN_TRAINING,
            "tokenizer_type": "ByteLevelTokenizer", "compile": False,  # of many shapes it would take minutes
            **({} if precision == "fp32" else {precision: True})})

    def run(self, precision: str, device: Device, ranks: int = 1) -> PlannedRun:
        return PlannedRun(self.config(precision), ranks, device)


@dataclass(frozen=True)
class ProbeSizes:
    rows: tuple[int, ...]
    """Of products."""
    widths: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    """(sequence length, heads times samples) of attention."""
    elements: tuple[int, ...]
    """Of dropout."""
    logits: tuple[tuple[int, int], ...]
    """(rows, columns)"""
    loss_width: int
    bytes: tuple[int, ...]
    """Of collectives."""
    beside: int
    """Width of the square products that overlap a collective."""
    shapes: tuple[ProbeModelShape, ...]
    """Of models, from the smallest to the largest."""
    largest: ProbeModelShape
    """Only for the time of an update."""

    def cut(self, ranks: int) -> ProbeModelShape | None:
        """The smallest tensor parallel model, on all ranks or the largest possible part of them."""
        return next((shape.larger._replace(tp=tp) for tp in range(ranks, 1, -1) if ranks % tp == 0
                     for shape in self.shapes if shape.heads % tp == 0), None)


SIZES: dict[Device, ProbeSizes] = {
    "cpu": ProbeSizes(
        rows=(64, 256, 1024, 2048), widths=(64, 256, 1024), lengths=((32, 64), (128, 32), (512, 8), (1024, 4)),
        elements=(2**12, 2**16, 2**20, 2**22), logits=((64, 512), (256, 4096), (512, 32768)), loss_width=64,
        bytes=(2**12, 2**16, 2**20, 2**23, 2**25), beside=512,
        shapes=(ProbeModelShape(64, 8, 32), ProbeModelShape(128, 4, 128), ProbeModelShape(256, 4, 256),
                ProbeModelShape(384, 4, 512)),
        largest=ProbeModelShape(768, 1, 32, layers=3)),
    "cuda": ProbeSizes(
        rows=(256, 1024, 4096, 16384), widths=(256, 1024, 4096, 8192),
        lengths=((128, 2048), (512, 1024), (1024, 512), (4096, 128)), elements=(2**16, 2**20, 2**24, 2**27),
        logits=((1024, 8192), (4096, 32768), (8192, 65536)), loss_width=1024,
        bytes=(2**12, 2**16, 2**20, 2**24, 2**27, 2**30), beside=4096,
        shapes=(ProbeModelShape(256, 4, 256), ProbeModelShape(1024, 4, 1024), ProbeModelShape(2048, 8, 1024)),
        largest=ProbeModelShape(4096, 1, 128, layers=2))}

MIN_REST_SHARE = 0.02
"""Lower bound of the unexplained time as a share of the explained: on a busy machine their difference may be < 0."""

EMPTY_CURVE = RateCurve(())


def fit_rates(seen: ProbeResult, where: Where) -> MachineRates:
    return _RateFit(seen, where).rates()


@dataclass(frozen=True)
class _RateFit:
    seen: ProbeResult
    where: Where

    @property
    def device(self) -> Device:
        return "cuda" if self.where.device == "cuda" else "cpu"

    @property
    def sizes(self) -> ProbeSizes:
        return SIZES[self.device]

    def rates(self) -> MachineRates:
        """First the rates that were measured directly, then the rest of each model's time."""
        sizes, seen = self.sizes, self.seen
        forward = self._products(1, [[timings.forward for timings in line] for line in seen.products])
        backward = self._products(2, [[timings.backward for timings in line] for line in seen.products])
        hides = 0.0  # share of a collective that does not lengthen the products beside it
        if seen.beside:
            alone, exchange, both = seen.beside[0]
            hides = min(1.0, max(0.0, (alone + exchange - both) / min(alone, exchange)))
        attention_forward, attention_backward = self._attention(seen.attention)
        dropping_forward, dropping_backward = self._attention(seen.dropping)
        dropout_forward, dropout_backward = _curves(sizes.elements, seen.dropout)
        known = MachineRates(
            where=self.where, seconds=0.0, forward=forward, backward=backward, attention_forward=attention_forward,
            attention_backward=attention_backward, dropping_forward=dropping_forward,
            dropping_backward=dropping_backward, dropout_forward=dropout_forward, dropout_backward=dropout_backward,
            all_reduce=self._exchange([one.all_reduce for one in seen.exchanges]),
            reduce_scatter=self._exchange([one.reduce_scatter for one in seen.exchanges]),
            all_gather=self._exchange([one.all_gather for one in seen.exchanges]), hides=hides,
            link=2 * sizes.bytes[-2] / seen.link if seen.link else 0.0, block_forward=EMPTY_CURVE,
            block_backward=EMPTY_CURVE, loss=EMPTY_CURVE, update=EMPTY_CURVE, host_update=EMPTY_CURVE, replay=0.0,
            a_pass=0.0, a_step=0.0, split_unit=0.0, meetings=(0.0,) * NUM_COLLECTIVE_COSTS, inner_sum=0.0)
        of_models = self._with_passes(self._with_blocks(replace(known, loss=self._loss(known))))
        return self._with_collective_costs(of_models)

    def _products(self, count: int, seconds: Sequence[Sequence[float]]) -> Surface:
        """FLOP/s of `count` products, by rows and width."""
        sizes = self.sizes
        return Surface(sizes.rows, sizes.widths, tuple(
            tuple(count * 2 * rows * width**2 / taken for width, taken in zip(sizes.widths, line, strict=True))
            for rows, line in zip(sizes.rows, seconds, strict=True)))

    def _attention(self, seen: Sequence[PassTimings]) -> tuple[RateCurve, RateCurve]:
        """Seconds of one head."""
        lengths = self.sizes.lengths
        return _curves([length for length, _ in lengths], [PassTimings(*(seconds / heads for seconds in both))
                                                           for both, (_, heads) in zip(seen, lengths, strict=True)])

    def _exchange(self, seconds: Sequence[float]) -> RateCurve:
        return RateCurve(tuple(zip(map(float, self.sizes.bytes), seconds, strict=True))) if seconds else EMPTY_CURVE

    def _loss(self, rates: MachineRates) -> RateCurve:
        """Without its products."""
        points, inner = [], self.sizes.loss_width
        for (rows, columns), seconds in zip(self.sizes.logits, self.seen.loss, strict=True):
            flops, width = 2 * rows * columns * inner, sqrt(columns * inner)
            products = flops / rates.forward(rows, width) + 2 * flops / rates.backward(rows, width)
            points.append((float(rows * columns), max(seconds - products, MIN_REST_SHARE * seconds)))
        return RateCurve(tuple(points))

    def _with_blocks(self, rates: MachineRates) -> MachineRates:
        """Block and update rates, from models that differ only in their number of blocks."""
        sizes, seen = self.sizes, self.seen
        blocks, updates = list[PassTimings](), [(self._run(sizes.largest).shard_numel, seen.largest.step)]
        for shape, (few, many) in zip(sizes.shapes, seen.blocks, strict=True):
            run = self._run(shape.larger)
            blocks.append(PassTimings(
                _remainder((many.forward - few.forward) / MORE_LAYERS, block_forward_time(run, rates).total),
                _remainder((many.backward - few.backward) / MORE_LAYERS, block_backward_time(run, rates).total)))
            updates += [(self._run(shape).shard_numel, few.step), (run.shard_numel, many.step)]
        elements = [shape.batch * shape.sequence * shape.hidden for shape in sizes.shapes]
        forward, backward = _curves(elements, blocks)
        update = host_update = RateCurve(tuple(sorted(updates)))
        if seen.host:
            on_host = SIZES["cpu"]
            numels = [shape.run("fp32", "cpu").shard_numel for shape in (*on_host.shapes, on_host.largest)]
            host_update = RateCurve(tuple(sorted(zip(numels, seen.host, strict=True))))
        return replace(rates, block_forward=forward, block_backward=backward, update=update, host_update=host_update)

    def _with_passes(self, rates: MachineRates) -> MachineRates:
        """Fixed costs of a pass and of a step, of a sharded unit, and of recomputation: from the smallest model."""
        seen, shape = self.seen, self.sizes.shapes[0]
        run, variants = self._run(shape), seen.variants
        taken = variants.whole.forward + variants.whole.backward
        explained = (block_forward_time(run, rates) + block_backward_time(run, rates)
                     + embedding_and_loss_time(run, rates))
        again = block_recompute_time(self._run(shape._replace(recomputes=True)), rates)
        more, replay = (one.forward + one.backward - taken for one in (variants.split, variants.recomputed))
        return replace(rates, a_pass=max(0.0, taken - explained.total),
                       a_step=max(0.0, seen.training - sum((*seen.together, seen.blocks[0][1])[0])),
                       split_unit=max(0.0, more / (shape.layers + 1)),
                       replay=max(0.0, replay / shape.layers - again.total))

    def _with_collective_costs(self, rates: MachineRates) -> MachineRates:
        """Fixed costs of a collective: data parallel at each stage, then tensor parallel."""
        def cost(shape: ProbeModelShape, timings: StepTimings, count: Callable[[PlannedRun], float]) -> float:
            run = self._run(shape, self.where.ranks)
            explained = step_time(run, replace(rates, a_step=0.0)).total
            return max(0.0, sum(timings) - explained) / count(run)

        if self.seen.together:
            shapes = self.sizes.shapes[0].larger.together
            rates = replace(rates, meetings=tuple(cost(shape, timings, num_collectives) for shape, timings in
                                                  zip(shapes, self.seen.together, strict=True)))
        if (shape := self.sizes.cut(self.where.ranks)) and self.seen.cut:
            rates = replace(rates, inner_sum=cost(shape, self.seen.cut[0], num_tp_collectives))
        return rates

    def _run(self, shape: ProbeModelShape, ranks: int = 1) -> PlannedRun:
        return shape.run(self.where.precision, self.device, ranks)


def _remainder(taken: float, known: float) -> float:
    return max(taken - known, MIN_REST_SHARE * known)


def _curves(sizes: Iterable[float], both: Iterable[PassTimings]) -> tuple[RateCurve, RateCurve]:
    """(forward, backward) by size."""
    points = list[tuple[float, PassTimings]](zip(sizes, both, strict=True))
    return (RateCurve(tuple((size, one.forward) for size, one in points)),
            RateCurve(tuple((size, one.backward) for size, one in points)))
