"""The two-layer MLP of a block: widen (columns split), GELU, narrow (rows split)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.tree import ModelConfig
from megatron.model.init import GPT2Init
from mpu.groups import Group
from mpu.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group) -> None:
        super().__init__()
        h, ffn = config.hidden_size, config.ffn_size
        self.fc = ColumnParallelLinear(h, ffn, gather_output=False, init_method=init.weight("fc.weight"), tp=tp)
        self.proj = RowParallelLinear(ffn,
                                      h,
                                      input_is_parallel=True,
                                      init_method=init.residual_weight("proj.weight"),
                                      tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))  # type: ignore[no-any-return]
