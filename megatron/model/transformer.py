"""The pre-LayerNorm transformer block (causal self-attention and MLP, both tensor parallel), and initial weights.

x + attention(LN(x)), then x + mlp(LN(x)). Shapes: b batch, s sequence, h hidden, n heads of this rank, d head width.
`mask` is None for causal attention, or [b, 1, s, s] booleans (True: may attend) to keep documents apart. `scale`
multiplies both branches (progressive layer dropping).

Each initial value follows from the seed, the parameter's name and the element's position (`GPT2Init`). So a tensor
parallel run starts from the same values as one process, and a rank draws only its own slice. With `deferred` parameters
stay empty, and the engine draws its shards (zero/deferred_init.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.tree import ModelConfig
from mpu.groups import SOLO, Group
from mpu.layers import ColumnParallelLinear, RowParallelLinear, SequenceParallelLayerNorm
from mpu.random import get_rng_tracker
from mpu.weight_init import (ConstantInitializer, CounterRNGInit, NormalInitializer, allocate_weight, rng_key,
                             set_initializer, strided_segments_of)

# [b, s, 3, n, d] queries, keys and values of the positions at work -> [b, s, n, d]; it also sees earlier positions
CachedAttentionFn = Callable[[Tensor], Tensor]


class GPT2Init:
    """N(0, std) for all weights, with std / sqrt(2 * layers) for projections into the residual stream. Names are
    relative to the path of `submodule`."""

    def __init__(self, std: float, num_layers: int, seed: int, deferred: bool = False, prefix: str = "") -> None:
        self._std, self._layers, self._seed, self._deferred, self._prefix = std, num_layers, seed, deferred, prefix

    def submodule(self, module: str) -> GPT2Init:
        return GPT2Init(self._std, self._layers, self._seed, self._deferred, f"{self._prefix}{module}.")

    def weight(self, name: str) -> CounterRNGInit:
        return CounterRNGInit(rng_key(self._seed, self._prefix + name), self._std, self._deferred)

    def residual_weight(self, name: str) -> CounterRNGInit:
        return replace(self.weight(name), std=self._std / math.sqrt(2.0 * self._layers))

    def layer_norm(self, size: int, eps: float, sequence_group: Group) -> nn.LayerNorm:
        """A LayerNorm with weight 1 and bias 0, of positions that are split over `sequence_group`."""
        layer_norm = (nn.LayerNorm(size, eps=eps) if sequence_group.is_solo
                      else SequenceParallelLayerNorm(size, eps, sequence_group))
        for parameter, value in ((layer_norm.weight, 1.0), (layer_norm.bias, 0.0)):
            set_initializer(parameter, ConstantInitializer(value), deferred=True)  # torch has already filled it
        return layer_norm

    def embedding(self, name: str, rows: int, width: int) -> nn.Embedding:
        """An embedding that is replicated over tensor parallel."""
        draw, values = self.weight(name), allocate_weight((rows, width), self._deferred)
        source = NormalInitializer(draw.key, draw.std, strided_segments_of((rows, width), None, 0, 1))
        # before the module is built, because zero.Init then shards its parameters
        set_initializer(values, source, draw.deferred)
        embedding = nn.Embedding(rows, width, _weight=values)
        set_initializer(embedding.weight, source, deferred=True)
        return embedding


class Attention(nn.Module):
    """One column-parallel projection to q, k and v (stride 3: each is sharded by heads), attention over this rank's
    heads, and one row-parallel projection back."""

    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group, sequence_parallel: bool) -> None:
        super().__init__()
        h = config.hidden_size
        self.heads = config.num_attention_heads // tp.size
        self.head_width = h // config.num_attention_heads
        self.dropout = config.attention_dropout
        self.forks_rng = tp.size > 1 and not sequence_parallel  # GPT2.forward does so for all dropout then
        self.qkv = ColumnParallelLinear(h, 3 * h, gather_output=False, init_method=init.weight("qkv.weight"), stride=3,
                                        sequence_parallel=sequence_parallel, tp=tp)
        self.proj = RowParallelLinear(h, h, input_is_parallel=True, init_method=init.residual_weight("proj.weight"),
                                      sequence_parallel=sequence_parallel, tp=tp)

    def forward(self, x: Tensor, mask: Tensor | None, cached: CachedAttentionFn | None = None) -> Tensor:
        qkv = self.qkv(x)  # all positions, also where x has this rank's
        b, s, _ = qkv.shape
        if cached is not None:
            y = cached(qkv.unflatten(-1, (3, self.heads, self.head_width)))
            return self.proj(y.flatten(2))  # type: ignore[no-any-return]
        # [b, s, 3nd] -> three of [b, n, s, d]; the gradient of `split` is one copy into [b, s, 3nd]
        q, k, v = (part.view(b, s, self.heads, self.head_width).transpose(1, 2)
                   for part in qkv.split(self.heads * self.head_width, dim=-1))
        dropout = self.dropout if self.training else 0.0
        if dropout and self.forks_rng:  # each rank has other heads, so their dropout masks must differ
            with get_rng_tracker().fork():
                y = self._attend(q, k, v, mask, dropout)
        else:
            y = self._attend(q, k, v, mask, dropout)
        # [b, n, s, d] -> [b, s, nd]
        return self.proj(y.transpose(1, 2).reshape(b, s, self.heads * self.head_width))  # type: ignore[no-any-return]

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)


def document_mask(segments: Tensor) -> Tensor:
    """[b, s] document numbers -> [b, 1, s, s]: attend to earlier positions of the same document."""
    s = segments.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=segments.device).tril()
    return (segments[:, None, :, None] == segments[:, None, None, :]) & causal


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group, sequence_parallel: bool) -> None:
        super().__init__()
        h, ffn = config.hidden_size, config.ffn_size
        self.fc = ColumnParallelLinear(h, ffn, gather_output=False, init_method=init.weight("fc.weight"),
                                       sequence_parallel=sequence_parallel, tp=tp)
        self.proj = RowParallelLinear(ffn, h, input_is_parallel=True, init_method=init.residual_weight("proj.weight"),
                                      sequence_parallel=sequence_parallel, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group, sequence_parallel: bool) -> None:
        super().__init__()
        sequence_group = tp if sequence_parallel else SOLO
        self.dropout = config.hidden_dropout
        self.ln_1 = init.layer_norm(config.hidden_size, config.layernorm_epsilon, sequence_group)
        self.attn = Attention(config, init.submodule("attn"), tp, sequence_parallel)
        self.ln_2 = init.layer_norm(config.hidden_size, config.layernorm_epsilon, sequence_group)
        self.mlp = MLP(config, init.submodule("mlp"), tp, sequence_parallel)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float | None = None,
                cached: CachedAttentionFn | None = None) -> Tensor:
        """[b, s, h] -> [b, s, h], or with sequence parallelism [b, s / tp, h] -> [b, s / tp, h]"""
        x = _add_branch(x, self._apply_dropout(self.attn(self.ln_1(x), mask, cached)), scale)
        return _add_branch(x, self._apply_dropout(self.mlp(self.ln_2(x))), scale)

    def _apply_dropout(self, x: Tensor) -> Tensor:
        # Where x is replicated, every tensor parallel rank draws the same mask from the default RNG stream.
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def _add_branch(x: Tensor, branch: Tensor, scale: float | None) -> Tensor:
    """x + scale * branch, in one kernel launch."""
    if scale is None:
        return x + branch  # no product in the backward
    # Compiled, the product is fused anyway, and `alpha` would be a constant: each new scale would recompile the graph.
    return x + branch * scale if torch.compiler.is_compiling() else torch.add(x, branch, alpha=scale)
