"""GPT-2 decoding with a KV cache: prefill a prompt once, then decode one token per step.

    decoder = Decoder(model, rows=8)
    logits = decoder.prefill([0, 1], [prompt, second])   # [2, V]: logits of the token after each prompt
    logits = decoder.decode_step([token, other])         # [2, V]: the next token of row 0 and of row 1

A row is one slot of the batch. Prompts are packed one behind the other, without padding. On a GPU the decode step
is captured as CUDA graphs: one for each power of two of rows and of KV positions, captured when first needed; the
rows and positions beyond the batch are masked. Shapes: b rows, s positions, n heads of this rank, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.gpt2 import GPT2
from megatron.model.transformer import Block
from mpu.device import on_accelerator

ReplayFn = Callable[[], Tensor]
DecodeFnOfSize = Callable[[Tensor, Tensor, int], Tensor]
"""[b] tokens, [b] their positions, number of positions to attend to -> [b, V]"""

CaptureFn = Callable[[ReplayFn], ReplayFn]
"""A function that runs on the same tensors each time -> its replay."""

MIN_GRAPH_POSITIONS = 128


@final
class CudaGraphRunner:
    def __init__(self, rows: int, length: int, device: torch.device, capture: CaptureFn | None = None) -> None:
        self._rows, self._length, self._device = rows, length, device
        self._capture = capture or (CudaGraphCapture() if device.type == "cuda" else None)
        self._graphs: dict[tuple[int, int], tuple[Tensor, ReplayFn]] = {}
        """(rows, positions) -> the inputs that the graph reads, [2, b] tokens and their positions; its replay"""

    def __call__(self, step: DecodeFnOfSize, tokens: Sequence[int], position_ids: Sequence[int]) -> Tensor:
        """The result of `step`, valid until the next call."""
        rows = min(self._rows, next_power_of_two(len(tokens)))
        positions = min(self._length, max(MIN_GRAPH_POSITIONS, next_power_of_two(max(position_ids) + 1)))
        inputs = torch.zeros(2, rows, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        inputs[:, : len(tokens)] = torch.tensor([tokens, position_ids])
        if self._capture is None:
            return step(inputs[0], inputs[1], positions)[: len(tokens)]
        if (rows, positions) not in self._graphs:  # capture may run the step; twice with equal inputs changes nothing
            example = inputs.to(self._device, copy=True)
            self._graphs[rows, positions] = example, self._capture(lambda: step(example[0], example[1], positions))
        graph_inputs, replay = self._graphs[rows, positions]
        graph_inputs.copy_(inputs, non_blocking=True)
        return replay()[: len(tokens)]


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@final
class CudaGraphCapture:
    """CUDA graphs that share a memory pool: one runs at a time, and its result is used before the next one runs."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: ReplayFn) -> ReplayFn:
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


