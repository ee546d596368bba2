"""Models and data that the tests of this room share."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from data.tokenizer import ByteLevelTokenizer
from megatron.config.tree import ModelConfig
from megatron.evaluate.cli import EvalRequest
from megatron.evaluate.scoring import Scorer
from megatron.evaluate.tasks import EvalModelInfo, prepare_task
from megatron.model.gpt2 import GPT2
from mpu.groups import SOLO, Groups

LENGTH = 24
SHAPE = ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=4, max_position_embeddings=LENGTH,
                    vocab_size=257, init_method_std=0.3, attention_dropout=0.2, hidden_dropout=0.2)
BYTES = ByteLevelTokenizer()
SUBJECT = EvalModelInfo(BYTES, LENGTH, {"split": "2,1,1"})

WIKITEXT = """
 = A title = \n \n Some words , 's and " quotes " ( in brackets ) , 3 @.@ 5 @-@ fold ; N times . \n
 = = A section = = \n \n The end of the 1990s ' first [ part ] : over ! \n \n = Another = \n \n 30 ° C ? \n"""
"""Two articles, and next to every rule of the detokeniser."""


def outcome(model: GPT2, groups: Groups = Groups(), *, batch_size: int = 3, subject: EvalModelInfo = SUBJECT,
            **asked: Any) -> Any:
    """The metrics of a task, without a command line, and what they come from."""
    task = prepare_task(EvalRequest(**{name: str(value) if isinstance(value, Path) else value
                                       for name, value in asked.items()}), subject)
    scores = Scorer(model, groups, batch_size)(task.requests)
    found = task.metrics(scores)
    accuracies = {name: found.pop(name) for name in ("acc", "correct") if name in found}
    return SimpleNamespace(**found, logprob=math.fsum(score.logprob for score in scores), words=task.words,
                           bytes=task.bytes, accuracies=accuracies)


def write_lines(path: Path, values: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@torch.no_grad()
def logprob(model: GPT2, ids: Sequence[int], token: int) -> float:
    """Of one token after all of `ids`, by the whole model: the slow way."""
    return float(model.eval()(torch.tensor([list(ids)]))[0].double().log_softmax(-1)[token])


class Chain(nn.Module):
    """After each byte of `cycle` its next one is all but certain; after any other byte, any."""

    def __init__(self, cycle: bytes) -> None:
        super().__init__()
        self.config, self.tp = SHAPE, SOLO
        self.device = torch.device("cpu")
        self.table = torch.zeros(257, 257)
        for byte, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            self.table[byte, following] = 20.0

    def hidden_states(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def local_logits(self, x: Tensor) -> Tensor:
        return x


def chain(cycle: bytes) -> GPT2:
    return cast(GPT2, Chain(cycle))
