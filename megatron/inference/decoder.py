"""The model over a cache: a text is read once, and then followed by one token at a time.

    decoder = Decoder(model, rows=8)
    logits = decoder.read([0, 1], [prompt, second])  # of what follows each: the whole vocabulary, on every rank
    logits = decoder.follow([token, other])          # the next token of row 0 and of row 1

Reading is the forward of training, of several prompts one behind the other, so that nothing is padded; following
attends from one position to all that its row holds. Shapes: b rows, s positions, n heads of this rank, d width of a
head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.inference.cache import Cache
from megatron.inference.recorded import Recorded
from megatron.model.block import Block
from megatron.model.gpt2 import GPT2
from mpu.device import on_accelerator

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""layer, queries [b, s, n, d], keys and values [b, s, 2, n, d] of the positions at work -> [b, n, s, d]"""


@final
class Decoder:
    def __init__(self, model: GPT2, rows: int, records: bool = True) -> None:
        """`records`: steps on an accelerator, which pays for long texts."""
        self.model, self.rows, self.length = model.eval(), rows, model.config.max_position_embeddings
        self._blocks = [cast(Block, block) for block in model.blocks]
        weight, attention = model.wpe.weight, self._blocks[0].attn
        self._device = weight.device
        self._cache = Cache(len(self._blocks), rows, self.length, attention.heads, attention.head_width,
                            dtype=weight.dtype, device=weight.device)
        self._recorded = None  # what ranks tell each other is not recorded
        if records and on_accelerator(weight) and model.tp.is_solo:
            self._recorded = Recorded(self._step, rows, self.length, weight.device)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Texts from their beginnings, in place of what the rows held -> [b, V] logits of what follows."""
        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            found = []
            for row, one, both in zip(rows, q.split(lengths, dim=1), kv.split(lengths, dim=1), strict=True):
                self._cache.fill(layer, row, both[0])
                k, v = both.transpose(1, 3).unbind(2)
                found.append(F.scaled_dot_product_attention(one.transpose(1, 2), k, v, is_causal=True))
            return torch.cat(found, dim=2) if len(found) > 1 else found[0]

        lengths = [len(text) for text in texts]
        assert 0 < min(lengths) and max(lengths) <= self.length
        for row, length in zip(rows, lengths, strict=True):
            self._cache.lengths[row] = length
        tokens = torch.tensor([list(chain(*texts))], device=self._device)
        places = torch.tensor(list(chain(*map(range, lengths))), device=self._device)
        ends = torch.tensor(list(accumulate(lengths)), device=self._device) - 1
        return self._run(tokens, places, attend, ends)[0]

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int]) -> Tensor:
        """One token more of each of the first rows -> [b, V]."""
        before = self._cache.lengths[: len(tokens)]
        assert max(before) < self.length, "a text at the end of the position table cannot be followed"
        self._cache.lengths[: len(tokens)] = [length + 1 for length in before]
        if self._recorded is not None:
            return self._recorded(tokens, before)
        inputs = torch.tensor([tokens, before], device=self._device)
        return self._step(inputs[0], inputs[1], max(before) + 1, masked=min(before) < max(before))

    def move(self, source: int, target: int) -> None:
        """The text of one row is the text of another from now on."""
        self._cache.move(source, target)

    def _step(self, tokens: Tensor, places: Tensor, positions: int, masked: bool = True) -> Tensor:
        """[b] tokens at [b] places -> [b, V]. Unless `masked`, every row has as many positions."""
        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            self._cache.append(layer, places, kv[:, 0])
            keys, values = self._cache.first(layer, len(tokens), positions)
            return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)

        mask = None  # [b, 1, 1, position]: True where a row has something
        if masked:
            mask = (torch.arange(positions, device=self._device) <= places[:, None])[:, None, None, :]
        return self._run(tokens[:, None], places[:, None], attend)[:, 0]

    def _run(self, tokens: Tensor, places: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """[b, s] tokens -> [b, s, V], or of the `wanted` positions alone."""
        model = self.model
        x = model.wte(tokens) + model.wpe(places)
        for layer, block in enumerate(self._blocks):
            attention = block.attn
            parts = attention.qkv(block.ln_1(x)).unflatten(-1, (3, attention.heads, attention.head_width))
            found = attend(layer, parts[:, :, 0], parts[:, :, 1:])
            x = x + attention.proj(found.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.ln_2(x))
        return model.logits(model.ln_f(x if wanted is None else x[:, wanted]))
