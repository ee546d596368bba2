"""Small models under the real engine, for the probe: what a step of them takes, by its three calls, and what the loop
of training adds.

Each is on one rank, beside equal ones on the others, or data parallel over all of them. Models of one shape that differ
in their blocks take steps in turn, so that a machine which is busy for a while is so for both, and their difference is
that of the blocks.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from megatron.plan.sighting import StepTimings
from megatron.plan.sizes import STEPS_IN_TRAINING, VOCABULARY, ProbeModelShape
from megatron.plan.stopwatch import FEWEST, MOST, ProbeTimer, lowest_decile
from megatron.train import build
from megatron.train.batches import Batch
from megatron.train.evaluation import forward_loss
from megatron.train.garbage import periodic_gc
from megatron.train.log import RunLog
from megatron.train.loop import Trainer, TrainState
from mpu.groups import Groups

MODEL_SECONDS = 0.8
"""Of the steps of one shape; at least FEWEST."""
WARM_UP = 2
NO_GC_STEPS = 1 << 60
"""Steps between two looks for garbage."""


class ProbeModel:
    def __init__(self, shape: ProbeModelShape, precision: str, watch: ProbeTimer, groups: Groups) -> None:
        config = shape.config(precision)
        self._watch = watch
        model = build.model(config, groups, build.recomputation(config, groups))
        self._engine = build.engine(config, model, groups, watch.device)
        self._engine.train()
        # Any tokens, but those that share a model have the same.
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
    """What they usually take, on the slowest rank; with `groups`, together."""
    free_engines()
    models = [ProbeModel(shape, precision, watch, groups) for shape in shapes]
    for _ in range(WARM_UP):
        for model in models:
            model.step()
    with periodic_gc(NO_GC_STEPS):
        taken = _measure_rounds(models, watch, groups)
    return [StepTimings(*(watch.slowest(_typical(part, groups)) for part in zip(*steps, strict=True)))
            for steps in zip(*taken, strict=True)]


def _measure_rounds(models: Sequence[ProbeModel], watch: ProbeTimer, groups: Groups) -> list[list[StepTimings]]:
    """Of every round, what each took."""
    if groups.world.is_solo:
        taken, end = list[list[StepTimings]](), watch.now() + MODEL_SECONDS
        while len(taken) < FEWEST or watch.now() < end:
            taken.append([model.step() for model in models])
        return taken
    once = watch.slowest(watch.once(lambda: [model.step() for model in models]))
    return [[model.step() for model in models] for _ in range(max(FEWEST, min(MOST, int(MODEL_SECONDS / once))))]


def seconds_in_training(shape: ProbeModelShape, precision: str, watch: ProbeTimer, groups: Groups) -> float:
    """Of a step in the loop of training, on random tokens."""
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
    """Engines refer to themselves: those of before are still there."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _typical(samples: Sequence[float], groups: Groups) -> float:
    """Ranks that work together wait for the slowest in every step: it is no other program that makes their median
    longer."""
    return lowest_decile(samples) if groups.world.is_solo else median(samples)
