"""Muon over flat fp32 segments (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): orthogonalized
momentum for hidden matrices, and AdamW for all other parameters.

    m <- momentum m + (1 - momentum) g;   u = momentum m + (1 - momentum) g  (m itself without `nesterov`)
    w <- (1 - lr decay) w - lr scale orthogonal(u)

The full logical matrix is orthogonalized, so the result does not depend on ZeRO or tensor parallelism. u is gathered in
the dtype of the products: bf16, or fp32 on a CPU without bf16 instructions; a run resumed on that kind of device keeps
it. Param groups mark hidden matrices by `use_muon` (zero/units.py). All parameters of a bucket have the same two
states; the second of a matrix stays 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.optim.adam import MAX_TILE_NUMEL, AdamW
from megatron.optim.rule import StepScalars, UpdateRule, UpdateSegment
from mpu.collectives import all_reduce_scalar
from mpu.groups import Group

# Of the quintic iteration: steep at 0, so that few steps bring every singular value near 1.
NEWTON_SCHULZ_COEFFICIENTS = 3.4445, -4.7750, 2.0315
MIN_NORM = 1e-7
NEWTON_SCHULZ_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Muon(UpdateRule):
    tile: int = MAX_TILE_NUMEL  # elements updated at a time: the size of temporaries
    _adam: AdamW = field(init=False)
    _device_precision: str = field(init=False, default="bfloat16")
    _precision: str = field(init=False, default="bfloat16")  # the device's, or that of a checkpoint
    _device_type: str = field(init=False, default="")

    name = "Muon"
    states = ("exp_avg", "exp_avg_sq")
    elementwise = False

    def __post_init__(self) -> None:
        self._adam = AdamW(self.tile)

    def bind_device(self, device: torch.device, world: Group) -> None:
        self._adam.bind_device(device, world)
        # Full matrices are gathered on a GPU if there is one, even if the segments are on the host.
        self._device_type = "cuda" if torch.cuda.is_available() else device.type
        self._device_precision = self._precision = (
            "bfloat16" if all_reduce_scalar(has_fast_bf16_matmul(self._device_type), world, "min") else "float32")

    def step(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        hyper = {**hyper, "lr": float(hyper["lr"]) * hyper["lr_scale"]}
        if hyper["use_muon"]:
            return super().step(segments, hyper, scalars)
        for segment in segments:
            if len(segment.master):
                self._adam.step([segment], hyper, scalars)
        return False

    def step_segment(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                     steps_taken: int) -> None:
        directions = self._update_momentum(segment, hyper, factor)
        segment.master.mul_(1 - hyper["lr"] * hyper["weight_decay"])
        for full_param in segment.gather_full_params(directions):
            matrices = full_param.values.chunk(full_param.num_fused if hyper["split_qkv"] else 1, full_param.dim)
            for matrix in matrices:
                matrix.copy_(orthogonalize(matrix, hyper["ns_steps"]))
            rows, columns = matrices[0].shape
            # `original`: a step changes a layer's output equally for every shape. `match_rms_adamw`: the RMS of an
            # update is that of AdamW, so its learning rates fit.
            scale = math.sqrt(max(1, rows / columns)) if hyper["adjust_lr_fn"] == "original" else \
                0.2 * math.sqrt(max(rows, columns))
            segment.master[full_param.local_range].add_(full_param.local_values(), alpha=-hyper["lr"] * scale)

    def _update_momentum(self, segment: UpdateSegment, hyper: Mapping[str, Any], factor: float) -> Tensor:
        """Update the momentum; returns u of the segment's elements in the dtype of the products. A function, so that
        the last tile's temporaries are freed before the full parameters are gathered."""
        decay = hyper["momentum"]
        directions = torch.empty_like(segment.master, dtype=NEWTON_SCHULZ_DTYPES[self._precision])
        for start in range(0, len(segment.master), self.tile):
            tile = slice(start, start + self.tile)
            grad, momentum = segment.grad[tile].to(torch.float32).mul_(factor), segment.states["exp_avg"][tile]
            momentum.lerp_(grad, 1 - decay)
            directions[tile] = grad.lerp_(momentum, decay) if hyper["nesterov"] else momentum
        return directions

    def scalars(self) -> dict[str, Any]:
        return {"newton_schulz": self._precision, "on": self._device_type}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self._precision = scalars["newton_schulz"] if scalars.get("on") == self._device_type else self._device_precision
        NEWTON_SCHULZ_DTYPES[self._precision]


def has_fast_bf16_matmul(device_type: str) -> bool:
    """Whether bf16 is faster than fp32: GPUs, and CPUs with bf16 instructions. On other CPUs it takes 21 to 29 times as
    long."""
    known = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
    return device_type != "cpu" or any(is_supported() for is_supported in known)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Approximately U V^T of the matrix U S V^T: its singular values end up between about 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # wide, so that x x^T is the smaller product
    x = x / x.norm().clamp(min=MIN_NORM)  # all singular values at most 1
    for _ in range(steps):
        product = x @ x.T
        polynomial = torch.addmm(product, product, product, beta=b, alpha=c)  # b x x^T + c (x x^T)^2
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x
