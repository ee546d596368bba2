"""AdamW, Adam without bias correction, and Lion over flat fp32 segments.

Adam is one fused kernel call for all segments. The kernel applies the gradient factor while it reads, and does nothing
if the step is skipped. On an accelerator it is the Triton kernel (adam_kernel.py), which reads 16-bit gradients and
writes 16-bit weights. On a CPU, and without Triton, it is torch's fused kernel; 16-bit gradients are cast to fp32 one
tile at a time. A CPU tile fits the cache (docs/decisions/018-host-adam.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.optim.rule import StepScalars, UpdateRule, UpdateSegment
from mpu.collectives import all_reduce_scalar
from mpu.device import load_kernels, on_accelerator
from mpu.groups import Group

MAX_TILE_NUMEL = 2**24  # elements cast to fp32 at a time: 64 MB, large enough to keep a device busy

# Elements of a CPU thread's tile. The fp32 gradient and the new masters, which are read again, take 1 MB; a multiple of
# the kernel's vector length, so that tiling does not change results.
CACHE_TILE_NUMEL = 2**17

# (masters, fp32 gradients, first moments, second moments) of one kernel call.
KernelBatch = tuple[list[Tensor], ...]


@dataclass
class AdamW(UpdateRule):
    """Adam with decoupled weight decay, unless `decoupled` is False."""

    tile: int = MAX_TILE_NUMEL  # elements cast to fp32 at a time
    bias_correction: bool = True  # divide the moments by 1 - beta^t, since they start from 0
    decoupled: bool = True  # False: weight decay is added to the gradient
    # (hyper-parameter group, parameter names of the bucket) -> the Triton kernel's table of segments.
    _segment_tables: dict[tuple[int, Sequence[str]], Any] = field(default_factory=dict, init=False, repr=False,
                                                                  compare=False)
    # The module adam_kernel, if the Triton kernel works on all ranks.
    _kernel: ModuleType | None = field(default=None, init=False, repr=False, compare=False)

    name = "AdamW"
    states = ("exp_avg", "exp_avg_sq")
    elementwise = True
    needs_host_scalars = False

    def bind_device(self, device: torch.device, world: Group) -> None:
        """Use the Triton kernel only if all ranks can: the two kernels round differently."""
        kernel = load_kernels("megatron.optim.adam_kernel", device, "no fused kernel for the update, which moves half "
                              "as many bytes again without it") if on_accelerator(device) else None
        everywhere = all_reduce_scalar(kernel is not None, world, "min")
        self._kernel = kernel if everywhere else None

    def step(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        kernel = self._kernel
        if kernel is not None:
            table = self._segment_tables.setdefault((segments[0].group, segments[0].param_names), kernel.SegmentTable())
            if kernel.update(segments, table, hyper, scalars, bias_correction=self.bias_correction,
                             decoupled=self.decoupled):
                return True
        in_cache = not on_accelerator(segments[0].master)
        batches = self._cache_sized_batches(segments) if in_cache else self._large_batches(segments)
        self._step_with_torch(batches, hyper, scalars)
        return in_cache

    def _step_with_torch(self, batches: Iterator[KernelBatch], hyper: Mapping[str, Any], scalars: StepScalars) -> None:
        beta1, beta2 = hyper["betas"]
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        # beta^inf is 0: no bias correction
        count = scalars.count if self.bias_correction else torch.full_like(scalars.count, math.inf)
        for masters, grads, averages, squares in batches:
            kernel(masters, grads, averages, squares, [], [count] * len(masters), lr=hyper["lr"], beta1=beta1,
                   beta2=beta2, weight_decay=hyper["weight_decay"], eps=hyper["eps"], amsgrad=False, maximize=False,
                   grad_scale=scalars.divisor, found_inf=scalars.skip)

    def _cache_sized_batches(self, segments: Sequence[UpdateSegment]) -> Iterator[KernelBatch]:
        """One tile at a time; its 16-bit weights are written when the next tile is requested."""
        size = min(self.tile, CACHE_TILE_NUMEL * torch.get_num_threads())
        staged = torch.empty(max(min(size, _numel_to_widen(segment)) for segment in segments))
        for segment in segments:
            averages, squares = segment.states["exp_avg"], segment.states["exp_avg_sq"]
            if segment.lp_out is None and not _numel_to_widen(segment):
                yield [segment.master], [segment.grad], [averages], [squares]
                continue
            outputs = repeat(None) if segment.lp_out is None else segment.lp_out.split(size)
            tiles = zip(*(flat.split(size) for flat in (segment.master, segment.grad, averages, squares)))
            for (master, grad, average, square), lp_out in zip(tiles, outputs):
                wide = staged[:len(grad)].copy_(grad) if _numel_to_widen(segment) else grad
                yield [master], [wide], [average], [square]
                if lp_out is not None:
                    lp_out.copy_(master)

    def _large_batches(self, segments: Sequence[UpdateSegment]) -> Iterator[KernelBatch]:
        """As few batches as possible: all fp32 gradients at once, the others by tiles."""
        wide = [segment for segment in segments if segment.grad.dtype == torch.float32]
        if wide:
            yield ([segment.master for segment in wide], [segment.grad for segment in wide],
                   [segment.states["exp_avg"] for segment in wide], [segment.states["exp_avg_sq"] for segment in wide])
        for tiles in self._tiles([segment for segment in segments if segment.grad.dtype != torch.float32]):
            lp_grads = [segment.grad[part] for segment, part in tiles]
            staged = torch.empty(sum(map(len, lp_grads)), dtype=torch.float32, device=lp_grads[0].device)
            grads = list(staged.split([len(grad) for grad in lp_grads]))
            torch._foreach_copy_(grads, lp_grads)
            yield ([segment.master[part] for segment, part in tiles], grads,
                   [segment.states["exp_avg"][part] for segment, part in tiles],
                   [segment.states["exp_avg_sq"][part] for segment, part in tiles])

    def _tiles(self, segments: Sequence[UpdateSegment]) -> Iterator[list[tuple[UpdateSegment, slice]]]:
        """Segments split and packed into batches of at most `tile` elements."""
        tiles: list[tuple[UpdateSegment, slice]] = []
        numel_left = self.tile
        for segment in segments:
            start = 0
            while start < len(segment.grad):
                stop = min(len(segment.grad), start + numel_left)
                tiles.append((segment, slice(start, stop)))
                numel_left -= stop - start
                start = stop
                if not numel_left:
                    yield tiles
                    tiles, numel_left = [], self.tile
        if tiles:
            yield tiles


def _numel_to_widen(segment: UpdateSegment) -> int:
    """Gradient elements that must be cast to fp32."""
    return 0 if segment.grad.dtype == torch.float32 else len(segment.grad)


@dataclass(frozen=True)
class Lion(UpdateRule):
    """The sign of an interpolated momentum, and decoupled weight decay; one state per weight, half of Adam's (Chen et
    al. 2023, "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675).

        w <- (1 - lr x decay) w - lr sign(beta1 m + (1 - beta1) g);   m <- beta2 m + (1 - beta2) g
    """

    tile: int = MAX_TILE_NUMEL  # elements updated at a time: the size of temporaries

    name = "Lion"
    states = ("exp_avg",)
    elementwise = True

    def step_segment(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                     steps_taken: int) -> None:
        beta1, beta2 = hyper["betas"]
        for start in range(0, segment.master.numel(), self.tile):
            tile = slice(start, start + self.tile)
            master, exp_avg = segment.master[tile], segment.states["exp_avg"][tile]
            grad = segment.grad[tile].to(torch.float32).mul_(factor)
            direction = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
            master.mul_(1 - hyper["lr"] * hyper["weight_decay"]).add_(direction, alpha=-hyper["lr"])
            exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
