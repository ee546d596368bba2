"""Models that the tests profile, profiles of them, and the multiply-accumulates of a GPT-2 step by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.tree import PRESETS, ModelConfig, build_config
from megatron.model import GPT2
from megatron.profiler.flop_recorder import FlopRecording
from megatron.profiler.profile import Macs, ModelProfile, ModuleRow, build_profile, walk_rows
from tests.megatron.helpers import tiny_model


def preset(name: str, vocab_size: int = 50257) -> ModelConfig:
    values = {**PRESETS[name], "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return replace(build_config(values).model, vocab_size=vocab_size)


def on_meta(config: ModelConfig) -> GPT2:
    with torch.device("meta"):
        return GPT2(config, deferred=True).to("meta")


def gpt2(**changes: Any) -> GPT2:
    return GPT2(tiny_model(**changes))


def tokens(model: GPT2, batch: int = 2) -> Tensor:
    device = model.wte.weight.device
    return torch.zeros(batch, model.config.max_position_embeddings, dtype=torch.long, device=device)


def recorded(model: nn.Module, *args: Any, times: int = 1) -> ModelProfile:
    """Of `times` forwards and backwards."""
    recording = FlopRecording(model)
    for _ in range(times):
        with recording.record():
            model(*args).sum().backward()
    return build_profile(recording)


def table(profile: ModelProfile) -> list[tuple[Any, ...]]:
    """What of a profile is no time: of each module its path, class, parameters and counts."""
    return [(row.path, row.class_name, row.parameters, row.macs, row.calls) for _, row in walk_rows(profile.root)]


def row(profile: ModelProfile, path: str) -> ModuleRow:
    return next(found for _, found in walk_rows(profile.root) if found.path == path)


# ---- by hand ------------------------------------------------------------------------------------------------------


def step_macs(model: ModelConfig, batch: int, length: int, *, causal: bool, chunk: int | None = None,
              padded: int | None = None) -> Macs:
    """Forward and backward of `batch` sequences. `causal`: attention runs in a kernel that leaves out half of the
    scores, and whose backward makes them again; otherwise it is written out in products. `chunk`: so many blocks are
    recomputed at a time. `padded`: rows of the token table."""
    h, ffn, layers, multiple = model.hidden_size, model.ffn_size, model.num_layers, model.make_vocab_size_divisible_by
    tokens, rows = batch * length, padded or math.ceil(model.known_vocab_size / multiple) * multiple
    last = tokens * ffn * h
    matrices = tokens * (3 * h * h + h * h + h * ffn) + last
    product = batch * h * (length * (length + 1) // 2 if causal else length * length)  # of q k^T, over all heads
    block = matrices + 2 * product
    # The loss makes logits, and the gradients of x and of the table, on the way forward; then a mean over the tokens.
    forward = layers * block + 3 * tokens * h * rows + tokens
    backward = layers * (2 * matrices + (5 if causal else 4) * product)
    # What backward wants of a chunk is there before its last product, which is then not run again; but for a dropout
    # behind it.
    left_out = 0 if chunk is None or model.hidden_dropout else math.ceil(layers / chunk) * last
    again = 0 if chunk is None else layers * block - left_out
    return Macs(forward, backward, again)
