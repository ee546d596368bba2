"""Models that the tests profile, and profiles of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.tree import PRESETS, ModelConfig, build_config
from megatron.model import GPT2
from megatron.profiler.flop_recorder import FlopRecording
from megatron.profiler.profile import ModelProfile, ModuleRow, build_profile, walk_rows
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
