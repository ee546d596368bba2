"""Small models under the real engine, for the probe: what a step of them takes, by its three calls, and what the loop
of training adds.

Each is on one rank, beside equal ones on the others, or data parallel over all of them. Models of one shape that differ
in their blocks take steps in turn, so that a machine which is busy for a while is so for both, and their difference is
that of the blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from megatron.config.tree import Config, build_config
from megatron.plan.activations import Device
from megatron.plan.footprint import Run
from megatron.plan.sighting import Taken
from megatron.plan.stopwatch import FEWEST, MOST, Stopwatch, usual
from megatron.plan.time import HEAD_WIDTH
from megatron.train import build
from megatron.train.batches import Batch
from megatron.train.evaluation import forward_loss
from megatron.train.log import RunLog
from megatron.train.loop import Trainer, TrainState
from mpu.groups import Groups

SECONDS = 0.8
"""Of the steps of one shape; at least FEWEST."""
WARM_UP = 2
STEPS_IN_TRAINING = 100
MORE_LAYERS = 2
"""Of the larger model of a shape."""


class Shape(NamedTuple):
    hidden: int
    batch: int
    sequence: int
    layers: int = 1
    stage: int = 0
    recomputes: bool = False
    tp: int = 1

    @property
    def larger(self) -> Shape:
        return self._replace(layers=self.layers + MORE_LAYERS)

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_WIDTH

    @property
    def elements(self) -> int:
        return self.tokens * self.hidden

    def config(self, precision: str) -> Config:
        return build_config({
            "num_layers": self.layers, "hidden_size": self.hidden, "vocab_size": VOCABULARY, "lr": 1e-6,
            "num_attention_heads": self.heads, "model_parallel_size": self.tp, "max_position_embeddings": self.sequence,
            "batch_size": self.batch, "attention_dropout": 0.0, "hidden_dropout": 0.0, "zero_stage": self.stage,
            "stage3_param_persistence_threshold": 0, "checkpoint_activations": self.recomputes,
            "clip_grad": 1.0, "mock_data": True, "eval_interval": 0,
            "train_iters": STEPS_IN_TRAINING, "log_interval": 2 * STEPS_IN_TRAINING,
            "tokenizer_type": "ByteLevelTokenizer", "compile": False,  # of many shapes it would take minutes
            **({} if precision == "fp32" else {precision: True})})

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def run(self, precision: str, device: Device, ranks: int = 1) -> Run:
        return Run(self.config(precision), ranks, device)


VOCABULARY = 512


class SmallModel:
    def __init__(self, shape: Shape, precision: str, watch: Stopwatch, groups: Groups) -> None:
        config = shape.config(precision)
        self._watch = watch
        model = build.model(config, groups, build.recomputation(config, groups))
        self._engine = build.engine(config, model, groups, watch.device)
        self._engine.train()
        # Any tokens, but those that share a model have the same.
        numbers = torch.arange(shape.batch * (shape.sequence + 1), device=watch.device)
        rows = (numbers % VOCABULARY).reshape(shape.batch, -1)
        self._batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def step(self) -> Taken:
        begin = self._watch.now()
        loss = forward_loss(self._engine, self._batch)
        ahead = self._watch.now()
        self._engine.backward(loss)
        back = self._watch.now()
        self._engine.step()
        return Taken(ahead - begin, back - ahead, self._watch.now() - back)


def steps_in_turn(shapes: Sequence[Shape], precision: str, watch: Stopwatch, groups: Groups = Groups()) -> list[Taken]:
    """What they usually take, on the slowest rank; with `groups`, together."""
    models = [SmallModel(shape, precision, watch, groups) for shape in shapes]
    for _ in range(WARM_UP):
        for model in models:
            model.step()
    if groups.world.is_solo:
        taken, end = list[list[Taken]](), watch.now() + SECONDS
        while len(taken) < FEWEST or watch.now() < end:
            taken.append([model.step() for model in models])
    else:
        once = watch.slowest(watch.once(lambda: [model.step() for model in models]))
        taken = [[model.step() for model in models] for _ in range(max(FEWEST, min(MOST, int(SECONDS / once))))]
    return [Taken(*(watch.slowest(_typical(part, groups)) for part in zip(*steps, strict=True)))
            for steps in zip(*taken, strict=True)]


def seconds_in_training(shape: Shape, precision: str, watch: Stopwatch, groups: Groups) -> float:
    """Of a step in the loop of training, on random tokens."""
    config = shape.config(precision)
    tokenizer = build.tokenizer(config)
    samples = build.datasets(config, tokenizer, groups).train
    assert samples is not None, "random tokens are for training"
    engine = build.engine(config, build.model(config, groups), groups, watch.device)
    rule = build.batch_rule(config, groups, tokenizer)
    with TemporaryDirectory() as place:
        file = Path(place) / "metrics.jsonl"
        with RunLog(replace(config.log, metrics_file=str(file)), STEPS_IN_TRAINING, 0, writes=True) as log:
            Trainer(config, engine, rule, watch.device, log).run(TrainState(), samples, None)
        steps = [json.loads(line)["step_ms"] / 1e3 for line in file.read_text().splitlines()]
    return watch.slowest(_typical(steps[WARM_UP:], groups))


def _typical(samples: Sequence[float], groups: Groups) -> float:
    """Ranks that work together wait for the slowest in every step: it is no other program that makes their median
    longer."""
    return usual(samples) if groups.world.is_solo else median(samples)
