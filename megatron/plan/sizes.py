"""At which sizes the probe measures, by the kind of device; and the small models among them.

A GPU does what a CPU needs milliseconds for in less time than it takes to be told: its sizes are those of models that
it is bought for. Between sizes rates.py interpolates, and goes on in proportion beyond the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.config.tree import Config, build_config
from megatron.plan.activations import Device
from megatron.plan.footprint import PlannedRun
from megatron.plan.time import HEAD_WIDTH

VOCABULARY = 512
STEPS_IN_TRAINING = 100
MORE_LAYERS = 2
"""Of the larger model of a shape."""


class ProbeModelShape(NamedTuple):
    hidden: int
    batch: int
    sequence: int
    layers: int = 1
    stage: int = 0
    recomputes: bool = False
    is_whole: bool = False
    """Stage 3 splits no parameter."""
    tp: int = 1

    @property
    def larger(self) -> ProbeModelShape:
        return self._replace(layers=self.layers + MORE_LAYERS)

    @property
    def together(self) -> list[ProbeModelShape]:
        """As ranks meet: at every stage, and at stage 3 with whole parameters (Rates.meetings)."""
        return [*(self._replace(stage=stage) for stage in range(4)), self._replace(stage=3, is_whole=True)]

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
            "stage3_param_persistence_threshold": 1 << 60 if self.is_whole else 0,
            "checkpoint_activations": self.recomputes,
            "clip_grad": 1.0, "mock_data": True, "eval_interval": 0,
            "train_iters": STEPS_IN_TRAINING, "log_interval": 2 * STEPS_IN_TRAINING,
            "tokenizer_type": "ByteLevelTokenizer", "compile": False,  # of many shapes it would take minutes
            **({} if precision == "fp32" else {precision: True})})

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def run(self, precision: str, device: Device, ranks: int = 1) -> PlannedRun:
        return PlannedRun(self.config(precision), ranks, device)


@dataclass(frozen=True)
class ProbeSizes:
    rows: tuple[int, ...]
    """Of products."""
    widths: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    """Of sequences, and heads times samples."""
    elements: tuple[int, ...]
    """Of dropout."""
    logits: tuple[tuple[int, int], ...]
    """Rows, and columns."""
    loss_width: int
    bytes: tuple[int, ...]
    """Of exchanges."""
    beside: int
    """Width of the square products beside an exchange."""
    shapes: tuple[ProbeModelShape, ...]
    """Of models, from the smallest to the largest."""
    largest: ProbeModelShape
    """For the time of an update alone."""

    def cut(self, ranks: int) -> ProbeModelShape | None:
        """The smallest model of tensor parallel ranks: of all of them, or of as many as can share one."""
        return next((shape.larger._replace(tp=tp) for tp in range(ranks, 1, -1) if ranks % tp == 0
                     for shape in self.shapes if shape.heads % tp == 0), None)


SIZES: dict[Device, ProbeSizes] = {
    "cpu": ProbeSizes(rows=(64, 256, 1024, 2048),
                      widths=(64, 256, 1024),
                      lengths=((32, 64), (128, 32), (512, 8), (1024, 4)),
                      elements=(2**12, 2**16, 2**20, 2**22),
                      logits=((64, 512), (256, 4096), (512, 32768)),
                      loss_width=64,
                      bytes=(2**12, 2**16, 2**20, 2**23, 2**25),
                      beside=512,
                      shapes=(ProbeModelShape(64, 8, 32), ProbeModelShape(128, 4, 128), ProbeModelShape(256, 4, 256),
                              ProbeModelShape(384, 4, 512)),
                      largest=ProbeModelShape(768, 1, 32, layers=3)),
    "cuda": ProbeSizes(rows=(256, 1024, 4096, 16384),
                       widths=(256, 1024, 4096, 8192),
                       lengths=((128, 2048), (512, 1024), (1024, 512), (4096, 128)),
                       elements=(2**16, 2**20, 2**24, 2**27),
                       logits=((1024, 8192), (4096, 32768), (8192, 65536)),
                       loss_width=1024,
                       bytes=(2**12, 2**16, 2**20, 2**24, 2**27, 2**30),
                       beside=4096,
                       shapes=(ProbeModelShape(256, 4, 256), ProbeModelShape(1024, 4,
                                                                             1024), ProbeModelShape(2048, 8, 1024)),
                       largest=ProbeModelShape(4096, 1, 128, layers=2))
}
