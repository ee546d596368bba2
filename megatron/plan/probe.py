"""Measures the rates of this machine: `python -m megatron.plan.probe FILE`, as every rank of a job of them.

Measured are operations of torch, exchanges between the ranks, and steps of small models under the engine, of which
time.py's own arithmetic is then taken off: so what it predicts of these models is what they took. About half a minute.

Not here: what rates are (rates.py), and where they are kept (kept_rates.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import sqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.setting import require
from megatron.launch import distributed
from megatron.launch.exits import run
from megatron.plan.activations import Device
from megatron.plan.rates import STAGES, Curve, Point, Rates, Surface, Where
from megatron.plan.sizes import SIZES, Sizes
from megatron.plan.small_models import seconds_in_training, steps_in_turn
from megatron.plan.stopwatch import Stopwatch
from megatron.plan.time import HEAD_WIDTH, block_backward, block_forward, ends, step_time
from megatron.train.allocator import keep_freed_memory
from megatron.train.compiling import set_products
from mpu import groups as mpu_groups
from mpu.collectives import all_gather_into, all_reduce_into, reduce_scatter_into
from mpu.cross_entropy import linear_cross_entropy
from mpu.device import on_accelerator
from mpu.groups import SOLO, Groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DROPOUT = 0.1
MORE_LAYERS = 2
"""Of the second model of each shape."""
LEAST = 0.02
"""Share that the rest has of what is known, at least: differences of a busy machine can be anything."""

NOTHING = Curve(())


@dataclass(frozen=True)
class Probe:
    watch: Stopwatch
    precision: str
    groups: Groups

    @property
    def device(self) -> torch.device:
        return self.watch.device

    @property
    def kind(self) -> Device:
        return "cuda" if self.device.type == "cuda" else "cpu"

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.kind]

    def rates(self, machine: str) -> Rates:
        begin = self.watch.now()
        set_products(self.sizes.largest.config(self.precision), self.device)
        where = Where(machine, torch.__version__, self.kind, self.precision, self.watch.world.size,
                      torch.get_num_threads())
        forward, backward = self._products()
        reduce, scatter, gather = self._exchanges()
        found = Rates(where, 0.0, forward, backward, *self._attention(0.0), *self._attention(DROPOUT), NOTHING, NOTHING,
                      0.0, *self._dropout(), NOTHING, NOTHING, 0.0, 0.0, 0.0, (0.0,) * STAGES, reduce, scatter, gather,
                      self._hides(), self._link(), NOTHING)
        found = self._with_meetings(self._with_models(replace(found, loss=self._loss(found))))
        host = found.update if self.kind == "cpu" else self._host_update()
        return replace(found, host_update=host, seconds=self.watch.now() - begin,
                       taken=date.today().isoformat())

    # ---- operations of torch --------------------------------------------------------------------------------------

    def _products(self) -> tuple[Surface, Surface]:
        forward, backward = list[tuple[float, ...]](), list[tuple[float, ...]]()
        heights, widths = self.sizes.rows, self.sizes.widths
        for rows in heights:
            pairs = [self._product(rows, width) for width in widths]
            forward.append(tuple(pair[0] for pair in pairs))
            backward.append(tuple(pair[1] for pair in pairs))
        return Surface(heights, widths, tuple(forward)), Surface(heights, widths, tuple(backward))

    def _product(self, rows: int, width: int) -> tuple[float, float]:
        """FLOP/s of a product, and of the two that give its gradients."""
        x, weight, bias = self._random(rows, width), self._random(width, width), self._random(width)
        flops = 2 * rows * width**2
        return (flops / self.watch.seconds(lambda: F.linear(x, weight, bias)),
                2 * flops / self.watch.seconds(lambda: (x @ weight, x.t() @ x)))

    def _attention(self, dropout: float) -> tuple[Curve, Curve]:
        points: list[tuple[Point, Point]] = []
        for length, heads in self.sizes.lengths:
            q, k, v = (self._random(1, heads, length, HEAD_WIDTH).requires_grad_() for _ in range(3))
            forward, backward = self.watch.passes(
                lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True), (q, k, v))
            points.append(((length, forward / heads), (length, backward / heads)))
        return _curves(points)

    def _dropout(self) -> tuple[Curve, Curve]:
        points: list[tuple[Point, Point]] = []
        for elements in self.sizes.elements:
            x = self._random(elements).requires_grad_()
            forward, backward = self.watch.passes(lambda: F.dropout(x, DROPOUT, True), (x,))
            points.append(((elements, forward), (elements, backward)))
        return _curves(points)

    def _loss(self, rates: Rates) -> Curve:
        """Beside its products; those of its gradients are made on the way forward."""
        points, inner = [], self.sizes.loss_width
        for rows, columns in self.sizes.logits:
            hidden = self._random(rows, inner).requires_grad_()
            weight = self._random(columns, inner).requires_grad_()
            target = torch.randint(0, columns, (rows,), device=self.device)
            even = torch.ones(rows, device=self.device)
            seconds = self.watch.seconds(lambda: linear_cross_entropy(hidden, weight, target, SOLO, loss_weight=even))
            flops, width = 2 * rows * columns * inner, sqrt(columns * inner)
            products = flops / rates.forward(rows, width) + 2 * flops / rates.backward(rows, width)
            points.append((float(rows * columns), max(seconds - products, LEAST * seconds)))
        return Curve(tuple(points))

    # ---- exchange -------------------------------------------------------------------------------------------------

    def _exchanges(self) -> tuple[Curve, Curve, Curve]:
        """Sums for all, sums for their owners, and collecting. An accelerator's wire would widen 16-bit numbers that go
        to their owners: they are as wide here as they travel."""
        world = self.watch.world
        if world.is_solo:
            return NOTHING, NOTHING, NOTHING
        points: tuple[list[Point], list[Point], list[Point]] = [], [], []
        for size in self.sizes.bytes:
            full, shard = self._flat(size, DTYPES[self.precision])
            sent, mine = self._flat(size, torch.float32) if on_accelerator(self.device) else (full, shard)
            for found, work in zip(points, (lambda: all_reduce_into(full, world).wait(),
                                            lambda: reduce_scatter_into(mine, sent, world).wait(),
                                            lambda: all_gather_into(full, shard, world).wait()), strict=True):
                found.append((float(size), self.watch.together(work)))
        reduce, scatter, gather = (Curve(tuple(found)) for found in points)
        return reduce, scatter, gather

    def _flat(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """So many bytes, and a rank's part."""
        ranks = self.watch.world.size
        full = torch.zeros(size // dtype.itemsize // ranks * ranks, dtype=dtype, device=self.device)
        return full, torch.zeros_like(full[:full.numel() // ranks])

    def _hides(self) -> float:
        """Share of an exchange that passes beside products without making the two together longer."""
        world = self.watch.world
        if world.is_solo:
            return 0.0
        side, size = self.sizes.beside, self.sizes.bytes[-2]
        x, full = self._random(side, side), torch.zeros(size // 4, device=self.device)
        exchange = self.watch.together(lambda: all_reduce_into(full, world).wait())
        times = max(1, round(exchange / self.watch.seconds(lambda: x @ x)))

        def products() -> None:
            for _ in range(times):
                x @ x

        def both() -> None:
            pending = all_reduce_into(full, world)
            products()
            pending.wait()

        alone, beside = self.watch.together(products), self.watch.together(both)
        return min(1.0, max(0.0, (alone + exchange - beside) / min(alone, exchange)))

    def _link(self) -> float:
        """Bytes a second between host and device: of both ways, one after the other."""
        if self.kind == "cpu":
            return 0.0
        size = self.sizes.bytes[-2]
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=self.device)
        return 2 * size / (self.watch.seconds(lambda: here.copy_(there, non_blocking=True))
                           + self.watch.seconds(lambda: there.copy_(here, non_blocking=True)))

    # ---- models ---------------------------------------------------------------------------------------------------

    def _with_models(self, rates: Rates) -> Rates:
        """The rest of a block, of a pass and of a step is what the arithmetic so far does not explain."""
        blocks: list[tuple[Point, Point]] = []
        updates: list[Point] = []
        for shape in self.sizes.shapes:
            larger = shape._replace(layers=shape.layers + MORE_LAYERS)
            few, many = steps_in_turn((shape, larger), self.precision, self.watch)
            run = larger.run(self.precision, self.kind)
            forward, backward = block_forward(run, rates).total, block_backward(run, rates).total
            blocks.append(((shape.elements, _rest((many.forward - few.forward) / MORE_LAYERS, forward)),
                           (shape.elements, _rest((many.backward - few.backward) / MORE_LAYERS, backward))))
            updates.append((run.shard_numel, many.step))
        forwards, backwards = _curves(blocks)
        largest = self.sizes.largest
        updates.append((largest.run(self.precision, self.kind).shard_numel,
                        steps_in_turn((largest,), self.precision, self.watch)[0].step))
        return self._with_passes(replace(rates, block_forward=forwards, block_backward=backwards,
                                         update=Curve(tuple(sorted(updates)))))

    def _with_passes(self, rates: Rates) -> Rates:
        """What a pass takes besides, by the smallest model, and a step; what splitting adds, and recomputation."""
        shape = self.sizes.shapes[0]
        whole, split, again = steps_in_turn((shape, shape._replace(stage=3), shape._replace(recomputes=True)),
                                            self.precision, self.watch)
        run, taken = shape.run(self.precision, self.kind), whole.forward + whole.backward
        forward = block_forward(run, rates)
        explained = forward + block_backward(run, rates) + ends(run, rates)
        more, replay = (one.forward + one.backward - taken for one in (split, again))
        loop = seconds_in_training(shape, self.precision, self.watch) - taken - whole.step
        return replace(rates, a_pass=max(0.0, taken - explained.total), a_step=max(0.0, loop),
                       split_unit=max(0.0, more / (shape.layers + 1)),
                       replay=max(0.0, replay / shape.layers - forward.total))

    def _with_meetings(self, rates: Rates) -> Rates:
        """What ranks of the smallest model take together that their exchange alone does not explain, a unit."""
        if self.watch.world.is_solo:
            return rates
        found = []
        for stage in range(STAGES):
            shape = self.sizes.shapes[0]._replace(layers=1 + MORE_LAYERS, stage=stage)
            taken = sum(steps_in_turn((shape,), self.precision, self.watch, self.groups)[0])
            run = shape.run(self.precision, self.kind, self.watch.world.size)
            explained = step_time(run, replace(rates, a_step=0.0)).total
            found.append(max(0.0, taken - explained) / (shape.layers + 1))
        return replace(rates, meetings=tuple(found))

    def _host_update(self) -> Curve:
        host, sizes = replace(self.watch, device=torch.device("cpu")), SIZES["cpu"]
        return Curve(tuple(sorted((shape.run("fp32", "cpu").shard_numel, taken.step)
                                  for shape in (*sizes.shapes, sizes.largest)
                                  for taken in steps_in_turn((shape,), "fp32", host))))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(DTYPES[self.precision])


def _rest(taken: float, known: float) -> float:
    return max(taken - known, LEAST * known)


def _curves(points: Sequence[tuple[Point, Point]]) -> tuple[Curve, Curve]:
    """Of forward and of backward."""
    forward, backward = (Curve(tuple(sorted(one))) for one in zip(*points, strict=True))
    return forward, backward


def main(argv: Sequence[str]) -> int:
    """Of every rank: the name of the file to write, of the machine, of the precision, and of the kind of device."""
    path, machine, precision, kind = argv
    env = distributed.init()
    device = distributed.device_for(env)
    require(device.type == kind, f"torch {torch.__version__} finds no {kind} here: install one that does, or plan with "
            f"--device {device.type}")
    if device.type == "cpu":
        keep_freed_memory()
    groups = mpu_groups.build()
    found = Probe(Stopwatch(device, groups.world), precision, groups).rates(machine)
    if env.rank == 0:
        Path(path).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:]), is_job=True))
