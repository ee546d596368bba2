"""The model of a training engine, readable between two steps: text while a model learns.

    with from_engine(engine) as model:
        decoder = Decoder(model, rows=4)

Unsharded parameters are used in place. At ZeRO stage 3 `from_engine` copies this rank's tensor parallel part;
`EngineDecoder` needs no copy: it runs the engine's forward over the whole sequence for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.config.tree import require
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.inference.decoder import Decoder
from megatron.inference.load import empty_model, set_parameter
from megatron.model.gpt2 import GPT2
from megatron.zero.api.engine import Engine
from megatron.zero.api.init import GatheredParameters
from mpu.collectives import broadcast_into


@contextmanager
def from_engine(engine: Engine) -> Iterator[GPT2]:
    """The engine's model in the working precision, valid inside the block; do not train there. Collective."""
    with _evaluation_model(engine) as model:
        if has_unsharded_params(engine):
            yield model
            return
        made = empty_model(model.config, model.tp)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for bucket in (*engine.core.buckets, *engine.core.frozen_buckets):  # gathered one at a time
            with torch.no_grad(), GatheredParameters(bucket.parameters):
                for parameter in bucket.parameters:
                    set_parameter(made, names[id(parameter)], parameter.detach().to(engine.device, copy=True))
        yield made.eval()


def has_unsharded_params(engine: Engine) -> bool:
    core = engine.core
    return not any(bucket.params_are_sharded for bucket in (*core.buckets, *core.frozen_buckets))


@contextmanager
def _evaluation_model(engine: Engine) -> Iterator[GPT2]:
    """The engine's module in eval mode, with the weights of the last step."""
    core, model, training = engine.core, engine.core.module, engine.training
    require(isinstance(model, GPT2), f"megatron.inference reads GPT2 models, and this engine has a "
            f"{type(model).__name__}: use its forward")
    assert isinstance(model, GPT2)
    engine.finish_step()
    all_succeed_or_raise(core.check_before_save, core.groups.world)
    core.sync_delayed_update("megatron.inference.live")
    engine.train(False)
    try:
        yield model
    finally:
        engine.finish_step()
        engine.train(training)


class EngineDecoder:
    """A decoder without a KV cache: every token runs the engine's forward over the whole text."""

    def __init__(self, engine: Engine, model: GPT2, rows: int) -> None:
        self.model, self.rows, self.max_positions = model, rows, model.config.max_position_embeddings
        self._engine, self._token_ids = engine, [[0] for _ in range(rows)]

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        for row, text in zip(rows, prompts, strict=True):
            self._token_ids[row] = [*text]
        return self._logits(rows)

    def decode_step(self, tokens: Sequence[int]) -> Tensor:
        for row, token in enumerate(tokens):
            self._token_ids[row].append(token)
        return self._logits(range(len(tokens)))

    def move_row(self, source: int, target: int) -> None:
        self._token_ids[target] = self._token_ids[source]

    def clear_row(self, row: int) -> None:
        """There is no cache to clear."""

    @torch.no_grad()
    def _logits(self, rows: Sequence[int]) -> Tensor:
        """-> [b, V]. Broadcast, so that all data parallel ranks run equally many forwards, which are collective."""
        texts = [torch.tensor([self._token_ids[row]], device=self._engine.device) for row in rows]
        logits = torch.cat([self._engine(text) for text in texts]).contiguous()
        broadcast_into(logits, 0, self._engine.groups.dp).wait()
        return logits


@contextmanager
def engine_decoder(engine: Engine, rows: int) -> Iterator[Decoder | EngineDecoder]:
    """A decoder of the engine's model that copies no parameters. Collective."""
    with _evaluation_model(engine) as model:
        yield (Decoder(model, rows, use_cuda_graphs=False) if has_unsharded_params(engine)
               else EngineDecoder(engine, model, rows))
