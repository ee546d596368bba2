"""The loss of a vocabulary that is split over tensor parallel; no rank ever sees the logits of another.

Rank i of p holds the columns [i V/p, (i+1) V/p) of the logits. With m the largest logit of a row, over all ranks,

    lse = m + log(sum_j exp(x_j - m))      loss = lse - x_target      d loss / d x_j = exp(x_j - lse) - [j = target]

needs three numbers per row from the other ranks: the maximum, the sum, and the target's logit. Columns at or
beyond `vocab_size` are padding: left out of the sum, and of gradient zero. Arithmetic is fp32 whatever the logits.

`vocab_parallel_cross_entropy` starts from logits. `linear_cross_entropy` starts one product earlier and never
holds all logits: it walks over *chunks* of rows, small enough to keep and large enough for a fast matrix
product, and inside them over *blocks* whose fp32 copy stays in the cache. A target outside the
vocabulary is not looked for here; the embedding and the data layer refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mpu.classic import resolve
from mpu.collectives import all_reduce
from mpu.device import on_accelerator
from mpu.groups import Group
from mpu.sinks import GradSink

_BLOCK_ROWS = 64
_CUDA_BLOCK_ROWS = 1024

_CPU_CHUNK_BYTES = 104 << 20
"""Bytes of logits in a CPU chunk: 1,024 bf16 or 512 fp32 rows of GPT-2's vocabulary. Below this, products slow down."""

_CUDA_CHUNK_ROWS = 4096

_SLAB_COLUMNS = 8192
"""Columns whose 16-bit weight gradient is made, and added to the fp32 total, while still in the CPU's cache."""


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, tp: Group | None = None, vocab_size: int | None = None
) -> Tensor:
    """Loss per token: logits [..., V / tp] and target [...] (ids of the whole vocabulary) -> fp32 [...]."""
    flat = logits.reshape(-1, logits.shape[-1])  # [..., V / tp] -> [N, V / tp]
    share = _Share.of(flat.shape[1], resolve(tp), vocab_size)
    losses = _VocabParallel.apply(flat, target.reshape(-1), share)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses).view(target.shape)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, tp: Group | None = None, *, vocab_size: int | None = None,
    loss_weight: Tensor | None = None, grad_scale: float = 1.0, chunk_rows: int | None = None,
    weight_sink: GradSink | None = None,
) -> Tensor:
    """The loss of logits hidden @ weight.T, without the logits: hidden [N, H], weight [V / tp, H], target [N].

    With `loss_weight` [N]: the mean of the losses under these weights (0 where all are 0). Its gradients are made on
    the way forward, times `grad_scale`, which keeps fp16 from underflowing if it is the factor (loss scale, 1 /
    accumulation) that the loss will be multiplied by; backward multiplies by what is missing, usually 1.
    They are used up by the first backward. Without `loss_weight`: the losses [N]; their gradients depend on what is
    done with each, so backward computes the logits once more.

    hidden is replicated over tp, and its gradient comes back summed: no `copy_to_region` before it.
    """
    share = _Share.of(weight.shape[0], resolve(tp), vocab_size)
    rows = chunk_rows or _default_chunk(hidden, weight.shape[0])
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if loss_weight is None:
        if not wants_grad:
            return _Walk(hidden, weight, target, share, rows).run()
        return cast(Tensor, _LinearLosses.apply(hidden, weight, target, share, rows))  # type: ignore[no-untyped-call]
    portion = loss_weight.float() / loss_weight.float().sum().clamp(min=torch.finfo(torch.float32).tiny)
    if not wants_grad:
        return _Walk(hidden, weight, target, share, rows).run() @ portion
    mean = _LinearMean.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, portion, share, rows, grad_scale, weight_sink)
    return cast(Tensor, mean)


