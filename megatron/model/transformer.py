"""The pre-norm transformer block (causal self-attention and MLP, both tensor parallel), and initial weights.

x + attention(norm(x)), then x + mlp(norm(x)). Shapes: b batch, s sequence, h hidden, n heads of this rank, g of them
with keys and values of their own (grouped-query attention), d head width. `mask` is None for causal attention, or
[b, 1, s, s] booleans (True: may attend) to keep documents apart. `scale` multiplies both branches (progressive layer
dropping). `rotary` is None, or the table of rotary positions.

Each initial value follows from the seed, the parameter's name and the element's position (`GPT2Init`). So a tensor
parallel run starts from the same values as one process, and a rank draws only its own slice. With `deferred` parameters
stay empty, and the engine draws its shards (zero/deferred_init.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.tree import ModelConfig
from mpu.groups import SOLO, Group
from mpu.layers import ColumnParallelLinear, RowParallelLinear
from mpu.random import get_rng_tracker
from mpu.regions import copy_to_region
from mpu.weight_init import (ConstantInitializer, CounterRNGInit, NormalInitializer, allocate_weight, rng_key,
                             set_initializer, strided_segments_of)

# Queries [b, s, n, d], keys and values [b, s, g, d] of the positions at work -> [b, s, n, d]; it also sees earlier
# positions
CachedAttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    def embedding(self, name: str, rows: int, width: int) -> nn.Embedding:
        """An embedding that is replicated over tensor parallel."""
        draw, values = self.weight(name), allocate_weight((rows, width), self._deferred)
        source = NormalInitializer(draw.key, draw.std, strided_segments_of((rows, width), None, 0, 1))
        # before the module is built, because zero.Init then shards its parameters
        set_initializer(values, source, draw.deferred)
        embedding = nn.Embedding(rows, width, _weight=values)
        set_initializer(embedding.weight, source, deferred=True)
        return embedding


class Norm(nn.Module):
    """LayerNorm, or RMSNorm, which has no bias. In training each rank of `sequence_group` has other positions of x."""

    def __init__(self, config: ModelConfig, sequence_group: Group) -> None:
        super().__init__()
        self.eps, self.sequence_group = config.layernorm_epsilon, sequence_group
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.bias = None if config.normalization == "RMSNorm" else nn.Parameter(torch.zeros(config.hidden_size))
        for name, parameter in self.named_parameters():
            value = ConstantInitializer(1.0 if name == "weight" else 0.0)
            set_initializer(parameter, value, deferred=True)  # it has these values already

    def forward(self, x: Tensor) -> Tensor:
        parameters: Sequence[Tensor] = [self.weight] if self.bias is None else [self.weight, self.bias]
        if self.training and not self.sequence_group.is_solo:
            # one all-reduce sums the gradients of both: [1 or 2, h]
            parameters = copy_to_region(torch.stack([*parameters]), self.sequence_group).unbind()
        if self.bias is None:
            return F.rms_norm(x, x.shape[-1:], parameters[0], self.eps)
        return F.layer_norm(x, x.shape[-1:], parameters[0], parameters[1], self.eps)


class Attention(nn.Module):
    """A column-parallel projection to q, k and v (stride 3: each is sharded by heads), attention over this rank's
    heads, and a row-parallel projection back. Grouped-query attention has two projections, to q and to k and v."""

    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group, sequence_parallel: bool) -> None:
        super().__init__()
        h = config.hidden_size
        self.heads, self.kv_heads = config.num_attention_heads // tp.size, config.kv_heads // tp.size
        self.head_width = config.head_size
        self.dropout, self.qk_norm, self.norm_eps = config.attention_dropout, config.qk_norm, config.layernorm_epsilon
        self.forks_rng = tp.size > 1 and not sequence_parallel  # GPT2.forward does so for all dropout then
        column = partial(ColumnParallelLinear, h, gather_output=False, sequence_parallel=sequence_parallel, tp=tp)
        if self.kv_heads == self.heads:
            self.qkv = column(3 * h, init_method=init.weight("qkv.weight"), stride=3)
        else:
            self.q = column(h, init_method=init.weight("q.weight"))
            self.kv = column(2 * config.kv_heads * self.head_width, init_method=init.weight("kv.weight"), stride=2)
        self.proj = RowParallelLinear(h, h, input_is_parallel=True, init_method=init.residual_weight("proj.weight"),
                                      sequence_parallel=sequence_parallel, tp=tp)

    def forward(self, x: Tensor, mask: Tensor | None, rotary: Tensor | None = None,
                cached: CachedAttentionFn | None = None) -> Tensor:
        # [b, s, n or g, d]: all positions, also where x has this rank's
        q, k, v = (part.unflatten(-1, (-1, self.head_width)) for part in self._project(x))
        if self.qk_norm:
            q, k = (F.rms_norm(part, (self.head_width,), eps=self.norm_eps) for part in (q, k))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        y = self._attend(q, k, v, mask) if cached is None else cached(q, k, v)
        return self.proj(y.flatten(2))  # type: ignore[no-any-return]  # [b, s, n, d] -> [b, s, nd]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[b, s, h] -> [b, s, nd] of q, [b, s, gd] of k and of v."""
        width = self.kv_heads * self.head_width
        if self.kv_heads == self.heads:
            return self.qkv(x).split(width, dim=-1)  # type: ignore[no-any-return]  # its gradient is one copy
        return (self.q(x), *self.kv(x).split(width, dim=-1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [b, s, n or g, d] -> [b, n or g, s, d]
        dropout = self.dropout if self.training else 0.0
        # each rank has other heads, so their dropout masks must differ
        with get_rng_tracker().fork() if dropout and self.forks_rng else nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
                                               enable_gqa=self.kv_heads != self.heads)
        return y.transpose(1, 2)


def rotary_table(positions: Tensor, head_width: int, base: float, dtype: torch.dtype) -> Tensor:
    """Positions [..., s] -> cosines and sines [2, ..., s, 1, d / 2] of their angles, for `rotate`."""
    exponents = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32) / head_width
    angles = positions[..., None, None].float() * base ** -exponents
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """[b, s, n, d]: turns each pair (x[i], x[i + d / 2]) by the angle of its position, as Llama and GPT-NeoX do."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def document_mask(segments: Tensor) -> Tensor:
    """[b, s] document numbers -> [b, 1, s, s]: attend to earlier positions of the same document."""
    s = segments.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=segments.device).tril()
    return (segments[:, None, :, None] == segments[:, None, None, :]) & causal


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group, sequence_parallel: bool) -> None:
        super().__init__()
        h, ffn = config.hidden_size, config.ffn_size
        self.activation = config.activation
        gates = 2 if self.activation == "swiglu" else 1  # the gate and what it scales, in one product
        self.fc = ColumnParallelLinear(h, gates * ffn, gather_output=False, init_method=init.weight("fc.weight"),
                                       stride=gates, sequence_parallel=sequence_parallel, tp=tp)
        self.proj = RowParallelLinear(ffn, h, input_is_parallel=True, init_method=init.residual_weight("proj.weight"),
                                      sequence_parallel=sequence_parallel, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self._activate(self.fc(x)))  # type: ignore[no-any-return]

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            return F.silu(gate) * x
        return F.gelu(x, approximate="tanh") if self.activation == "gelu" else F.relu(x).square()


class Block(nn.Module):
    def __init__(self, config: ModelConfig, init: GPT2Init, tp: Group, sequence_parallel: bool) -> None:
        super().__init__()
        sequence_group = tp if sequence_parallel else SOLO
        self.dropout = config.hidden_dropout
        self.ln_1 = Norm(config, sequence_group)
        self.attn = Attention(config, init.submodule("attn"), tp, sequence_parallel)
        self.ln_2 = Norm(config, sequence_group)
        self.mlp = MLP(config, init.submodule("mlp"), tp, sequence_parallel)

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: Tensor | None = None, scale: float | None = None,
                cached: CachedAttentionFn | None = None) -> Tensor:
        """[b, s, h] -> [b, s, h], or with sequence parallelism [b, s / tp, h] -> [b, s / tp, h]"""
        x = _add_branch(x, self._apply_dropout(self.attn(self.ln_1(x), mask, rotary, cached)), scale)
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
