"""The model over a cache: a text is read once, and then followed by one token at a time.

    decoder = Decoder(model, rows=8)
    logits = decoder.read(0, prompt)               # of what follows the prompt: the whole vocabulary, on every rank
    logits = decoder.follow([token, other])        # the next token of row 0 and of row 1

Reading is the forward of training, so a prompt's logits are those of the model; following attends from one position to
all that its row holds. Shapes: b rows, s positions, n heads of this rank, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.inference.cache import Cache
from megatron.model.block import Block
from megatron.model.gpt2 import GPT2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v of the positions at work, [b, n, s, d] -> [b, n, s, d]."""


@final
class Decoder:
    def __init__(self, model: GPT2, rows: int) -> None:
        self.model, self.rows, self.length = model.eval(), rows, model.config.max_position_embeddings
        self._blocks = [cast(Block, block) for block in model.blocks]
        weight, attention = model.wpe.weight, self._blocks[0].attn
        self._device = weight.device
        self._cache = Cache(len(self._blocks), rows, attention.heads, self.length, attention.head_width,
                            dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def read(self, row: int, tokens: Sequence[int]) -> Tensor:
        """A text from its beginning, in place of what the row held -> [V] logits of what follows."""
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._cache.fill(layer, row, k[0], v[0])
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        assert 0 < len(tokens) <= self.length
        self._cache.lengths[row] = len(tokens)
        places = torch.arange(len(tokens), device=self._device)
        return self._run(torch.tensor([tokens], device=self._device), places, attend)[0]

    @torch.no_grad()
    def follow(self, tokens: Sequence[int]) -> Tensor:
        """One token more of each of the first rows -> [b, V]."""
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._cache.append(layer, places, k[:, :, 0], v[:, :, 0])
            keys, values = self._cache.first(layer, rows, longest)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

        rows, lengths = len(tokens), self._cache.lengths
        before, longest = lengths[:rows], max(lengths[:rows]) + 1
        assert longest <= self.length, "a text at the end of the position table cannot be followed"
        places = torch.tensor(before, device=self._device)
        mask = None  # [b, 1, 1, position]: True where a row has something
        if min(before) + 1 < longest:
            mask = (torch.arange(longest, device=self._device) <= places[:, None])[:, None, None, :]
        lengths[:rows] = [length + 1 for length in before]
        return self._run(torch.tensor(tokens, device=self._device)[:, None], places[:, None], attend)

    def move(self, source: int, target: int) -> None:
        """The text of one row is the text of another from now on."""
        self._cache.move(source, target)

    def _run(self, tokens: Tensor, places: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """[b, s] tokens -> [b, V], of the last position."""
        model = self.model
        x = model.wte(tokens) + model.wpe(places)
        for layer, block in enumerate(self._blocks):
            attention = block.attn
            parts = attention.qkv(block.ln_1(x)).split(attention.heads * attention.head_width, dim=-1)
            q, k, v = (part.unflatten(-1, (attention.heads, attention.head_width)).transpose(1, 2) for part in parts)
            x = x + attention.proj(attend(layer, q, k, v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.ln_2(x))
        return model.logits(model.ln_f(x[:, -1]))
