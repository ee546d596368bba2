"""The multiply-accumulates of a GPT-2 step by hand: what the profiler has to find, to the last one."""

from __future__ import annotations

import math

from megatron.config.tree import ModelConfig
from megatron.profiler.profile import Macs


def step_macs(model: ModelConfig, batch: int, length: int, *, causal: bool, chunk: int | None = None,
              padded: int | None = None) -> Macs:
    """Forward and backward of `batch` sequences. `causal`: attention runs in a kernel that leaves out half of the
    scores, and whose backward makes them again; otherwise it is written out in products. `chunk`: so many blocks are
    recomputed at a time. `padded`: rows of the token table."""
    h, ffn, layers, multiple = model.hidden_size, model.ffn_size, model.num_layers, model.make_vocab_size_divisible_by
    tokens, rows = batch * length, padded or math.ceil(model.known_vocab_size / multiple) * multiple
    last = tokens * ffn * h
    matrices = tokens * (3 * h * h + h * h + h * ffn) + last
    product = batch * h * (length * (length + 1) // 2 if causal else length * length)  # of q k^T, over all heads
    block = matrices + 2 * product
    # The loss makes logits, and the gradients of x and of the table, on the way forward; then a mean over the tokens.
    forward = layers * block + 3 * tokens * h * rows + tokens
    backward = layers * (2 * matrices + (5 if causal else 4) * product)
    # What backward wants of a chunk is there before its last product, which is then not run again; but for a dropout
    # behind it.
    left_out = 0 if chunk is None or model.hidden_dropout else math.ceil(layers / chunk) * last
    again = 0 if chunk is None else layers * block - left_out
    return Macs(forward, backward, again)
