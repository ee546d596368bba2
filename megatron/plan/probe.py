"""Measures the rates of this machine: `python -m megatron.plan.probe FILE`, run as every rank of a job: a minute.

It times operations of torch, collectives, and steps of small models under the engine, in several sweeps. All ranks
measure at the same time, as they share memory and cores in training too; a number is the lowest decile, of the
slowest rank.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.schema import require
from megatron.distributed import process_group
from megatron.distributed.exit_codes import run
from megatron.plan.activations import Device
from megatron.plan.machine_rates import QUIET_SPREAD, MachineRates, Where
from megatron.plan.probe_fit import (SIZES, STEPS_IN_TRAINING, VOCABULARY, CollectiveTimings, OverlapTimings,
                                     PassTimings, ProbeModelShape, ProbeResult, ProbeSizes, StepTimings, VariantTimings,
                                     elementwise_min, fit_rates, spread)
from megatron.plan.step_time import HEAD_WIDTH
from megatron.train import build
from megatron.train.batches import Batch
from megatron.train.compile import set_matmul_precision
from megatron.train.evaluation import forward_loss
from megatron.train.loop import Trainer, TrainState, periodic_gc
from megatron.train.processor import keep_freed_memory
from megatron.train.run_log import RunLog
from mpu import groups as mpu_groups
from mpu.collectives import all_gather_into, all_gather_json, all_reduce_into, barrier, reduce_scatter_into
from mpu.cross_entropy import linear_cross_entropy
from mpu.device import on_accelerator
from mpu.groups import SOLO, Group, Groups

SECONDS, FEWEST, MOST = 0.1, 3, 50
"""Seconds of measuring one operation, and the minimum and maximum number of samples."""
SAMPLE, MOST_CALLS = 0.005, 200
"""Target seconds of one sample on a GPU, and the maximum number of calls in it."""

Work = Callable[[], object]


def lowest_decile(samples: Iterable[float]) -> float:
    return quantiles(samples, n=10, method="inclusive")[0]


@dataclass(frozen=True)
class ProbeTimer:
    device: torch.device
    world: Group

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def once(self, work: Work, calls: int = 1) -> float:
        """Seconds of a call: the mean over `calls`."""
        begin = self.now()
        for _ in range(calls):
            work()
        return (self.now() - begin) / calls

    def seconds(self, work: Work) -> float:
        """Of an operation without communication, on all ranks at the same time."""
        work()
        calls, samples = self._calls(work), list[float]()
        barrier(self.world)
        end = self.now() + SECONDS
        while len(samples) < FEWEST or len(samples) < MOST and self.now() <= end:
            samples.append(self.once(work, calls))
        return self.slowest(lowest_decile(samples))

    def collective_seconds(self, work: Work) -> float:
        """Of an operation with communication."""
        work()
        calls = self._calls(work)
        times = max(FEWEST, min(MOST, int(SECONDS / (self.slowest(self.once(work, calls)) * calls))))
        return self.slowest(lowest_decile(self.once(work, calls) for _ in range(times)))

    def passes(self, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> PassTimings:
        """Seconds of a forward, and of its backward."""
        ahead = self.seconds(forward)
        result = forward()
        gradient = torch.ones_like(result)
        return PassTimings(ahead,
                           self.seconds(lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)))

    def slowest(self, seconds: float) -> float:
        return seconds if self.world.is_solo else float(max(all_gather_json(seconds, self.world)))

    def _calls(self, work: Work) -> int:
        """Calls in one sample."""
        if self.device.type == "cpu":
            return 1
        return max(1, min(MOST_CALLS, int(SAMPLE / self.slowest(self.once(work)))))


MODEL_SECONDS = 0.8
"""Seconds of measuring the steps of one shape, with at least FEWEST steps."""
WARM_UP = 2
NO_GC_STEPS = 1 << 60
"""A gc interval that no measurement reaches."""


class ProbeModel:
    def __init__(self, shape: ProbeModelShape, precision: str, watch: ProbeTimer, groups: Groups) -> None:
        config = shape.config(precision)
        self._watch = watch
        model = build.model(config, groups, build.recomputation(config, groups))
        self._engine = build.engine(config, model, groups, watch.device)
        self._engine.train()
        # Any tokens, but tensor parallel ranks need equal ones.
        numbers = torch.arange(shape.batch * (shape.sequence + 1), device=watch.device)
        rows = (numbers % VOCABULARY).reshape(shape.batch, -1)
        self._batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def step(self) -> StepTimings:
        begin = self._watch.now()
        loss = forward_loss(self._engine, self._batch)
        ahead = self._watch.now()
        self._engine.backward(loss)
        back = self._watch.now()
        self._engine.step()
        return StepTimings(ahead - begin, back - ahead, self._watch.now() - back)


def steps_in_turn(shapes: Sequence[ProbeModelShape], precision: str, watch: ProbeTimer,
                  groups: Groups = Groups()) -> list[StepTimings]:
    """Typical step times of each model on the slowest rank, with the models' steps interleaved."""
    free_engines()
    models = [ProbeModel(shape, precision, watch, groups) for shape in shapes]

    def one_round() -> list[StepTimings]:
        return [model.step() for model in models]

    for _ in range(WARM_UP):
        one_round()
    with periodic_gc(NO_GC_STEPS):
        if groups.world.is_solo:
            rounds, end = list[list[StepTimings]](), watch.now() + MODEL_SECONDS
            while len(rounds) < FEWEST or watch.now() < end:
                rounds.append(one_round())
        else:  # all ranks must take the same number of steps
            once = watch.slowest(watch.once(one_round))
            rounds = [one_round() for _ in range(max(FEWEST, min(MOST, int(MODEL_SECONDS / once))))]
    return [StepTimings(*(watch.slowest(_typical(part, groups)) for part in zip(*steps, strict=True)))
            for steps in zip(*rounds, strict=True)]


