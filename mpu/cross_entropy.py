"""The loss of a vocabulary that is split over tensor parallel ranks; no rank sees another's logits.

With m the largest logit of a row, over all ranks,

    lse = m + log(sum_j exp(x_j - m))      loss = lse - x_target      d loss / d x_j = exp(x_j - lse) - [j = target]

needs three numbers per row from the other ranks: the maximum, the sum, and the target's logit. With a z-loss (PaLM)
`z_loss * lse^2` is added, and its gradient is `2 * z_loss * lse * exp(x_j - lse)`. Columns at or beyond
`vocab_size` are padding: not in the sum, gradient zero. Arithmetic is fp32 whatever the dtype of the logits. The
embedding and the data layer refuse targets outside the vocabulary.

Logits are processed in chunks of rows (`losses_of_chunk`). A GPU needs few large products and no other pass over the
logits: its kernel (kernels.py) reads and writes them once, and the weight gradient is accumulated in fp32 inside
the product. Ranks exchange one all-gather per chunk: a *summary* of each row (largest logit, sum of exponentials, logit
of the target). On a CPU, and without Triton, torch operators work on blocks of rows, and a 16-bit weight gradient over
*slabs* of columns, so that data is read again before it leaves the cache; ranks exchange two all-reduces per block.

Tests: test_cross_entropy.py (all layouts), kernel_cases.py (the Triton kernels), tests/gpu/test_loss.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from mpu.collectives import all_gather, all_reduce
from mpu.device import load_kernels, on_accelerator
from mpu.fp8 import BACKWARD_FORMAT, fp8_mm, to_fp8
from mpu.grads import MainGrad
from mpu.groups import Group
from mpu.parallel_state import tp_group_or_current

# Bytes of logits per chunk: 1,024 bf16 or 512 fp32 rows of GPT-2's vocabulary. Smaller products are slower.
CPU_CHUNK_BYTES = 104 << 20

# As much on an accelerator, 10,624 bf16 rows of GPT-2's vocabulary: fast products, few weight gradient sums.
ACCELERATOR_CHUNK_BYTES = 1 << 30

_TILE_ROWS = 128  # an accelerator's chunks are multiples of this, the tile size of the products

CPU_BLOCK_ROWS, ACCELERATOR_BLOCK_ROWS = 64, 1024  # rows that torch operators hold in fp32 at a time

# Columns whose 16-bit weight gradient is computed on a CPU, and added to the fp32 total, while in the cache.
SLAB_COLUMNS = 8192


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits: ids [first_id, first_id + num_columns) are its real (unpadded) tokens. And
    the factor of the z-loss, and whether logits are products of 8-bit factors."""

    tp: Group
    first_id: int
    num_columns: int
    z_loss: float = 0.0
    fp8: bool = False

    @staticmethod
    def of(local_size: int, tp: Group, vocab_size: int | None, z_loss: float = 0.0, fp8: bool = False) -> VocabShard:
        first = tp.rank * local_size
        real = local_size if vocab_size is None else max(0, min(local_size, vocab_size - first))
        return VocabShard(tp, first, real, z_loss, fp8)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """target [n] -> (is the target among this rank's columns [n], its local column or 0 [n])."""
        local = target - self.first_id
        is_local = (local >= 0) & (local < self.num_columns)
        return is_local, local.masked_fill(~is_local, 0)


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, tp: Group | None = None,
                                 vocab_size: int | None = None) -> Tensor:
    """Loss per token: logits [..., V / tp], target [...] (global ids) -> fp32 [...]. Backward is local."""
    flat = logits.reshape(-1, logits.shape[-1])  # [..., V / tp] -> [N, V / tp]
    shard = VocabShard.of(flat.shape[1], tp_group_or_current(tp), vocab_size)
    # No rank gathers logits: only three numbers per row cross ranks (losses_of_chunk).
    losses = _VocabParallelCrossEntropy.apply(flat, target.reshape(-1), shard)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses).view(target.shape)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, tp: Group | None = None, *,
                         vocab_size: int | None = None, loss_weight: Tensor | None = None, grad_scale: float = 1.0,
                         weight_main_grad: MainGrad | None = None, z_loss: float = 0.0, fp8: bool = False) -> Tensor:
    """The loss of logits hidden @ weight.T without materializing them: hidden [N, H], weight [V / tp, H], target [N].

    With `loss_weight` [N]: the weighted mean of the losses (0 if all weights are 0). Forward computes its gradients,
    times `grad_scale`; to avoid fp16 underflow pass the factor that will multiply the loss (loss scale / accumulation
    steps), and backward applies only the rest, usually 1. Only one backward is possible.

    Without it: the losses [N]. Backward computes the logits again, since the gradient of each loss is not known before.

    `hidden` is replicated over tp, and its gradient is the term of this rank's columns: `copy_to_region` or
    `gather_from_sequence_region` comes before, as with vocab_parallel_cross_entropy."""
    shard = VocabShard.of(weight.shape[0], tp_group_or_current(tp), vocab_size, z_loss, fp8)
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if loss_weight is None:
        if not wants_grad:
            return _chunked_loss(hidden, weight, target, shard)[0]
        return cast(Tensor, _LinearCrossEntropyPerToken.apply(  # type: ignore[no-untyped-call]
            hidden, weight, target, shard))
    normalized_weight = loss_weight.float() / loss_weight.float().sum().clamp(min=torch.finfo(torch.float32).tiny)
    if not wants_grad:
        return _chunked_loss(hidden, weight, target, shard)[0] @ normalized_weight
    return cast(Tensor, _LinearCrossEntropyMean.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, normalized_weight, shard, grad_scale, weight_main_grad))


