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

from megatron.optim.adam import LARGEST_TILE, AdamW
from megatron.optim.rule import OneByOne, Span
from mpu.collectives import all_reduce_scalar
from mpu.groups import Group

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of Newton-Schulz's quintic: steep at 0, so that few steps bring every singular value near 1."""
LEAST_NORM = 1e-7
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@final
@dataclass
class Muon(OneByOne):
    tile: int = LARGEST_TILE
    """Elements updated at a time: a temporary has as many."""
    _adam: AdamW = field(init=False)
    _chosen: str = field(init=False, default="bfloat16")
    _precision: str = field(init=False, default="bfloat16")  # as chosen for the device, or as a checkpoint has it
    _on: str = field(init=False, default="")

    name = "Muon"
    states = ("exp_avg", "exp_avg_sq")
    elementwise = False

    def __post_init__(self) -> None:
        self._adam = AdamW(self.tile)

    def settle_on(self, device: torch.device, world: Group) -> None:
        self._adam.settle_on(device, world)
        # Matrices are brought together on a GPU where there is one, also where spans are on the host.
        self._on = "cuda" if torch.cuda.is_available() else device.type
        self._chosen = self._precision = "bfloat16" if all_reduce_scalar(multiplies_bf16(self._on), world,
                                                                         "min") else "float32"

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        lr = float(hyper["lr"]) * hyper["lr_scale"]
        if hyper["use_muon"]:
            self._step_matrices(span, hyper, lr, factor)
        elif len(span.master):
            self._adam.step(span, {**hyper, "lr": lr}, factor=factor, steps_taken=steps_taken)

    def _step_matrices(self, span: Span, hyper: Mapping[str, Any], lr: float, factor: float) -> None:
        directions = self._directions(span, hyper, factor)
        span.master.mul_(1 - lr * hyper["weight_decay"])
        for whole in span.wholes(directions):
            matrices = whole.tensors if hyper["split_qkv"] else (whole.values,)
            for matrix in matrices:
                matrix.copy_(orthogonal(matrix, hyper["ns_steps"]))
            scale = scale_of(matrices[0].shape, hyper["adjust_lr_fn"])
            span.master[whole.part].add_(whole.own(), alpha=-lr * scale)

    def _directions(self, span: Span, hyper: Mapping[str, Any], factor: float) -> Tensor:
        """New momenta; and which way they would have the weights go."""
        keeps = hyper["momentum"]
        found = torch.empty_like(span.master, dtype=PRECISIONS[self._precision])
        for start in range(0, len(span.master), self.tile):
            tile = slice(start, start + self.tile)
            grad, momentum = span.grad[tile].to(torch.float32).mul_(factor), span.states["exp_avg"][tile]
            momentum.lerp_(grad, 1 - keeps)
            found[tile] = grad.lerp_(momentum, keeps) if hyper["nesterov"] else momentum
        return found

    def scalars(self) -> dict[str, Any]:
        return {"newton_schulz": self._precision, "on": self._on}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self._precision = scalars["newton_schulz"] if scalars.get("on") == self._on else self._chosen
        PRECISIONS[self._precision]


def multiplies_bf16(device_type: str) -> bool:
    """Faster than fp32: every GPU, and a processor with instructions for it. Others take 21 to 29 times as long."""
    known = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
    return device_type != "cpu" or any(is_supported() for is_supported in known)


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Nearly U V^T, where the matrix is U S V^T: its singular values come to lie around 1, between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # the smaller of its two products is made
    x = x / x.norm().clamp(min=LEAST_NORM)  # no singular value above 1
    for _ in range(steps):
        product = x @ x.T
        polynomial = torch.addmm(product, product, product, beta=b, alpha=c)  # b x x^T + c (x x^T)^2
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def scale_of(shape: torch.Size, adjustment: str) -> float:
    """`original`: a step changes what a layer puts out alike, whatever its shape. `match_rms_adamw`: an element moves
    as far as by Adam, whose rates then fit."""
    rows, columns = shape
    return math.sqrt(max(1, rows / columns)) if adjustment == "original" else 0.2 * math.sqrt(max(rows, columns))
