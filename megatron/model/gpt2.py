"""GPT-2: embeddings, blocks, final norm, and logits tied to the token embedding; with the variations of ModelConfig.

Parameter names are the logical names of checkpoints: `wte.weight`, `wpe.weight`, `blocks.0.ln_1.weight`, ... Shapes:
b batch, s sequence, h hidden, V vocabulary. Vocabulary rows beyond the real vocabulary stay zero and never reach a
loss or a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import layer_drop
from megatron.config.tree import ModelConfig, require
from megatron.model.transformer import Block, GPT2Init, Norm, document_mask, rotary_table
from mpu.cross_entropy import linear_cross_entropy
from mpu.device import on_accelerator
from mpu.groups import SOLO, Group
from mpu.layers import VocabParallelEmbedding, linear
from mpu.random import get_rng_tracker
from mpu.regions import (copy_to_region, gather_from_region, gather_from_sequence_region, reduce_from_region,
                         reduce_scatter_to_sequence_region, replicated_to_partial)
from mpu.split import pad_vocab


class GPT2(nn.Module):
    def __init__(self, config: ModelConfig, tp: Group = SOLO, seed: int = 1234, deferred: bool = False,
                 sequence_parallel: bool = False) -> None:
        """`deferred`: allocate no parameters; an engine draws their values. `sequence_parallel`: in training each
        tensor parallel rank has s / tp positions of the residual stream."""
        super().__init__()
        self.config, self.tp, self.seed = config, tp, seed
        self.sequence_parallel = sequence_parallel and not tp.is_solo
        init = GPT2Init(config.init_method_std, config.num_layers, seed, deferred)
        padded = pad_vocab(config.known_vocab_size, config.make_vocab_size_divisible_by, tp.size)
        self.wte = VocabParallelEmbedding(config.known_vocab_size, config.hidden_size, init.weight("wte.weight"),
                                          padded_size=padded, reduce_results=False, tp=tp)
        self.wpe = None
        if config.position_embedding_type == "learned_absolute":
            self.wpe = init.embedding("wpe.weight", config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, init.submodule(f"blocks.{number}"), tp, self.sequence_parallel)
                                    for number in range(config.num_layers))
        self.ln_f = Norm(config, tp if self.sequence_parallel else SOLO)
        # run_blocks(blocks, x, *args) -> x; activation checkpointing replaces it.
        self.run_blocks: Callable[..., Tensor] = run_in_order
        self.fp8_head = False  # logits of training are products of 8-bit factors
        # Called with the blocks that run, if layer dropping leaves some out.
        self.on_blocks_chosen: Callable[[Sequence[nn.Module]], None] = lambda blocks: None

    @property
    def positions_are_split(self) -> bool:
        return self.sequence_parallel and self.training

    @property
    def device(self) -> torch.device:
        return self.ln_f.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations; int8 matrices have it too."""
        return self.ln_f.weight.dtype

    def forward(self, tokens: Tensor, targets: Tensor | None = None, loss_weight: Tensor | None = None,
                positions: Tensor | None = None, segments: Tensor | None = None, grad_scale: float = 1.0, *,
                progressive_layer_drop: bool = False, pld_theta: float = 1.0, pld_step: int = 0) -> Tensor:
        """[b, s] tokens -> the mean loss over non-negative `targets`, weighted by `loss_weight`. Without targets:
        logits of the last position, [b, V].

        `positions` and `segments` (document numbers), both [b, s], keep documents apart. The caller will multiply the
        loss by `grad_scale` (see linear_cross_entropy). With `progressive_layer_drop` a model in training leaves out
        the blocks drawn for step `pld_step` at `pld_theta` (layer_drop.py). Raises ConfigError for a target outside the
        vocabulary (on CPU)."""
        drops = progressive_layer_drop and self.training
        blocks = self._choose_blocks(pld_step, pld_theta) if drops else None
        # With split positions every dropout mask differs between ranks: one fork for all of them, outside of what is
        # compiled. A recomputation restores the generator as it was inside.
        has_dropout = self.config.hidden_dropout or self.config.attention_dropout
        with get_rng_tracker().fork() if self.positions_are_split and has_dropout else nullcontext():
            x = self.hidden_states(tokens, positions, segments, blocks)  # [b, s, h]
        if targets is None:
            return self.logits(x[:, -1])
        if not on_accelerator(targets) and targets.numel():
            highest = int(targets.max())
            require(highest < self.config.known_vocab_size, f"target {highest} is outside the vocabulary 0.."
                    f"{self.config.known_vocab_size - 1}: the data was made with another tokenizer")
        counted = torch.ge(targets, 0, out=torch.empty_like(targets, dtype=torch.float32))  # one launch
        weight = counted if loss_weight is None else loss_weight * counted
        return linear_cross_entropy(x.flatten(0, 1), self.wte.weight, targets.flatten(), self.tp,
                                    vocab_size=self.config.known_vocab_size, loss_weight=weight.flatten(),
                                    grad_scale=grad_scale, weight_main_grad=self.wte.weight_main_grad,
                                    z_loss=self.config.z_loss if self.training else 0.0,
                                    fp8=self.fp8_head and self.training)

    def _choose_blocks(self, step: int, theta: float) -> list[Callable[..., Tensor]]:
        """The blocks that run in this step. The others are not called, so the engine does not gather them."""
        scales = layer_drop.kept(self.seed, step, len(self.blocks), theta)
        self.on_blocks_chosen([self.blocks[number] for number in scales])
        return [partial(self.blocks[number], scale=scale) for number, scale in scales.items()]

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None, segments: Tensor | None = None,
                      blocks: Iterable[Callable[..., Tensor]] | None = None) -> Tensor:
        """[b, s] -> [b, s, h], after the final norm; `blocks` is by default all blocks."""
        if positions is None:
            length, longest = tokens.shape[1], self.config.max_position_embeddings
            require(length <= longest, f"a sequence of {length} tokens is longer than the {longest} positions of the "
                    "model; cut it, or give ModelConfig a larger max_position_embeddings")
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens)  # zeros where another rank has the token; the sum below is of both embeddings
        rotary = None
        if self.wpe is None:
            rotary = rotary_table(positions, self.config.head_size, self.config.rotary_base, x.dtype)
        else:
            x = x + replicated_to_partial(self.wpe(positions), self.tp)
        # [b, s, h] -> [b, s / tp, h] or [b, s, h]
        x = (reduce_scatter_to_sequence_region if self.positions_are_split else reduce_from_region)(x, self.tp)
        if self.config.hidden_dropout:
            x = F.dropout(x, self.config.hidden_dropout, self.training)
        mask = None if segments is None else document_mask(segments)
        x = self.run_blocks(list(self.blocks if blocks is None else blocks), x, mask, rotary)
        # For this rank's columns of the logits: backward sums the gradients over ranks.
        return (gather_from_sequence_region if self.positions_are_split else copy_to_region)(self.ln_f(x), self.tp)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [..., h] -> [..., V] over the whole real vocabulary, on every rank."""
        return gather_from_region(self.local_logits(x), self.tp)[..., : self.config.known_vocab_size]

    def local_logits(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., padded V / tp]: this rank's columns, including padding."""
        return linear(x, self.wte.weight)


def run_in_order(blocks: Sequence[Callable[..., Tensor]], x: Tensor, *args: Any) -> Tensor:
    for block in blocks:
        x = block(x, *args)
    return x


@cache
def parameter_shapes(config: ModelConfig, tp: int = 1) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """By name, on one tensor parallel rank: (outside of the blocks, of one block; all have the same). Nothing is
    allocated."""
    with torch.device("meta"):
        model = GPT2(replace(config, num_layers=1), Group(0, tp, tuple(range(tp))), deferred=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    block = {name: shapes.pop(f"blocks.0.{name}") for name, _ in model.blocks[0].named_parameters()}
    return shapes, block


@cache
def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(of the model, of one block): exact, tied embeddings once, without vocabulary padding."""
    outside, block = (sum(map(prod, shapes.values()))
                      for shapes in parameter_shapes(replace(config, make_vocab_size_divisible_by=1)))
    return outside + config.num_layers * block, block