@torch.no_grad()
def _chunked_loss(hidden: Tensor, weight: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None = None,
                  wants_grads: tuple[bool, bool] = (False, False), weight_buffer: Tensor | None = None,
                  ) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(losses [N], gradients of sum(row_scale * losses) for hidden and weight, where wanted), one chunk of rows at a
    time. The weight gradient is `weight_buffer` if there is one. It is accumulated in the dtype of the weight for a
    single chunk and in fp32 for several: directly in the buffer if that has this dtype, or on an accelerator fp32."""
    hidden, weight = hidden.detach(), weight.detach()
    rows = max(1, min(rows_per_chunk(hidden, len(weight)), len(hidden)))
    total = None
    if wants_grads[1]:
        dtype, total = weight.dtype if rows >= len(hidden) else torch.float32, weight_buffer
        if total is None or total.dtype != dtype and not (on_accelerator(hidden) and total.dtype == torch.float32):
            total = torch.empty_like(weight, dtype=dtype)
        if not len(hidden):  # no first chunk will overwrite it
            total.zero_()
    weight_fp8 = to_fp8(weight) if shard.fp8 else None
    # with padding: a product of odd width is slower; fp8_mm makes its own
    buffer = hidden.new_empty(0 if shard.fp8 else rows, len(weight))
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if wants_grads[0] else None
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        x = hidden[chunk]
        if weight_fp8 is None:
            logits = torch.mm(x, weight.t(), out=buffer[: len(x)])  # [rows, H] x [H, V / tp]
        else:
            logits = fp8_mm(to_fp8(x), weight_fp8.t(), x.dtype, fast=True)
        losses[chunk] = losses_of_chunk(logits, target[chunk], shard, None if row_scale is None else row_scale[chunk])
        # `logits` [rows, V / tp] now holds the gradient of the logits
        if d_hidden is not None and weight_fp8 is None:
            torch.mm(logits, weight, out=d_hidden[chunk])
        elif d_hidden is not None and weight_fp8 is not None:
            d_hidden[chunk] = fp8_mm(to_fp8(logits, BACKWARD_FORMAT), weight_fp8, x.dtype)
        if total is not None:  # in 16 bits also with fp8: it is added to fp32 unrounded
            accumulate_weight_grad(total, logits, x, start == 0)
    if total is None or weight_buffer is None:
        return losses, d_hidden, None if total is None else total.to(weight.dtype)
    if total is not weight_buffer:
        weight_buffer.copy_(total)
    return losses, d_hidden, weight_buffer


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Saves the gradient of each loss in fp32, so that backward sends nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard) -> Tensor:
        gradient = logits.detach().to(torch.float32, copy=True)  # [N, V / tp], first the logits
        ones = torch.ones(len(logits), device=logits.device) if ctx.needs_input_grad[0] else None
        losses = losses_of_chunk(gradient, target, shard, ones)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0].unsqueeze(1)).to(ctx.dtype), None, None


class _LinearCrossEntropyMean(torch.autograd.Function):
    """The weighted mean. Gradients are computed in forward, so that each chunk's logits are computed once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, normalized_weight: Tensor, shard: VocabShard,
                grad_scale: float, main_grad: MainGrad | None) -> Tensor:
        reservation = main_grad.reserve() if main_grad is not None and ctx.needs_input_grad[1] else None
        losses, d_hidden, d_weight = _chunked_loss(
            hidden, weight, target, shard, normalized_weight * grad_scale, ctx.needs_input_grad[:2],
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
        return d_hidden, d_weight, None, None, None, None, None


class _LinearCrossEntropyPerToken(torch.autograd.Function):
    """One loss per row. Backward computes the chunks again, when the gradient of each loss is known."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, shard: VocabShard) -> Tensor:
        ctx.save_for_backward(hidden, weight, target)
        ctx.shard = shard
        return _chunked_loss(hidden, weight, target, shard)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target = ctx.saved_tensors
        _, d_hidden, d_weight = _chunked_loss(hidden, weight, target, ctx.shard, grads[0].contiguous(),
                                              ctx.needs_input_grad[:2])
        return d_hidden, d_weight, None, None


# -- one chunk of logits --------------------------------------------------------------------------------------------


def rows_per_chunk(hidden: Tensor, width: int) -> int:
    """Rows of `width` logits, in the dtype of `hidden`, to process at a time."""
    if on_accelerator(hidden):
        return accelerator_rows_per_chunk(len(hidden), width, hidden.element_size())
    return min(len(hidden), max(CPU_BLOCK_ROWS, CPU_CHUNK_BYTES // max(1, width * hidden.element_size())))


def accelerator_rows_per_chunk(rows: int, columns: int, element_size: int) -> int:
    """As few chunks as memory allows, about equal."""
    most = max(1, ACCELERATOR_CHUNK_BYTES // max(1, columns * element_size) // _TILE_ROWS) * _TILE_ROWS
    chunks = max(1, -(-rows // most))
    return min(rows, -(-rows // chunks // _TILE_ROWS) * _TILE_ROWS)


def losses_of_chunk(logits: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None) -> Tensor:
    """Losses [n] of logits [n, V / tp]; with `row_scale` [n], `logits` is overwritten with the gradient of
    sum(row_scale * losses), otherwise its padding columns are."""
    kernel = load_kernels("mpu.kernels", logits.device, "no fused kernel for the loss, which moves seven times the "
                          "bytes without it") if on_accelerator(logits) else None
    if not shard.tp.is_solo and on_accelerator(logits) and not logits.is_meta and \
            not _all_ranks_have_kernels(shard.tp, logits.device, kernel is not None):
        kernel = None
    if kernel is None or not kernel.serves(logits):
        return _losses_by_blocks(logits, target, shard, row_scale)
    first, columns = shard.first_id, shard.num_columns
    if shard.tp.is_solo and row_scale is not None:
        return cast(Tensor, kernel.losses_and_gradients(logits, target, columns, row_scale, shard.z_loss))
    top, total, at_target = _combine_summaries(shard, kernel.summaries_of(logits, target, first, columns))
    if row_scale is not None:
        kernel.write_gradients(logits, target, first, columns, top, total, row_scale, shard.z_loss)
    losses = total.log() + (top - at_target)
    return cast(Tensor, losses + shard.z_loss * (top + total.log()).square() if shard.z_loss else losses)


@cache
def _all_ranks_have_kernels(tp: Group, device: torch.device, this_rank_has: bool) -> bool:
    """Ranks with kernels send other messages than those without (no C compiler, say). The first call is collective."""
    return bool(all_reduce(torch.tensor(float(this_rank_has), device=device), tp, "min").item())


def _combine_summaries(shard: VocabShard, local: Tensor) -> Tensor:
    """Summaries [3, n] over all ranks' columns, in one all-gather; bitwise equal on every rank."""
    if shard.tp.is_solo:
        return local
    tops, totals, at_targets = all_gather(local.unsqueeze(1), shard.tp, dim=1)  # [3, size, n]
    top = tops.amax(0)
    return torch.stack([top, (totals * (tops - top).exp()).sum(0), at_targets.sum(0)])


def _losses_by_blocks(logits: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None) -> Tensor:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    rows = ACCELERATOR_BLOCK_ROWS if on_accelerator(logits) else CPU_BLOCK_ROWS
    scratch = torch.empty(min(rows, len(logits)), logits.shape[1], dtype=torch.float32, device=logits.device)
    logits[:, shard.num_columns:] = -torch.inf  # padding: probability and gradient 0
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        scale = None if row_scale is None else row_scale[block]
        losses[block] = _losses_of_block(logits[block], target[block], shard, scale, scratch[: len(logits[block])])
    return losses


def _losses_of_block(logits: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None,
                     log_p: Tensor) -> Tensor:
    """`log_p` [rows, V / tp] in fp32 is scratch."""
    is_local, column = shard.locate(target)
    if shard.num_columns:
        torch.log_softmax(logits, 1, dtype=torch.float32, out=log_p)  # one fused pass
        at_target = log_p.gather(1, column.unsqueeze(1)).squeeze(1)
    else:  # this rank has padding only
        at_target = torch.zeros(len(logits), device=logits.device)
        log_p.fill_(-torch.inf)
    if shard.tp.is_solo:
        losses = -at_target
        if shard.z_loss:
            global_lse = logits.gather(1, column.unsqueeze(1)).squeeze(1).float() - at_target
    else:
        lse = torch.full_like(at_target, -torch.inf)
        if shard.num_columns:  # what log_softmax subtracted: recovered at the largest logit, where rounding is smallest
            top, at_top = logits.max(dim=1)
            lse = top.float() - log_p.gather(1, at_top.unsqueeze(1)).squeeze(1)
        largest = all_reduce(lse, shard.tp, "max")
        logit = (at_target + lse).masked_fill(~is_local, 0)
        total, logit = all_reduce(torch.stack([(lse - largest).exp(), logit]), shard.tp)
        global_lse = largest + total.log()
        losses = global_lse - logit
        log_p += (lse - global_lse).unsqueeze(1)
    if shard.z_loss:
        losses = losses + shard.z_loss * global_lse.square()
    if row_scale is not None:
        gradient = log_p.exp_()
        if shard.z_loss:
            gradient.mul_((1 + 2 * shard.z_loss * global_lse).unsqueeze(1))
        if gradient.shape[1]:  # minus 1 in the column of the target, on the rank that has it
            gradient.scatter_add_(1, column.unsqueeze(1), -is_local.unsqueeze(1).float())
        logits.copy_(gradient.mul_(row_scale.unsqueeze(1)))
    return losses


def accumulate_weight_grad(total: Tensor, d_logits: Tensor, x: Tensor, first: bool) -> None:
    """total [V / tp, H] += d_logits.T @ x, or = for the first chunk; on an accelerator 16-bit factors are added to an
    fp32 total unrounded."""
    beta, on_device = 0 if first else 1, on_accelerator(total)
    if x.dtype == torch.float32 or on_device and total.dtype == x.dtype:
        total.addmm_(d_logits.t(), x, beta=beta)
        return
    if total.is_cuda:  # fp32 accumulation inside the product; torch has it on CUDA only
        torch.addmm(total, d_logits.t(), x, beta=beta, out_dtype=total.dtype, out=total)
        return
    columns = len(total) if on_device else SLAB_COLUMNS
    for start in range(0, len(total), columns):
        slab = slice(start, start + columns)
        product = torch.mm(d_logits[:, slab].t(), x)  # accumulated in fp32, rounded once per chunk
        if first:
            total[slab] = product
        else:
            total[slab] += product
