"""The loader an engine makes of a dataset: micro-batches of this data parallel rank, in another order each epoch.

The order is a function of the seed and the epoch, the same on any number of ranks. The epoch goes up by itself each
time the loader is iterated, is part of a checkpoint, and can be set: `loader.sampler.set_epoch(epoch)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from mpu.groups import Group

Collate = Callable[[list[Any]], Any]


class EpochSampler(DistributedSampler[Any]):
    """Counts its own epochs; `epoch` is that of the next iteration."""

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.epoch += 1
        return order


def make_loader(samples: Dataset[Any], dp: Group, batch_size: int, seed: int, device: torch.device, *,
                collate_fn: Collate | None = None, shuffle: bool = True, sampler: Sampler[Any] | None = None,
                workers: int = 0, pin_memory: bool = True) -> DataLoader[Any]:
    """Each data parallel rank gets its share; where the shares would differ, samples are repeated."""
    own = sampler or EpochSampler(samples, dp.size, dp.rank, shuffle=shuffle, seed=seed)
    return DataLoader(samples, batch_size, sampler=own, collate_fn=collate_fn, num_workers=workers,
                      pin_memory=pin_memory and device.type == "cuda")


def next_epoch(loader: DataLoader[Any] | None) -> int | None:
    """The epoch that the next iteration is; None where the loader counts none."""
    sampler = None if loader is None else loader.sampler
    return sampler.epoch if isinstance(sampler, EpochSampler) else None


def go_to_epoch(loader: DataLoader[Any] | None, epoch: int | None) -> None:
    sampler = None if loader is None else loader.sampler
    if epoch is not None and isinstance(sampler, EpochSampler):
        sampler.set_epoch(epoch)