def seconds_in_training(shape: ProbeModelShape, precision: str, watch: ProbeTimer, groups: Groups) -> float:
    """Of a step in the training loop, on random tokens."""
    free_engines()
    config = shape.config(precision)
    tokenizer = build.tokenizer(config)
    samples = build.datasets(config, tokenizer, groups).train
    assert samples is not None, "random tokens are for training"
    engine = build.engine(config, build.model(config, groups), groups, watch.device)
    rule = build.micro_batch_sampler(config, groups, tokenizer)
    with TemporaryDirectory() as place:
        file = Path(place) / "metrics.jsonl"
        with RunLog(replace(config.log, metrics_file=str(file)), STEPS_IN_TRAINING, 0, writes=True) as log:
            Trainer(config, engine, rule, watch.device, log).run(TrainState(), samples, None)
        steps = [json.loads(line)["step_ms"] / 1e3 for line in file.read_text().splitlines()]
    return watch.slowest(_typical(steps[WARM_UP:], groups))


def free_engines() -> None:
    """Delete earlier engines, which are reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _typical(samples: Sequence[float], groups: Groups) -> float:
    """The median for ranks that communicate: waiting for the slowest one is part of their steps."""
    return lowest_decile(samples) if groups.world.is_solo else median(samples)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DROPOUT = 0.1
MOST_SWEEPS = 3
"""The minimum is two."""


@dataclass(frozen=True)
class Probe:
    watch: ProbeTimer
    precision: str
    data_parallel: Groups
    tensor_parallel: Groups
    """Ranks of the tensor parallel model."""

    @property
    def device(self) -> torch.device:
        return self.watch.device

    @property
    def kind(self) -> Device:
        return kind_of(self.device)

    @property
    def sizes(self) -> ProbeSizes:
        return SIZES[self.kind]

    def rates(self, machine: str) -> MachineRates:
        begin = self.watch.now()
        set_matmul_precision(self.sizes.largest.config(self.precision), self.device)
        where = Where(machine, torch.__version__, self.kind, self.precision, self.watch.world.size,
                      torch.get_num_threads())
        sweeps = [self.sweep(), self.sweep()]
        while spread(*sweeps) > QUIET_SPREAD and len(sweeps) < MOST_SWEEPS:
            sweeps.append(self.sweep())
        return replace(fit_rates(elementwise_min(*sweeps), where), seconds=self.watch.now() - begin,
                       spread=spread(*sweeps), taken=date.today().isoformat())

    def sweep(self) -> ProbeResult:
        """Every measurement once."""
        first, is_solo, groups = self.sizes.shapes[0], self.watch.world.is_solo, self.data_parallel
        cut = self.sizes.cut(self.watch.world.size)
        host, host_sizes = replace(self.watch, device=torch.device("cpu")), SIZES["cpu"]
        return ProbeResult(
            products=tuple(tuple(self._product(rows, width) for width in self.sizes.widths)
                           for rows in self.sizes.rows),
            attention=tuple(self._attention(length, heads, 0.0) for length, heads in self.sizes.lengths),
            dropping=tuple(self._attention(length, heads, DROPOUT) for length, heads in self.sizes.lengths),
            dropout=tuple(map(self._dropout, self.sizes.elements)),
            loss=tuple(self._loss(rows, columns) for rows, columns in self.sizes.logits),
            exchanges=() if is_solo else tuple(map(self._exchange, self.sizes.bytes)),
            beside=() if is_solo else (self._beside(),), link=0.0 if self.kind == "cpu" else self._link(),
            blocks=tuple(self._steps(shape, shape.larger) for shape in self.sizes.shapes),
            largest=self._steps(self.sizes.largest)[0],
            variants=VariantTimings(*self._steps(first, first._replace(stage=3), first._replace(recomputes=True))),
            together=() if is_solo else tuple(self._steps(shape, groups=groups)[0] for shape in first.larger.together),
            cut=self._steps(cut, groups=self.tensor_parallel) if cut else (),
            training=seconds_in_training(first.larger, self.precision, self.watch, groups),
            host=() if self.kind == "cpu" else tuple(steps_in_turn((shape,), "fp32", host)[0].step
                                                     for shape in (*host_sizes.shapes, host_sizes.largest)))

    # ---- operations of torch --------------------------------------------------------------------------------------

    def _product(self, rows: int, width: int) -> PassTimings:
        x, weight, bias = self._random(rows, width), self._random(width, width), self._random(width)
        return PassTimings(self.watch.seconds(lambda: F.linear(x, weight, bias)),
                           self.watch.seconds(lambda: (x @ weight, x.t() @ x)))

    def _attention(self, length: int, heads: int, dropout: float) -> PassTimings:
        q, k, v = (self._random(1, heads, length, HEAD_WIDTH).requires_grad_() for _ in range(3))
        return self.watch.passes(
            lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True), (q, k, v))

    def _dropout(self, elements: int) -> PassTimings:
        x = self._random(elements).requires_grad_()
        return self.watch.passes(lambda: F.dropout(x, DROPOUT, True), (x,))

    def _loss(self, rows: int, columns: int) -> float:
        hidden = self._random(rows, self.sizes.loss_width).requires_grad_()
        weight = self._random(columns, self.sizes.loss_width).requires_grad_()
        target = torch.randint(0, columns, (rows,), device=self.device)
        even = torch.ones(rows, device=self.device)
        return self.watch.seconds(lambda: linear_cross_entropy(hidden, weight, target, SOLO, loss_weight=even))

    # ---- exchange -------------------------------------------------------------------------------------------------

    def _exchange(self, size: int) -> CollectiveTimings:
        """All-reduce, reduce-scatter and all-gather of `size` bytes on the wire. An accelerator widens 16-bit gradients
        for the reduce-scatter: they are fp32 here from the start."""
        world = self.watch.world

        def full_and_shard(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            full = torch.zeros(size // dtype.itemsize // world.size * world.size, dtype=dtype, device=self.device)
            return full, torch.zeros_like(full[:full.numel() // world.size])

        full, shard = full_and_shard(DTYPES[self.precision])
        sent, mine = full_and_shard(torch.float32) if on_accelerator(self.device) else (full, shard)
        return CollectiveTimings(self.watch.collective_seconds(lambda: all_reduce_into(full, world).wait()),
                                 self.watch.collective_seconds(lambda: reduce_scatter_into(mine, sent, world).wait()),
                                 self.watch.collective_seconds(lambda: all_gather_into(full, shard, world).wait()))

    def _beside(self) -> OverlapTimings:
        world, (x, full) = self.watch.world, self._tensors_beside()
        times = self._times

        def products() -> None:
            for _ in range(times):
                x @ x

        def both() -> None:
            pending = all_reduce_into(full, world)
            products()
            pending.wait()

        return OverlapTimings(self.watch.collective_seconds(products), self.watch.collective_seconds(
            lambda: all_reduce_into(full, world).wait()), self.watch.collective_seconds(both))

    @cached_property
    def _times(self) -> int:
        """Products that take as long as an all-reduce: measured once, so that all sweeps do the same."""
        world, (x, full) = self.watch.world, self._tensors_beside()
        exchange = self.watch.collective_seconds(lambda: all_reduce_into(full, world).wait())
        return max(1, round(exchange / self.watch.seconds(lambda: x @ x)))

    def _tensors_beside(self) -> tuple[Tensor, Tensor]:
        side = self.sizes.beside
        return self._random(side, side), torch.zeros(self.sizes.bytes[-2] // 4, device=self.device)

    def _link(self) -> float:
        """From the device to the host, and back."""
        size = self.sizes.bytes[-2]
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=self.device)
        return (self.watch.seconds(lambda: here.copy_(there, non_blocking=True))
                + self.watch.seconds(lambda: there.copy_(here, non_blocking=True)))

    # ---- models ---------------------------------------------------------------------------------------------------

    def _steps(self, *shapes: ProbeModelShape, groups: Groups = Groups()) -> Any:
        """`StepTimings` of each."""
        return tuple(steps_in_turn(shapes, self.precision, self.watch, groups))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(DTYPES[self.precision])


def kind_of(device: torch.device) -> Device:
    return "cuda" if device.type == "cuda" else "cpu"


def main(argv: Sequence[str]) -> int:
    path, machine, precision, kind = argv  # the file to write, then as in machine_rates.Where
    env = process_group.init()
    device = process_group.device_for(env)
    require(device.type == kind, f"torch {torch.__version__} finds no {kind} here: install one that does, or plan with "
            f"--device {device.type}")
    if device.type == "cpu":
        keep_freed_memory()
    cut = SIZES[kind_of(device)].cut(env.world_size)
    data_parallel, tensor_parallel = mpu_groups.build(), mpu_groups.build(cut.tp if cut else 1)
    watch = ProbeTimer(device, data_parallel.world)
    rates = Probe(watch, precision, data_parallel, tensor_parallel).rates(machine)
    if env.rank == 0:
        Path(path).write_text(json.dumps(rates.as_dict(), indent=1) + "\n", encoding="utf-8")
    process_group.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:]), is_job=True))
