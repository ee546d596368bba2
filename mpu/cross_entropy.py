"""The loss of a vocabulary that is split over tensor parallel ranks; no rank sees another's logits.

With m the largest logit of a row, over all ranks,

    lse = m + log(sum_j exp(x_j - m))      loss = lse - x_target      d loss / d x_j = exp(x_j - lse) - [j = target]

needs three numbers per row from the other ranks: the maximum, the sum, and the target's logit. Columns at or beyond
`vocab_size` are padding: not in the sum, gradient zero. Arithmetic is fp32 whatever the dtype of the logits. The work
is in loss_cpu.py and loss_accelerator.py. The embedding and the data layer refuse targets outside the vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from mpu import loss_accelerator, loss_cpu
from mpu.chunked_loss import LossGradRequest, LossInputs, LossOutputs, VocabShard
from mpu.device import on_accelerator
from mpu.grads import MainGrad
from mpu.groups import Group
from mpu.parallel_state import tp_group_or_current


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, tp: Group | None = None,
                                 vocab_size: int | None = None) -> Tensor:
    """Loss per token: logits [..., V / tp], target [...] (global ids) -> fp32 [...]."""
    flat = logits.reshape(-1, logits.shape[-1])  # [..., V / tp] -> [N, V / tp]
    share = VocabShard.of(flat.shape[1], tp_group_or_current(tp), vocab_size)
    losses = _VocabParallelCrossEntropy.apply(flat, target.reshape(-1), share)  # type: ignore[no-untyped-call]
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
    inputs = LossInputs(hidden, weight, target, VocabShard.of(weight.shape[0], tp_group_or_current(tp), vocab_size))
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if loss_weight is None:
        if not wants_grad:
            return _chunked_loss(inputs, LossGradRequest(), chunk_rows).losses
        return cast(Tensor, _LinearCrossEntropyPerToken.apply(  # type: ignore[no-untyped-call]
            hidden, weight, target, inputs.shard, chunk_rows))
    normalized_weight = loss_weight.float() / loss_weight.float().sum().clamp(min=torch.finfo(torch.float32).tiny)
    if not wants_grad:
        return _chunked_loss(inputs, LossGradRequest(), chunk_rows).losses @ normalized_weight
    return cast(Tensor, _LinearCrossEntropyMean.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, normalized_weight, inputs.shard, chunk_rows, grad_scale, weight_main_grad))


def _chunked_loss(inputs: LossInputs, request: LossGradRequest, chunk_rows: int | None) -> LossOutputs:
    chunked_loss = loss_accelerator.chunked_loss if on_accelerator(inputs.hidden) else loss_cpu.chunked_loss
    return chunked_loss(inputs, request, chunk_rows)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Saves the log-sum-exp (or summaries) per row; backward recomputes the probabilities from them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard) -> Tensor:
        losses_of = loss_accelerator.compute_losses if on_accelerator(logits) else loss_cpu.compute_losses
        losses, per_row = losses_of(logits, target, shard)
        ctx.save_for_backward(logits, target, per_row)
        ctx.share = shard
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, target, per_row = ctx.saved_tensors
        gradient_of = loss_accelerator.compute_gradient if on_accelerator(logits) else loss_cpu.compute_gradient
        return gradient_of(logits, target, ctx.share, per_row, grads[0]), None, None


class _LinearCrossEntropyMean(torch.autograd.Function):
    """The weighted mean. Gradients are computed in forward, so that each chunk's logits are computed once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, normalized_weight: Tensor, shard: VocabShard,
                chunk_rows: int | None, grad_scale: float, main_grad: MainGrad | None) -> Tensor:
        reservation = main_grad.reserve() if main_grad is not None and ctx.needs_input_grad[1] else None
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        request = LossGradRequest(normalized_weight * grad_scale, for_hidden, for_weight,
                                  None if reservation is None else reservation.buffer)
        outputs = _chunked_loss(LossInputs(hidden, weight, target, shard), request, chunk_rows)
        ctx.grads = outputs.hidden_grad, outputs.weight_grad if reservation is None else None
        ctx.grad_scale, ctx.main_grad, ctx.reservation = grad_scale, main_grad, reservation
        return outputs.losses @ normalized_weight

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
        ctx.share, ctx.chunk_rows = shard, chunk_rows
        return _chunked_loss(LossInputs(hidden, weight, target, shard), LossGradRequest(), chunk_rows).losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        request = LossGradRequest(grads[0].contiguous(), for_hidden, for_weight)
        outputs = _chunked_loss(LossInputs(hidden, weight, target, ctx.share), request, ctx.chunk_rows)
        return outputs.hidden_grad, outputs.weight_grad, None, None, None
