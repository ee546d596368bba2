"""A model of every kind of matrix, whose gradients are given: -1, 0 or 1 for each number of each sample. Their means
are exact in any precision and in any order, so that what is compared is the optimizer, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor, nn

from mpu.groups import SOLO, Group
from mpu.layers import ColumnParallelLinear, RowParallelLinear
from mpu.partition import local_slice, partition_of

WIDTH, SAMPLES = 24, 8  # samples of a step, over all ranks and micro-batches


class Given(nn.Module):
    def __init__(self, prefix: str, tp: Group) -> None:
        super().__init__()
        self.prefix, self.tp = prefix, tp

    def given(self, samples: Tensor) -> Tensor:
        """A number whose gradients are the means over the samples."""
        total = torch.zeros((), device=samples.device)
        for name, parameter in self.named_parameters():
            if "blocks." not in name or self.prefix:
                grad = torch.stack([self.own(parameter, gradient(self.prefix + name, s)) for s in samples.tolist()])
                total = total + (parameter * grad.mean(0).to(samples.device, parameter.dtype)).float().sum()
        return total

    def own(self, parameter: nn.Parameter, whole: Callable[[torch.Size], Tensor]) -> Tensor:
        """This rank's slice of the whole tensor."""
        partition = partition_of(parameter)
        shape = [*parameter.shape]
        if partition is None:
            return whole(torch.Size(shape))
        shape[partition.dim] *= self.tp.size
        return local_slice(whole(torch.Size(shape)), partition, self.tp.rank, self.tp.size)


class Block(Given):
    def __init__(self, prefix: str, tp: Group) -> None:
        super().__init__(prefix, tp)
        self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, stride=3, tp=tp)
        self.tall = nn.Linear(WIDTH, 40, bias=False)
        self.down = RowParallelLinear(56, WIDTH, input_is_parallel=True, tp=tp)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, samples: Tensor) -> Tensor:
        return self.given(samples)


class Model(Given):
    """What is outside of blocks, or has one dimension, or is looked up, is no hidden matrix."""

    def __init__(self, tp: Group = SOLO) -> None:
        super().__init__("", tp)
        self.table = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(Block(f"blocks.{number}.", tp) for number in range(2))
        self.head = nn.Linear(WIDTH, 37)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.own(parameter, first(name)))

    def forward(self, samples: Tensor) -> Tensor:
        total = self.given(samples)
        for block in self.blocks:
            total = total + block(samples)
        return total


HIDDEN = {f"blocks.{number}.{name}.weight" for number in range(2) for name in ("qkv", "tall", "down")}


def first(name: str) -> Callable[[torch.Size], Tensor]:
    """What a parameter begins with."""
    return lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) / 4


def gradient(name: str, sample: int) -> Callable[[torch.Size], Tensor]:
    seed = crc32(f"{name} {sample}".encode())
    return lambda shape: torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def samples_of(step: int, micro: int, accumulation: int, dp: Group) -> Tensor:
    """Those of one micro-batch of one rank."""
    everything = torch.arange(step * SAMPLES, (step + 1) * SAMPLES)
    return everything.chunk(dp.size)[dp.rank].chunk(accumulation)[micro]
