"""One transformer block, pre-LayerNorm: x + attention(LN(x)), then x + MLP(LN(x))."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.tree import ModelConfig
from megatron.model.attention import Attention
from megatron.model.init import GPT2Init
from megatron.model.mlp import MLP
from mpu.groups import Group


class Block(nn.Module):
    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.ln_1 = init.norm(config.hidden_size, config.layernorm_epsilon)
        self.attn = Attention(config, init.at("attn"), tp)
        self.ln_2 = init.norm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config, init.at("mlp"), tp)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # [b, s, h] -> [b, s, h]
        x = x + self._drop(self.attn(self.ln_1(x), mask))
        return x + self._drop(self.mlp(self.ln_2(x)))

    def _drop(self, x: Tensor) -> Tensor:
        # Outside the split regions every tensor parallel rank draws the same mask from the default stream.
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
