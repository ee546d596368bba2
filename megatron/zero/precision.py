"""What the precision of a run means to the engine: the dtypes of its buffers, and the rule of the loss scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config.tree import PrecisionConfig
from megatron.optim.loss_scale import LossScaleRule
from megatron.zero.policy import StagePolicy
from mpu.device import on_accelerator

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BucketDtypes:
    """Of one bucket: weights as they are used, gradients as backward leaves them, as they are summed, and as they are
    sent."""

    params: torch.dtype = torch.float32
    grads: torch.dtype = torch.float32
    grad_shard: torch.dtype = torch.float32
    communication: torch.dtype | None = None
    """None: as backward leaves them."""
    master: torch.dtype = torch.float32
    """Of what lasts."""
    masters_are_separate: bool = False
    """Weights at work are made of what lasts (quantise.py), which is apart from them also in one precision."""
    frozen_have_masters: bool = False
    """What is frozen lasts in the precision of the masters as well, not in that of its use."""

    @property
    def reduction(self) -> torch.dtype:
        """In what an accelerator adds up the gradients of the ranks: partial sums are rounded to what it sends."""
        return self.communication or torch.float32

    def copies_for_reduction(self, device: torch.device) -> bool:
        return self.communication not in (None, self.grads) or on_accelerator(device) and self.reduction != self.grads


def bucket_dtypes(policy: StagePolicy,
                  precision: PrecisionConfig,
                  accumulation: int,
                  *,
                  masters_are_separate: bool = False) -> BucketDtypes:
    """A sum over several 16-bit micro-batches is taken in fp32, and so is one over ranks of what is sent in another
    precision than that of the weights."""
    work = DTYPES[precision.name]
    sent = None if precision.communication is None else DTYPES[precision.communication]
    wide = accumulation > 1 or sent not in (None, work)
    sums = torch.float32 if wide else work
    in_place = sent == torch.float32 or not policy.grads_are_sharded  # the sum over micro-batches is taken in `grads`
    return BucketDtypes(work, sums if in_place else work, sums, sent, masters_are_separate=masters_are_separate)


def loss_scale_rule(precision: PrecisionConfig) -> LossScaleRule:
    if not precision.fp16:
        return LossScaleRule()
    return LossScaleRule(
        precision.loss_scale or precision.initial_loss_scale,
        precision.loss_scale_window,
        precision.hysteresis,
        precision.min_scale,
        dynamic=precision.loss_scale is None,
        is_enabled=True,
    )
