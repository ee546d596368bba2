"""The loss of a vocabulary that is split over tensor parallel ranks; no rank sees another's logits.

With m the largest logit of a row, over all ranks,

    lse = m + log(sum_j exp(x_j - m))      loss = lse - x_target      d loss / d x_j = exp(x_j - lse) - [j = target]

needs three numbers per row from the other ranks: the maximum, the sum, and the target's logit. Columns at or beyond
`vocab_size` are padding: not in the sum, gradient zero. Arithmetic is fp32 whatever the dtype of the logits. The work
on a chunk is in loss_chunk.py. The embedding and the data layer refuse targets outside the vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from mpu.collectives import all_reduce
from mpu.device import on_accelerator
from mpu.grads import MainGrad
from mpu.groups import Group
from mpu.loss_chunk import VocabShard, accumulate_weight_grad, losses_of_chunk, rows_per_chunk
from mpu.parallel_state import tp_group_or_current


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, tp: Group | None = None,
                                 vocab_size: int | None = None) -> Tensor:
    """Loss per token: logits [..., V / tp], target [...] (global ids) -> fp32 [...]."""
    flat = logits.reshape(-1, logits.shape[-1])  # [..., V / tp] -> [N, V / tp]
    shard = VocabShard.of(flat.shape[1], tp_group_or_current(tp), vocab_size)
    losses = _VocabParallelCrossEntropy.apply(flat, target.reshape(-1), shard)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses).view(target.shape)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, tp: Group | None = None, *,
                         vocab_size: int | None = None, loss_weight: Tensor | None = None, grad_scale: float = 1.0,
                         chunk_rows: int | None = None, weight_main_grad: MainGrad | None = None) -> Tensor:
    """The loss of logits hidden @ weight.T without materializing them: hidden [N, H], weight [V / tp, H], target [N].

    With `loss_weight` [N]: the weighted mean of the losses (0 if all weights are 0). Forward computes its gradients,
    times `grad_scale`; to avoid fp16 underflow pass the factor that will multiply the loss (loss scale / accumulation
    steps), and backward applies only the rest, usually 1. Only one backward is possible.

    Without it: the losses [N]. Backward computes the logits again, since the gradient of each loss is not known before.

    `hidden` is replicated over tp, and its gradient comes back summed: no `copy_to_region` before it."""
    shard = VocabShard.of(weight.shape[0], tp_group_or_current(tp), vocab_size)
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if loss_weight is None:
        if not wants_grad:
            return _chunked_loss(hidden, weight, target, shard, chunk_rows)[0]
        return cast(Tensor, _LinearCrossEntropyPerToken.apply(  # type: ignore[no-untyped-call]
            hidden, weight, target, shard, chunk_rows))
    normalized_weight = loss_weight.float() / loss_weight.float().sum().clamp(min=torch.finfo(torch.float32).tiny)
    if not wants_grad:
        return _chunked_loss(hidden, weight, target, shard, chunk_rows)[0] @ normalized_weight
    return cast(Tensor, _LinearCrossEntropyMean.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, normalized_weight, shard, chunk_rows, grad_scale, weight_main_grad))


@torch.no_grad()
def _chunked_loss(hidden: Tensor, weight: Tensor, target: Tensor, shard: VocabShard, chunk_rows: int | None,
                  row_scale: Tensor | None = None, wants_grads: tuple[bool, bool] = (False, False),
                  weight_buffer: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(losses [N], gradients of sum(row_scale * losses) for hidden and weight, where wanted), one chunk of rows at a
    time. The weight gradient is `weight_buffer` if there is one. It is accumulated in the dtype of the weight for a
    single chunk and in fp32 for several: directly in the buffer if that has this dtype, or on an accelerator fp32."""
    hidden, weight = hidden.detach(), weight.detach()
    rows = max(1, min(chunk_rows or rows_per_chunk(hidden, len(weight)), len(hidden)))
    total = None
    if wants_grads[1]:
        dtype, total = weight.dtype if rows >= len(hidden) else torch.float32, weight_buffer
        if total is None or total.dtype != dtype and not (on_accelerator(hidden) and total.dtype == torch.float32):
            total = torch.empty_like(weight, dtype=dtype)
        if not len(hidden):  # no first chunk will overwrite it
            total.zero_()
    buffer = hidden.new_empty(rows, len(weight))  # with padding: a product of odd width is slower
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if wants_grads[0] else None
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        x = hidden[chunk]
        logits = torch.mm(x, weight.t(), out=buffer[: len(x)])  # [rows, H] x [H, V / tp]
        losses[chunk] = losses_of_chunk(logits, target[chunk], shard, None if row_scale is None else row_scale[chunk])
        # `logits` [rows, V / tp] now holds the gradient of the logits
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if total is not None:
            accumulate_weight_grad(total, logits, x, start == 0)
    d_hidden = None if d_hidden is None else all_reduce(d_hidden, shard.tp)
    if total is None or weight_buffer is None:
        return losses, d_hidden, None if total is None else total.to(weight.dtype)
    if total is not weight_buffer:
        weight_buffer.copy_(total)
    return losses, d_hidden, weight_buffer


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Backward computes the softmax again, when the gradient of each loss is known."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.shard = shard
        return losses_of_chunk(logits.detach().clone(), target, shard, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, target = ctx.saved_tensors
        gradient = logits.detach().clone()
        losses_of_chunk(gradient, target, ctx.shard, grads[0].float().contiguous())
        return gradient, None, None


class _LinearCrossEntropyMean(torch.autograd.Function):
    """The weighted mean. Gradients are computed in forward, so that each chunk's logits are computed once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, normalized_weight: Tensor, shard: VocabShard,
                chunk_rows: int | None, grad_scale: float, main_grad: MainGrad | None) -> Tensor:
        reservation = main_grad.reserve() if main_grad is not None and ctx.needs_input_grad[1] else None
        losses, d_hidden, d_weight = _chunked_loss(
            hidden, weight, target, shard, chunk_rows, normalized_weight * grad_scale, ctx.needs_input_grad[:2],
            None if reservation is None else reservation.buffer)
        ctx.grads = d_hidden, d_weight if reservation is None else None
        ctx.grad_scale, ctx.main_grad, ctx.reservation = grad_scale, main_grad, reservation
        return losses @ normalized_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy: a second backward needs a second forward")
        input_grads, ctx.grads = ctx.grads, None  # passed on without a copy: the largest tensors of the step
        missing = grads[0] / ctx.grad_scale
        # .item() is free on CPU, but synchronizes on CUDA.
        factor = missing if on_accelerator(missing) or missing.item() != 1.0 else None
        for grad in input_grads if factor is not None else ():
            if grad is not None:
                grad.mul_(factor)
        d_hidden, d_weight = input_grads
        # otherwise a loss that stays alive would hold the gradient's memory
        reservation, ctx.reservation = ctx.reservation, None
        if reservation is not None:
            reservation.commit(factor)
        elif ctx.main_grad is not None and d_weight is not None:
            ctx.main_grad.accumulated().add_(d_weight)
            d_weight = None
        return d_hidden, d_weight, None, None, None, None, None, None


class _LinearCrossEntropyPerToken(torch.autograd.Function):
    """One loss per row. Backward computes the chunks again, when the gradient of each loss is known."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, shard: VocabShard,
                chunk_rows: int | None) -> Tensor:
        ctx.save_for_backward(hidden, weight, target)
        ctx.shard, ctx.chunk_rows = shard, chunk_rows
        return _chunked_loss(hidden, weight, target, shard, chunk_rows)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target = ctx.saved_tensors
        _, d_hidden, d_weight = _chunked_loss(hidden, weight, target, ctx.shard, ctx.chunk_rows, grads[0].contiguous(),
                                              ctx.needs_input_grad[:2])
        return d_hidden, d_weight, None, None, None
