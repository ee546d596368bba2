"""The chunk loop of the fused LM-head loss: logits of hidden @ weight.T, one chunk of rows at a time.

`run_in_chunks` returns the loss of each row and, on request, the gradients of a weighted sum of the losses.
`loss_cpu` and `loss_accelerator` say how the loss and the weight gradient of a chunk are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpu.collectives import all_reduce
from mpu.groups import Group

ChunkLossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(logits, target, row_scale) -> losses; with row_scale, the logits become the gradient of their scaled losses."""

AccumulateWeightGrad = Callable[[Tensor, Tensor, Tensor, bool], None]
"""(total, d_logits, x, first): total += d_logits.T @ x, or = for the first chunk."""


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits: ids [first_id, first_id + num_columns) are its real (unpadded) tokens."""

    tp: Group
    first_id: int
    num_columns: int

    @staticmethod
    def of(local_size: int, tp: Group, vocab_size: int | None) -> VocabShard:
        first = tp.rank * local_size
        real = local_size if vocab_size is None else max(0, min(local_size, vocab_size - first))
        return VocabShard(tp, first, real)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """target [n] -> (is the target among this rank's columns [n], its local column or 0 [n])."""
        local = target - self.first_id
        is_local = (local >= 0) & (local < self.num_columns)
        return is_local, local.masked_fill(~is_local, 0)


@dataclass(frozen=True)
class LossInputs:
    """hidden [N, H], weight [V / tp, H], target [N]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    shard: VocabShard


@dataclass(frozen=True)
class LossGradRequest:
    """Which gradients of sum(row_scale * losses) to compute; none without `row_scale` [N]."""

    row_scale: Tensor | None = None
    for_hidden: bool = False
    for_weight: bool = False
    weight_buffer: Tensor | None = None
    """Buffer for the weight gradient, if it has one."""


@dataclass
class LossOutputs:
    """Losses [N] and the requested gradients; `weight_grad` is the weight buffer if one was given."""

    losses: Tensor
    hidden_grad: Tensor | None = None
    weight_grad: Tensor | None = None


@torch.no_grad()
def run_in_chunks(inputs: LossInputs, request: LossGradRequest, chunk_rows: int, chunk_loss: ChunkLossFunction,
                  accumulate_weight_grad: AccumulateWeightGrad, *, always_into_fp32_buffer: bool) -> LossOutputs:
    """Process `chunk_rows` rows at a time. The weight gradient is accumulated in the dtype of the weight for a single
    chunk and in fp32 for several; directly in its buffer if that has this dtype, or (`always_into_fp32_buffer`) is
    fp32."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    weight_total = None
    if request.for_weight:
        dtype, weight_total = weight.dtype if chunk_rows >= len(hidden) else torch.float32, request.weight_buffer
        if weight_total is None or weight_total.dtype != dtype and not (
                always_into_fp32_buffer and weight_total.dtype == torch.float32):
            weight_total = torch.empty_like(weight, dtype=dtype)
    buffer = hidden.new_empty(chunk_rows, weight.shape[0])
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if request.for_hidden else None
    if weight_total is not None and not len(hidden):  # no first chunk will overwrite it
        weight_total.zero_()
    for start in range(0, len(hidden), chunk_rows):
        chunk = slice(start, start + chunk_rows)
        x = hidden[chunk]
        logits = torch.mm(x, weight.t(), out=buffer[: len(x)])  # [rows, H] x [H, width]
        scale = None if request.row_scale is None else request.row_scale[chunk]
        losses[chunk] = chunk_loss(logits, inputs.target[chunk], scale)
        # `logits` [rows, V / tp] now holds the gradient of the logits
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if weight_total is not None:
            accumulate_weight_grad(weight_total, logits, x, start == 0)
    outputs = LossOutputs(losses, None if d_hidden is None else all_reduce(d_hidden, inputs.shard.tp))
    if weight_total is not None:
        outputs.weight_grad = weight_total.to(weight.dtype) if request.weight_buffer is None else request.weight_buffer
        if request.weight_buffer is not None and weight_total is not request.weight_buffer:
            request.weight_buffer.copy_(weight_total)
    return outputs