def _default_chunk(hidden: Tensor, columns: int) -> int:
    if on_accelerator(hidden):
        return _CUDA_CHUNK_ROWS
    return max(_BLOCK_ROWS, _CPU_CHUNK_BYTES // max(1, columns * hidden.element_size()))


@dataclass(frozen=True)
class _Share:
    """This rank's columns of the logits: global ids first .. first + columns are its real tokens."""

    tp: Group
    first: int
    columns: int

    @staticmethod
    def of(local_size: int, tp: Group, vocab_size: int | None) -> _Share:
        first = tp.rank * local_size
        real = local_size if vocab_size is None else max(0, min(local_size, vocab_size - first))
        return _Share(tp, first, real)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """(is the target among my columns [n], its column, or 0, [n])."""
        local = target - self.first
        mine = (local >= 0) & (local < self.columns)
        return mine, local.masked_fill(~mine, 0)

    def combine(self, lse: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
        """From my columns' log-sum-exp and the target's logit (0 if it is not mine) to those of all columns."""
        if self.tp.is_solo:
            return lse, at_target
        top = all_reduce(lse, self.tp, "max")
        total, at_target = all_reduce(torch.stack([(lse - top).exp(), at_target]), self.tp)
        return top + total.log(), at_target


# -- from logits ---------------------------------------------------------------------------------------------------


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, share: _Share) -> Tensor:
        x = logits[:, : share.columns].float()
        mine, column = share.locate(target)
        at_target = torch.zeros(len(x), device=x.device)
        if share.columns:
            at_target = x.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~mine, 0)
        lse, at_target = share.combine(torch.logsumexp(x, dim=1), at_target)
        ctx.save_for_backward(logits, target, lse)
        ctx.share = share
        return lse - at_target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, target, lse = ctx.saved_tensors
        share: _Share = ctx.share
        grad = torch.zeros_like(logits)
        probability = (logits[:, : share.columns].float() - lse.unsqueeze(1)).exp_()
        _subtract_one_hot(probability, *share.locate(target))
        grad[:, : share.columns].copy_(probability.mul_(grads[0].unsqueeze(1)))
        return grad, None, None


def _subtract_one_hot(probability: Tensor, mine: Tensor, column: Tensor) -> None:
    """probability[row, target] -= 1 in the rows whose target is here."""
    if probability.shape[1]:
        probability.scatter_add_(1, column.unsqueeze(1), -mine.unsqueeze(1).float())


# -- from hidden states --------------------------------------------------------------------------------------------


class _LinearMean(torch.autograd.Function):
    """The weighted mean: gradients are made in forward, so that each chunk's logits are computed once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, portion: Tensor, share: _Share, rows: int,
        grad_scale: float, sink: GradSink | None,
    ) -> Tensor:
        walk = _Walk(hidden, weight, target, share, rows)
        claim = sink.claim() if sink is not None and ctx.needs_input_grad[1] else None
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        losses = walk.run(portion * grad_scale, for_hidden, for_weight, None if claim is None else claim.place)
        ctx.grads = walk.d_hidden, walk.d_weight if claim is None else None
        ctx.grad_scale, ctx.sink, ctx.claim = grad_scale, sink, claim
        return losses @ portion

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy: a second backward needs a second forward")
        made, ctx.grads = ctx.grads, None  # handed over, not copied: the largest tensors of the step
        missing = grads[0] / ctx.grad_scale
        # Looking costs nothing on CPU, and a stall on CUDA.
        factor = missing if on_accelerator(missing) or missing.item() != 1.0 else None
        for grad in made if factor is not None else ():
            if grad is not None:
                grad.mul_(factor)
        d_hidden, d_weight = made
        claim, ctx.claim = ctx.claim, None  # or a loss that is kept would keep the gradient's memory
        if claim is not None:
            claim.keep(factor)
        elif ctx.sink is not None and d_weight is not None:
            ctx.sink.total().add_(d_weight)
            d_weight = None
        return d_hidden, d_weight, None, None, None, None, None, None


class _LinearLosses(torch.autograd.Function):
    """One loss per row: the chunks are computed again in backward, when the gradient of each loss is known."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, share: _Share, rows: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, target)
        ctx.share, ctx.rows = share, rows
        return _Walk(hidden, weight, target, share, rows).run()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target = ctx.saved_tensors
        walk = _Walk(hidden, weight, target, ctx.share, ctx.rows)
        walk.run(grads[0], *ctx.needs_input_grad[:2])
        return walk.d_hidden, walk.d_weight, None, None, None


