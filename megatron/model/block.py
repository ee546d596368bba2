"""One transformer block, pre-LayerNorm: x + attention(LN(x)), then x + MLP(LN(x)).

`scale`, where there is one, multiplies both branches: what is left out in other steps counts for more in this one
(layer_drop.py).
"""

from __future__ import annotations

import torch
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
        self.ln_1 = init.layer_norm(config.hidden_size, config.layernorm_epsilon)
        self.attn = Attention(config, init.submodule("attn"), tp)
        self.ln_2 = init.layer_norm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config, init.submodule("mlp"), tp)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        x = _add_branch(x, self._apply_dropout(self.attn(self.ln_1(x), mask)), scale)
        return _add_branch(x, self._apply_dropout(self.mlp(self.ln_2(x))), scale)

    def _apply_dropout(self, x: Tensor) -> Tensor:
        # Outside the split regions every tensor parallel rank draws the same mask from the default stream.
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def _add_branch(x: Tensor, branch: Tensor, scale: float | None) -> Tensor:
    """x + scale * branch: one launch. In a compiled graph it is one anyway, and there an `alpha` would be a constant:
    each new scale would be compiled again. (Without a scale its backward has no product.)"""
    if scale is None:
        return x + branch
    return x + branch * scale if torch.compiler.is_compiling() else torch.add(x, branch, alpha=scale)