@final
class KVCache:
    """Keys and values, [layer, row, position, 2, head, width]. The rows in use are the first ones, so that a step works
    on slices; the last row moves to the place of one that ends."""

    def __init__(self, layers: int, rows: int, length: int, heads: int, width: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        """`heads`: of this rank. On a CPU, positions that are never written take no memory."""
        self._buffer = torch.zeros((layers, rows, length, 2, heads, width), dtype=dtype, device=device)
        self._row_ids = torch.arange(rows, device=device)
        self.lengths = [0] * rows

    def write_prompts(self, layer: int, first_row: int, kv: Tensor) -> None:
        """kv: [row, position, 2, head, width], of the first positions."""
        self._buffer[layer, first_row : first_row + len(kv), : kv.shape[1]] = kv

    def append_tokens(self, layer: int, position_ids: Tensor, kv: Tensor) -> None:
        """kv: [row, 2, head, width], one position of each of the first rows."""
        self._buffer[layer][self._row_ids[: len(position_ids)], position_ids] = kv

    def view(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows and positions: each [row, head, position, width]."""
        keys, values = self._buffer[layer, :rows, :length].transpose(1, 3).unbind(2)
        return keys, values

    def move_row(self, source: int, target: int) -> None:
        length = self.lengths[source]
        self._buffer[:, target, :length] = self._buffer[:, source, :length]
        self.lengths[target] = length

    def clear_row(self, row: int) -> None:
        """Non-finite values would come through the mask of a later text."""
        self._buffer[:, row] = 0


AttentionFn = Callable[[int, Tensor], Tensor]
"""layer, [b, s, 3, n, d] queries, keys and values of the positions at work -> [b, s, n, d]"""


@final
class Decoder:
    def __init__(self, model: GPT2, rows: int, positions: int | None = None, *, use_cuda_graphs: bool = True) -> None:
        """Room for `rows` texts of `positions` tokens (default: the model's). CUDA graphs pay for long texts."""
        self.model, self.rows = model.eval(), rows
        self.max_positions = min(model.config.max_position_embeddings,
                                 positions or model.config.max_position_embeddings)
        self._blocks = [cast(Block, block) for block in model.blocks]
        self._device, self._dtype = model.device, model.dtype
        attention = self._blocks[0].attn
        self._cache = KVCache(len(self._blocks), rows, self.max_positions, attention.heads, attention.head_width,
                              dtype=self._dtype, device=self._device)
        self._cuda_graphs = None  # tensor parallel collectives are not captured
        if use_cuda_graphs and on_accelerator(self._device) and model.tp.is_solo:
            self._cuda_graphs = CudaGraphRunner(rows, self.max_positions, self._device)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Replaces the texts of `rows` by `prompts` -> [b, V] logits of the tokens after them."""
        def attend(layer: int, qkv: Tensor) -> Tensor:
            outputs = []
            for group in groups:
                group_q, group_kv = group.select(qkv[:, :, 0]), group.select(qkv[:, :, 1:])
                self._cache.write_prompts(layer, group.row, group_kv)
                k, v = group_kv.transpose(1, 3).unbind(2)
                y = F.scaled_dot_product_attention(group_q.transpose(1, 2), k, v, is_causal=True)
                outputs.append(y.transpose(1, 2).flatten(0, 1))
            return torch.cat(outputs)[None]

        lengths = [len(text) for text in prompts]
        assert 0 < min(lengths) and max(lengths) <= self.max_positions
        for row, length in zip(rows, lengths, strict=True):
            self._cache.lengths[row] = length
        groups = list(_group_prompts(rows, lengths))
        tokens = torch.tensor([list(chain(*prompts))], device=self._device)
        position_ids = torch.tensor(list(chain(*map(range, lengths))), device=self._device)
        ends = torch.tensor(list(accumulate(lengths)), device=self._device) - 1
        return self._forward(tokens, position_ids, attend, ends)[0]

    @torch.inference_mode()
    def decode_step(self, tokens: Sequence[int]) -> Tensor:
        """Appends one token to each of the first rows -> [b, V] logits. The rows behind them are free."""
        before = self._cache.lengths[: len(tokens)]
        assert max(before) < self.max_positions, "a text at the end of the position table cannot be followed"
        self._cache.lengths[: len(tokens)] = [length + 1 for length in before]
        if self._cuda_graphs is not None:
            return self._cuda_graphs(self._decode_forward, tokens, before)
        inputs = torch.tensor([tokens, before], device=self._device)
        return self._decode_forward(inputs[0], inputs[1], max(before) + 1, masked=min(before) < max(before))

    def move_row(self, source: int, target: int) -> None:
        self._cache.move_row(source, target)

    def clear_row(self, row: int) -> None:
        self._cache.clear_row(row)

    def _decode_forward(self, tokens: Tensor, position_ids: Tensor, kv_length: int, masked: bool = True) -> Tensor:
        """[b] tokens at [b] positions -> [b, V]. Unless `masked`, all rows have `kv_length` positions."""
        def attend(layer: int, qkv: Tensor) -> Tensor:
            q = qkv[:, :, 0]
            self._cache.append_tokens(layer, position_ids, qkv[:, 0, 1:])
            keys, values = self._cache.view(layer, len(tokens), kv_length)
            return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)

        mask = None  # [b, 1, 1, position], added: 0 where a row has something
        if masked:
            behind = torch.arange(kv_length, device=self._device) > position_ids[:, None]
            mask = torch.zeros_like(behind, dtype=self._dtype).masked_fill_(behind, -torch.inf)[:, None, None, :]
        return self._forward(tokens[:, None], position_ids[:, None], attend)[:, 0]

    def _forward(self, tokens: Tensor, position_ids: Tensor, attend: AttentionFn,
                 selected: Tensor | None = None) -> Tensor:
        """[b, s] tokens -> [b, s, V], or of the `selected` positions alone."""
        blocks = [partial(block.forward, cached=partial(attend, layer)) for layer, block in enumerate(self._blocks)]
        x = self.model.hidden_states(tokens, position_ids, blocks=blocks)  # [b, s, h]
        return self.model.logits(x if selected is None else x[:, selected])


@dataclass(frozen=True)
class _PromptGroup:
    """Prompts of equal length in consecutive rows, for one attention call."""

    row: int
    """The first one."""
    start: int
    """Its offset in the packed prompts."""
    count: int
    length: int

    def select(self, numbers: Tensor) -> Tensor:
        """[1, s, ...] -> [count, length, ...]"""
        part = numbers[0, self.start : self.start + self.count * self.length]
        return part.view(self.count, self.length, *part.shape[1:])


def _group_prompts(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[_PromptGroup]:
    first = start = 0
    for last in range(len(rows)):
        goes_on = last + 1 < len(rows) and rows[last + 1] == rows[last] + 1 and lengths[last + 1] == lengths[last]
        if not goes_on:
            yield _PromptGroup(rows[first], start, last + 1 - first, lengths[last])
            start += (last + 1 - first) * lengths[last]
            first = last + 1
