"""The rates of a machine, from what its probe saw: pure arithmetic.

Operations of torch and exchanges are as they were measured. The *rest* of a block, of a pass and of a step is what the
arithmetic of time.py does not explain by them in the steps of small models: so what it predicts of these models is what
they took.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from megatron.plan.activations import Device
from megatron.plan.exchange import num_collectives, num_tp_collectives
from megatron.plan.footprint import PlannedRun
from megatron.plan.rates import NUM_COLLECTIVE_COSTS, Curve, MachineRates, Surface, Where
from megatron.plan.sighting import PassTimings, ProbeResult
from megatron.plan.sizes import MORE_LAYERS, SIZES, ProbeModelShape, ProbeSizes
from megatron.plan.time import (block_backward_time, block_forward_time, block_recompute_time, embedding_and_loss_time,
                                step_time)

MIN_REST_SHARE = 0.02
"""Share that the rest has of what is known, at least: differences of a busy machine can be anything."""

EMPTY_CURVE = Curve(())


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
        """First the rates that were measured as they are; by them, those of what is left."""
        sizes, seen = self.sizes, self.seen
        forward, backward = self._products()
        attention_forward, attention_backward = self._attention(seen.attention)
        dropping_forward, dropping_backward = self._attention(seen.dropping)
        dropout_forward, dropout_backward = _curves(sizes.elements, seen.dropout)
        known = MachineRates(where=self.where,
                             seconds=0.0,
                             forward=forward,
                             backward=backward,
                             attention_forward=attention_forward,
                             attention_backward=attention_backward,
                             dropping_forward=dropping_forward,
                             dropping_backward=dropping_backward,
                             dropout_forward=dropout_forward,
                             dropout_backward=dropout_backward,
                             all_reduce=self._exchange([one.all_reduce for one in seen.exchanges]),
                             reduce_scatter=self._exchange([one.reduce_scatter for one in seen.exchanges]),
                             all_gather=self._exchange([one.all_gather for one in seen.exchanges]),
                             hides=self._hides(),
                             link=2 * sizes.bytes[-2] / seen.link if seen.link else 0.0,
                             block_forward=EMPTY_CURVE,
                             block_backward=EMPTY_CURVE,
                             loss=EMPTY_CURVE,
                             update=EMPTY_CURVE,
                             host_update=EMPTY_CURVE,
                             replay=0.0,
                             a_pass=0.0,
                             a_step=0.0,
                             split_unit=0.0,
                             meetings=(0.0, ) * NUM_COLLECTIVE_COSTS,
                             inner_sum=0.0)
        of_models = self._with_passes(self._with_blocks(replace(known, loss=self._loss(known))))
        return self._with_inner_sums(self._with_meetings(of_models))

    def _products(self) -> tuple[Surface, Surface]:
        """FLOP/s."""
        sizes = self.sizes
        lines = [[PassTimings(flops / both.forward, 2 * flops / both.backward)
                  for width, both in zip(sizes.widths, line, strict=True) for flops in [2 * rows * width**2]]
                 for rows, line in zip(sizes.rows, self.seen.products, strict=True)]
        return (Surface(sizes.rows, sizes.widths, tuple(tuple(both.forward for both in line) for line in lines)),
                Surface(sizes.rows, sizes.widths, tuple(tuple(both.backward for both in line) for line in lines)))

    def _attention(self, seen: Sequence[PassTimings]) -> tuple[Curve, Curve]:
        """Of one head."""
        lengths = self.sizes.lengths
        return _curves([length for length, _ in lengths],
                       [PassTimings(*(seconds / heads for seconds in both))
                        for both, (_, heads) in zip(seen, lengths, strict=True)])

    def _exchange(self, seconds: Sequence[float]) -> Curve:
        return Curve(tuple(zip(map(float, self.sizes.bytes), seconds, strict=True))) if seconds else EMPTY_CURVE

    def _hides(self) -> float:
        """Share of an exchange that passes beside products without making the two together longer."""
        if not self.seen.beside:
            return 0.0
        alone, exchange, both = self.seen.beside[0]
        return min(1.0, max(0.0, (alone + exchange - both) / min(alone, exchange)))

    def _loss(self, rates: MachineRates) -> Curve:
        """Beside its products."""
        points, inner = [], self.sizes.loss_width
        for (rows, columns), seconds in zip(self.sizes.logits, self.seen.loss, strict=True):
            flops, width = 2 * rows * columns * inner, sqrt(columns * inner)
            products = flops / rates.forward(rows, width) + 2 * flops / rates.backward(rows, width)
            points.append((float(rows * columns), max(seconds - products, MIN_REST_SHARE * seconds)))
        return Curve(tuple(points))

    def _with_blocks(self, rates: MachineRates) -> MachineRates:
        """By models of one shape that differ in their blocks; and updates."""
        sizes, seen = self.sizes, self.seen
        blocks, updates = list[PassTimings](), [(self._run(sizes.largest).shard_numel, seen.largest.step)]
        for shape, (few, many) in zip(sizes.shapes, seen.blocks, strict=True):
            run = self._run(shape.larger)
            blocks.append(PassTimings(
                _remainder((many.forward - few.forward) / MORE_LAYERS, block_forward_time(run, rates).total),
                _remainder((many.backward - few.backward) / MORE_LAYERS, block_backward_time(run, rates).total)))
            updates += [(self._run(shape).shard_numel, few.step), (run.shard_numel, many.step)]
        forward, backward = _curves([shape.elements for shape in sizes.shapes], blocks)
        update = Curve(tuple(sorted(updates)))
        return replace(rates, block_forward=forward, block_backward=backward, update=update,
                       host_update=self._host_update() if seen.host else update)

    def _with_passes(self, rates: MachineRates) -> MachineRates:
        """What a pass takes besides, by the smallest model, and a step; what splitting adds, and recomputation."""
        seen, shape = self.seen, self.sizes.shapes[0]
        run, variants = self._run(shape), seen.variants
        taken = variants.whole.forward + variants.whole.backward
        explained = block_forward_time(run, rates) + block_backward_time(run, rates) + embedding_and_loss_time(
            run, rates)
        again = block_recompute_time(self._run(shape._replace(recomputes=True)), rates)
        more, replay = (one.forward + one.backward - taken for one in (variants.split, variants.recomputed))
        return replace(rates, a_pass=max(0.0, taken - explained.total),
                       a_step=max(0.0, seen.training - sum((*seen.together, seen.blocks[0][1])[0])),
                       split_unit=max(0.0, more / (shape.layers + 1)),
                       replay=max(0.0, replay / shape.layers - again.total))

    def _with_meetings(self, rates: MachineRates) -> MachineRates:
        """What ranks of the smallest model take together that the wire alone does not explain, a collective."""
        if not self.seen.together:
            return rates
        found = list[float]()
        for shape, taken in zip(self.sizes.shapes[0].larger.together, self.seen.together, strict=True):
            run = self._run(shape, self.where.ranks)
            explained = step_time(run, replace(rates, a_step=0.0)).total
            found.append(max(0.0, sum(taken) - explained) / num_collectives(run))
        return replace(rates, meetings=tuple(found))

    def _with_inner_sums(self, rates: MachineRates) -> MachineRates:
        """The same, of tensor parallel ranks."""
        shape = self.sizes.cut(self.where.ranks)
        if not shape or not self.seen.cut:
            return rates
        run = self._run(shape, self.where.ranks)
        explained = step_time(run, replace(rates, a_step=0.0)).total
        return replace(rates, inner_sum=max(0.0, sum(self.seen.cut[0]) - explained) / num_tp_collectives(run))

    def _host_update(self) -> Curve:
        sizes = SIZES["cpu"]
        numels = [shape.run("fp32", "cpu").shard_numel for shape in (*sizes.shapes, sizes.largest)]
        return Curve(tuple(sorted(zip(numels, self.seen.host, strict=True))))

    def _run(self, shape: ProbeModelShape, ranks: int = 1) -> PlannedRun:
        return shape.run(self.where.precision, self.device, ranks)


def _remainder(taken: float, known: float) -> float:
    return max(taken - known, MIN_REST_SHARE * known)


def _curves(sizes: Iterable[float], both: Iterable[PassTimings]) -> tuple[Curve, Curve]:
    """Of forward and of backward."""
    points = list[tuple[float, PassTimings]](zip(sizes, both, strict=True))
    return (Curve(tuple((size, one.forward) for size, one in points)),
            Curve(tuple((size, one.backward) for size, one in points)))
