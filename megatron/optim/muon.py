"""Muon over flat fp32 spans: momentum whose matrix is made orthogonal before it is a step (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/), and AdamW for what is no hidden matrix.

    m <- momentum m + (1 - momentum) g;   u = momentum m + (1 - momentum) g  (m itself without `nesterov`)
    w <- (1 - lr decay) w - lr scale orthogonal(u)

The matrix is the logical one, whole: neither ZeRO nor tensor parallelism changes what is made orthogonal, nor the
precision. u travels in the one that it is multiplied in: bf16, or fp32 on a processor without instructions for bf16.
A checkpoint records which, and a run that is resumed on that kind of device keeps it. q, k and v of a fused projection
are three matrices. Which parameters are hidden matrices their param groups say by `use_muon` (zero/hidden.py).

Both kinds keep two states, as the parameters of a bucket have the same ones; the second of a matrix stays 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from megatron.optim.adam import MAX_TILE_NUMEL, AdamW
from megatron.optim.rule import SegmentwiseRule, UpdateSegment
from mpu.collectives import all_reduce_scalar
from mpu.groups import Group

NEWTON_SCHULZ_COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of Newton-Schulz's quintic: steep at 0, so that few steps bring every singular value near 1."""
MIN_NORM = 1e-7
NEWTON_SCHULZ_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@final
@dataclass
class Muon(SegmentwiseRule):
    tile: int = MAX_TILE_NUMEL
    """Elements updated at a time: a temporary has as many."""
    _adam: AdamW = field(init=False)
    _device_precision: str = field(init=False, default="bfloat16")
    _precision: str = field(init=False, default="bfloat16")  # as chosen for the device, or as a checkpoint has it
    _device_type: str = field(init=False, default="")

    name = "Muon"
    states = ("exp_avg", "exp_avg_sq")
    elementwise = False

    def __post_init__(self) -> None:
        self._adam = AdamW(self.tile)

    def bind_device(self, device: torch.device, world: Group) -> None:
        self._adam.bind_device(device, world)
        # Matrices are brought together on a GPU where there is one, also where spans are on the host.
        self._device_type = "cuda" if torch.cuda.is_available() else device.type
        self._device_precision = self._precision = "bfloat16" if all_reduce_scalar(
            has_fast_bf16_matmul(self._device_type), world, "min") else "float32"

    def step(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        lr = float(hyper["lr"]) * hyper["lr_scale"]
        if hyper["use_muon"]:
            self._step_matrices(segment, hyper, lr, factor)
        elif len(segment.master):
            self._adam.step(segment, {**hyper, "lr": lr}, factor=factor, steps_taken=steps_taken)

    def _step_matrices(self, segment: UpdateSegment, hyper: Mapping[str, Any], lr: float, factor: float) -> None:
        directions = self._update_directions(segment, hyper, factor)
        segment.master.mul_(1 - lr * hyper["weight_decay"])
        for full_param in segment.gather_full_params(directions):
            matrices = full_param.tensors if hyper["split_qkv"] else (full_param.values,)
            for matrix in matrices:
                matrix.copy_(orthogonalize(matrix, hyper["ns_steps"]))
            scale = update_scale(matrices[0].shape, hyper["adjust_lr_fn"])
            segment.master[full_param.local_range].add_(full_param.local_values(), alpha=-lr * scale)

    def _update_directions(self, segment: UpdateSegment, hyper: Mapping[str, Any], factor: float) -> Tensor:
        """New momenta; and which way they would have the weights go."""
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
    """Faster than fp32: every GPU, and a processor with instructions for it. Others take 21 to 29 times as long."""
    known = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
    return device_type != "cpu" or any(is_supported() for is_supported in known)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Nearly U V^T, where the matrix is U S V^T: its singular values come to lie around 1, between 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # the smaller of its two products is made
    x = x / x.norm().clamp(min=MIN_NORM)  # no singular value above 1
    for _ in range(steps):
        product = x @ x.T
        polynomial = torch.addmm(product, product, product, beta=b, alpha=c)  # b x x^T + c (x x^T)^2
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def update_scale(shape: torch.Size, adjustment: str) -> float:
    """`original`: a step changes what a layer puts out alike, whatever its shape. `match_rms_adamw`: an element moves
    as far as by Adam, whose rates then fit."""
    rows, columns = shape
    return math.sqrt(max(1, rows / columns)) if adjustment == "original" else 0.2 * math.sqrt(max(rows, columns))
