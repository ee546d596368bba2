"""A straightforward loop of greedy decoding in plain torch, as gpt-fast does it: a cache of fixed size, one step
compiled as a whole (on a GPU as a CUDA graph). The yardstick of decode.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from plain_gpt2 import PlainBlock, PlainGPT2
from torch import Tensor


class PlainDecoder:
    def __init__(self, model: PlainGPT2, heads: int, rows: int, positions: int) -> None:
        weight = model.wte.weight
        shape = (2, rows, heads, positions, weight.shape[1] // heads)
        self._model, self._heads, self._positions = model, heads, positions
        self._caches = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in model.blocks]
        self._step = torch.compile(self._run, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def text(self, prompts: Sequence[Sequence[int]], new: int) -> Tensor:
        """[b, new]"""
        tokens = torch.tensor(prompts, device=self._model.wte.weight.device)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        token = self._run(tokens, place)
        found = [token]
        place = place[-1:]
        for _ in range(new - 1):
            place = place + 1
            token = self._step(token, place).clone()
            found.append(token)
        return torch.cat(found, dim=1)

    def _run(self, tokens: Tensor, places: Tensor) -> Tensor:
        """[b, s] at [s] -> [b, 1]"""
        model = self._model
        x = model.wte(tokens) + model.wpe(places)
        mask = torch.arange(self._positions, device=tokens.device) <= places[:, None]  # [s, positions]
        for block, cache in zip(model.blocks, self._caches, strict=True):
            x = self._block(block, cache, x, places, mask)
        return model.head(model.ln_f(x[:, -1:])).argmax(-1)

    def _block(self, block: PlainBlock, cache: Tensor, x: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self._heads, -1).transpose(1, 2) for part in block.qkv(block.ln_1(x)).split(h, 2))
        cache[0].index_copy_(2, places, k)
        cache[1].index_copy_(2, places, v)
        y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask)
        x = x + block.out(y.transpose(1, 2).reshape(b, s, h))
        return x + block.proj(F.gelu(block.fc(block.ln_2(x)), approximate="tanh"))
