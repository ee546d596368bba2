"""A GPT-2 of ours and one of transformers', with weights as large as trained ones, and what to ask of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megatron.config.tree import ModelConfig
from megatron.model.gpt2 import GPT2

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 211, 24
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
"""fp32: sums in another order."""
PROMPTS = torch.tensor([[5, 7, 9, 11], [1, 2, 3, 4], [200, 0, 3, 9]])


def theirs(seed: int = 0, **changes: Any) -> Any:
    """With weights as large as those of a trained model."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(**{**dict(vocab_size=VOCAB, n_positions=LENGTH, n_embd=48, n_layer=3, n_head=4,
                                               initializer_range=0.3, bos_token_id=0, eos_token_id=None), **changes})
    model = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def ours(**changes: Any) -> GPT2:
    return GPT2(ModelConfig(**{**dict(num_layers=3, hidden_size=48, num_attention_heads=4, vocab_size=VOCAB,
                                      max_position_embeddings=LENGTH, init_method_std=0.3), **changes})).eval()


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))


def greedy(model: Any, prompts: torch.Tensor = PROMPTS, **given: Any) -> torch.Tensor:
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=9, pad_token_id=0, **given)
