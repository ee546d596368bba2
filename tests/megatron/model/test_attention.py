"""How attention cuts its projection: the bits of the obvious way, with one copy less in backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.tree import build_config
from megatron.model.transformer import Attention
from megatron.model.weight_init import GPT2Init
from mpu.groups import SOLO

B, S, HEADS, WIDTH = 2, 16, 4, 8


class Copies(TorchDispatchMode):
    """Operators that do nothing but copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::cat", "aten::stack", "aten::clone", "aten::copy_", "aten::_to_copy"):
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class ByUnbind(Attention):
    """The obvious way."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4).unbind(0)
        y = self._attend(q, k, v, mask, 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, s, self.heads * self.head_width))


def _passed(kind: type[Attention], dtype: torch.dtype) -> tuple[list[Tensor], Counter[str]]:
    config = build_config({"num_layers": 1, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS,
                           "max_position_embeddings": S, "vocab_size": 50, "attention_dropout": 0.0}).model
    attention = kind(config, GPT2Init(0.5, 1, 1), SOLO).to(dtype)
    x = torch.randn(B, S, HEADS * WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    y = attention(x, None)
    with Copies() as copies:
        y.backward(torch.ones_like(y))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in attention.parameters() if p.grad is not None)], copies.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_projection_is_cut_without_changing_a_bit_and_with_fewer_copies(dtype: torch.dtype) -> None:
    (ours, copies), (obvious, more) = _passed(Attention, dtype), _passed(ByUnbind, dtype)
    assert all(map(torch.equal, ours, obvious))
    assert copies.total() < more.total() and copies["aten::cat"] == 1 and not copies["aten::stack"]