class _Walk:
    """One pass over the rows, chunk by chunk; `run` returns the losses and leaves the gradients beside them."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor, share: _Share, rows: int) -> None:
        self.hidden, self.target, self.share = hidden.detach(), target, share
        self.weight = weight.detach()
        self.rows = max(1, min(rows, len(hidden)))
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None

    @torch.no_grad()
    def run(
        self, row_scale: Tensor | None = None, for_hidden: bool = False, for_weight: bool = False,
        place: Tensor | None = None,
    ) -> Tensor:
        """Losses [N]; with row_scale [N] also the gradients asked for, of sum(row_scale * losses).

        `place`, if given, receives the weight gradient: it becomes `d_weight`.
        """
        share, hidden = self.share, self.hidden
        width = self.weight.shape[0]  # padding included: a product of odd width is slower than one of padded width
        block_rows = min(_CUDA_BLOCK_ROWS if on_accelerator(hidden) else _BLOCK_ROWS, self.rows)
        buffer = hidden.new_empty(self.rows, width)
        scratch = torch.empty(block_rows, width, dtype=torch.float32, device=hidden.device)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        if for_hidden:
            self.d_hidden = torch.empty_like(hidden)
        total = self._weight_total(place) if for_weight else None
        for start in range(0, len(hidden), self.rows):
            chunk = slice(start, start + self.rows)
            x = hidden[chunk]
            logits = torch.mm(x, self.weight.t(), out=buffer[: len(x)])  # [rows, H] x [H, width]
            logits[:, share.columns:] = -torch.inf  # probability, and gradient, 0
            for first in range(0, len(x), block_rows):
                block = slice(first, first + block_rows)
                scale = None if row_scale is None else row_scale[chunk][block]
                losses[chunk][block] = _block(logits[block], self.target[chunk][block], scale, share, scratch)
            # from here on `logits` holds the gradient of the logits
            if self.d_hidden is not None:
                torch.mm(logits, self.weight, out=self.d_hidden[chunk])
            if total is not None:
                _add_product(total, logits, x, first=start == 0)
        if self.d_hidden is not None:
            self.d_hidden = all_reduce(self.d_hidden, share.tp)
        if total is not None:
            self.d_weight = total.to(self.weight.dtype) if place is None else place
            if place is not None and total is not place:
                place.copy_(total)
        return losses

    def _weight_total(self, place: Tensor | None) -> Tensor:
        """Where the weight gradient adds up: in fp32 if it is the sum of several chunks."""
        one_chunk = self.rows >= len(self.hidden)
        dtype = self.weight.dtype if one_chunk else torch.float32
        return place if place is not None and place.dtype == dtype else torch.empty_like(self.weight, dtype=dtype)


def _block(logits: Tensor, target: Tensor, row_scale: Tensor | None, share: _Share, scratch: Tensor) -> Tensor:
    """Losses of a few rows; with row_scale, `logits` is overwritten with the gradient of its scaled losses."""
    mine, column = share.locate(target)
    log_p = scratch[: len(logits)]
    if share.columns:
        torch.log_softmax(logits, 1, dtype=torch.float32, out=log_p)  # one fused pass
        at_target = log_p.gather(1, column.unsqueeze(1)).squeeze(1)
    else:  # nothing but padding here
        at_target = torch.zeros(len(logits), device=logits.device)
        log_p.fill_(-torch.inf)
    if share.tp.is_solo:
        loss = -at_target
    else:
        lse = _log_sum_exp(logits, log_p) if share.columns else torch.full_like(at_target, -torch.inf)
        everywhere, at_target = share.combine(lse, (at_target + lse).masked_fill(~mine, 0))
        loss = everywhere - at_target
        log_p += (lse - everywhere).unsqueeze(1)
    if row_scale is not None:
        gradient = log_p.exp_()
        _subtract_one_hot(gradient, mine, column)
        logits.copy_(gradient.mul_(row_scale.unsqueeze(1)))
    return loss


def _log_sum_exp(logits: Tensor, log_p: Tensor) -> Tensor:
    """What log_softmax subtracted from each row, read where the two are smallest apart: at the largest logit."""
    top, column = logits.max(dim=1)
    return top.float() - log_p.gather(1, column.unsqueeze(1)).squeeze(1)


def _add_product(total: Tensor, d_logits: Tensor, x: Tensor, first: bool) -> None:
    """total [columns, H] += d_logits.T @ x, or = for the first chunk."""
    if total.dtype == x.dtype:
        total.addmm_(d_logits.t(), x, beta=0 if first else 1)
        return
    step = max(1, total.shape[0] if on_accelerator(total) else _SLAB_COLUMNS)
    for start in range(0, total.shape[0], step):
        slab = slice(start, start + step)
        product = torch.mm(d_logits[:, slab].t(), x)  # accumulated in fp32 inside, rounded once per chunk
        if first:
            total[slab] = product
        else:
            total[slab] += product
