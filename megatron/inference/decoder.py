"""GPT-2 decoding with a KV cache: prefill a prompt once, then decode one token per step.

    decoder = Decoder(model, rows=8)
    logits = decoder.prefill([0, 1], [prompt, second])   # [2, V]: logits of the token after each prompt
    logits = decoder.decode_step([token, other])         # [2, V]: the next token of row 0 and of row 1

A row is one slot of the batch. Prompts are packed one behind the other, without padding. On a GPU the decode step
is captured as CUDA graphs: one for each power of two of rows and of KV positions, captured when first needed; the
rows and positions beyond the batch are masked. Shapes: b rows, s positions, n heads of this rank, g of them with keys
and values, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.gpt2 import GPT2
from megatron.model.transformer import Block
from mpu.device import on_accelerator

# [b] tokens, [b] their positions, number of positions to attend to -> [b, V]
DecodeFnOfSize = Callable[[Tensor, Tensor, int], Tensor]
# A layer's number, then as CachedAttentionFn of megatron/model/transformer.py
AttentionFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]

MIN_GRAPH_POSITIONS = 128


class CudaGraphRunner:
    """CUDA graphs that share a memory pool: one runs at a time, and its result is used before the next one runs."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self._rows, self._length, self._device = rows, length, device
        self._pool: Any = None
        # (rows, positions) -> the inputs that the graph reads, [2, b] tokens and their positions; its replay
        self._graphs: dict[tuple[int, int], tuple[Tensor, Callable[[], Tensor]]] = {}

    def __call__(self, step: DecodeFnOfSize, tokens: Sequence[int], position_ids: Sequence[int]) -> Tensor:
        """The result of `step`, valid until the next call."""
        rows = min(self._rows, next_power_of_two(len(tokens)))
        positions = min(self._length, max(MIN_GRAPH_POSITIONS, next_power_of_two(max(position_ids) + 1)))
        inputs = torch.zeros(2, rows, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        inputs[:, : len(tokens)] = torch.tensor([tokens, position_ids])
        if (rows, positions) not in self._graphs:  # capture may run the step; twice with equal inputs changes nothing
            example = inputs.to(self._device, copy=True)
            self._graphs[rows, positions] = example, self._capture(lambda: step(example[0], example[1], positions))
        graph_inputs, replay = self._graphs[rows, positions]
        graph_inputs.copy_(inputs, non_blocking=True)
        return replay()[: len(tokens)]

    def _capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up: libraries initialize outside a capture
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            made = run()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return made
        return replay


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Decoder:
    """The rows in use are the first ones, so that a step works on slices."""

    def __init__(self, model: GPT2, rows: int, positions: int | None = None, *, use_cuda_graphs: bool = True) -> None:
        """Room for `rows` texts of `positions` tokens (default: the model's). CUDA graphs pay for long texts."""
        self.model, self.rows = model.eval(), rows
        self.max_positions = min(model.config.max_position_embeddings,
                                 positions or model.config.max_position_embeddings)
        self._blocks = [cast(Block, block) for block in model.blocks]
        attention, self._device = self._blocks[0].attn, model.device
        # keys (already rotated) and values, [2, layer, row, position, g, d]; on a CPU, positions that are never written
        # take no memory
        shape = (2, len(self._blocks), rows, self.max_positions, attention.kv_heads, attention.head_width)
        self._kv = torch.zeros(shape, dtype=model.dtype, device=self._device)
        self._keys, self._values = self._kv
        self._is_grouped = attention.kv_heads != attention.heads
        self._row_ids = torch.arange(rows, device=self._device)
        self._lengths = [0] * rows
        self._cuda_graphs = None  # tensor parallel collectives are not captured
        if use_cuda_graphs and on_accelerator(self._device) and model.tp.is_solo:
            self._cuda_graphs = CudaGraphRunner(rows, self.max_positions, self._device)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Replaces the texts of `rows` by `prompts` -> [b, V] logits of the tokens after them."""
        def attend(layer: int, *qkv: Tensor) -> Tensor:
            outputs = []
            for (row, count, length), *parts in zip(groups, *(part[0].split(sizes) for part in qkv)):
                q, k, v = (part.unflatten(0, (count, length)) for part in parts)  # each [row, position, head, width]
                self._keys[layer, row : row + count, :length] = k
                self._values[layer, row : row + count, :length] = v
                q, k, v = (part.transpose(1, 2) for part in (q, k, v))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._is_grouped)
                outputs.append(y.transpose(1, 2).flatten(0, 1))
            return torch.cat(outputs)[None]

        lengths = [len(text) for text in prompts]
        assert 0 < min(lengths) and max(lengths) <= self.max_positions
        # [first row, rows, length] of prompts of equal length in consecutive rows: one attention call for each group
        groups: list[list[int]] = []
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = length
            if groups and groups[-1][2] == length and row == sum(groups[-1][:2]):
                groups[-1][1] += 1
            else:
                groups.append([row, 1, length])
        sizes = [count * length for _, count, length in groups]
        tokens = torch.tensor([list(chain(*prompts))], device=self._device)
        position_ids = torch.tensor(list(chain(*map(range, lengths))), device=self._device)
        ends = torch.tensor(list(accumulate(lengths)), device=self._device) - 1
        return self._forward(tokens, position_ids, attend, ends)[0]

    @torch.inference_mode()
    def decode_step(self, tokens: Sequence[int]) -> Tensor:
        """Appends one token to each of the first rows -> [b, V] logits. The rows behind them are free."""
        before = self._lengths[: len(tokens)]
        assert max(before) < self.max_positions, "a text at the end of the position table cannot be followed"
        self._lengths[: len(tokens)] = [length + 1 for length in before]
        if self._cuda_graphs is not None:
            return self._cuda_graphs(self._decode_forward, tokens, before)
        inputs = torch.tensor([tokens, before], device=self._device)
        return self._decode_forward(inputs[0], inputs[1], max(before) + 1, masked=min(before) < max(before))

    def move_row(self, source: int, target: int) -> None:
        length = self._lengths[target] = self._lengths[source]
        self._kv[:, :, target, :length] = self._kv[:, :, source, :length]

    def clear_row(self, row: int) -> None:
        """Zero the row's cache: its non-finite values would come through the mask of a later text."""
        self._kv[:, :, row] = 0

    def _decode_forward(self, tokens: Tensor, position_ids: Tensor, kv_length: int, masked: bool = True) -> Tensor:
        """[b] tokens at [b] positions -> [b, V]. Unless `masked`, all rows have `kv_length` positions."""
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = len(tokens)
            for cache, new in ((self._keys, k), (self._values, v)):
                cache[layer][self._row_ids[:rows], position_ids] = new[:, 0]
            q, keys, values = (part.transpose(1, 2) for part in (  # -> [row, head, position, width]
                q, self._keys[layer, :rows, :kv_length], self._values[layer, :rows, :kv_length]))
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=self._is_grouped)
            return y.transpose(1, 2)

        mask = None  # [b, 1, 1, position], added: 0 where a row has something
        if masked:
            behind = torch.arange(kv_length, device=self._device) > position_ids[:, None]
            mask = torch.zeros_like(behind, dtype=self._kv.dtype).masked_fill_(behind, -torch.inf)[:, None, None, :]
        return self._forward(tokens[:, None], position_ids[:, None], attend)[:, 0]

    def _forward(self, tokens: Tensor, position_ids: Tensor, attend: AttentionFn,
                 selected: Tensor | None = None) -> Tensor:
        """[b, s] tokens -> [b, s, V], or of the `selected` positions alone."""
        # `forward` and not the call: no hook of an engine runs, and nothing is recomputed or left out
        blocks = [partial(block.forward, cached=partial(attend, layer)) for layer, block in enumerate(self._blocks)]
        x = self.model.hidden_states(tokens, position_ids, blocks=blocks)  # [b, s, h]
        return self.model.logits(x if selected is None else x[:, selected])
