"""The loader an engine makes of a dataset: micro-batches of this data parallel rank, in another order each epoch.

The order is a function of the seed and the epoch, the same on any number of ranks. An epoch is over when its batches
have been used up, or when it was trained on and left: looking at a batch (`next(iter(loader))`) changes nothing, on
whichever rank. The epoch is part of a checkpoint; one saved in the middle of an epoch goes on with the order of that
epoch, from its start. It can be set: `loader.sampler.set_epoch(epoch)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from mpu.groups import Group

Collate = Callable[[list[Any]], Any]


@dataclass(eq=False)
class Pass:
    """One iteration over the loader."""

    epoch: int
    handed_out: int = 0
    steps: int = 0
    """Those there were when the last batch was handed out."""


class EpochLoader(DataLoader[Any]):
    """Goes to the next epoch by itself. `steps` counts the calls of `step`: it tells training from looking."""

    def __init__(self, samples: Dataset[Any], sampler: DistributedSampler[Any], steps: Callable[[], int],
                 **options: Any) -> None:
        super().__init__(samples, sampler=sampler, **options)
        self._order, self._steps = sampler, steps
        self._latest: Pass | None = None
        self._trained_on: Pass | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._trained_on is not None:  # while an epoch is trained on, other iterations are looks
            yield from super().__iter__()
            return
        own = Pass(self._order.epoch)
        try:
            for batch in super().__iter__():
                self._latest, own.handed_out, own.steps = own, own.handed_out + 1, self._steps()
                yield batch
                self._account(own)
        finally:
            self._account(own)  # also where the loop is left
            if self._latest is own:
                self._latest = None
            if self._trained_on is own:
                self._trained_on = None

    def _account(self, own: Pass) -> None:
        """Steps since a batch was handed out were on that batch: the epoch is used up, the next iteration is another's.
        """
        if own.handed_out and self._steps() != own.steps and self._order.epoch in (own.epoch, own.epoch + 1):
            self._order.set_epoch(own.epoch + 1)
            self._trained_on = self._trained_on or own

    def next_epoch(self) -> int:
        """The one that a run goes on with from here: the one under way, unless all of it was used."""
        if self._latest is not None:
            self._account(self._latest)
        under_way = self._trained_on
        return under_way.epoch if under_way and under_way.handed_out < len(self) else self._order.epoch

    def go_to_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch."""
        self._order.set_epoch(epoch)
        self._latest = self._trained_on = None


def make_loader(samples: Dataset[Any], dp: Group, batch_size: int, seed: int, device: torch.device, *,
                steps: Callable[[], int], collate_fn: Collate | None = None, shuffle: bool = True,
                sampler: Sampler[Any] | None = None, workers: int = 0, pin_memory: bool = True) -> DataLoader[Any]:
    """Each data parallel rank gets its share; where the shares would differ, samples are repeated. A `sampler` of the
    caller's own decides for itself."""
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "num_workers": workers,
                               "pin_memory": pin_memory and device.type == "cuda"}
    if sampler is not None:
        return DataLoader(samples, sampler=sampler, **options)
    order: DistributedSampler[Any] = DistributedSampler(samples, dp.size, dp.rank, shuffle=shuffle, seed=seed)
    return EpochLoader(samples, order, steps, **options)
