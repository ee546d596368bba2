"""The loader an engine makes of a dataset: micro-batches of this data parallel rank, in another order each epoch.

The order is a function of the seed and the epoch, the same on any number of ranks. An epoch is over when a loop with
steps in it has come to its end: looking at batches changes nothing, on whichever rank, and a loop that is left early
begins the same order again. The epoch is part of a checkpoint; one saved in the middle of an epoch continues with the
order of that epoch, from its start. It can be set: `loader.sampler.set_epoch(epoch)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from mpu.groups import Group

Collate = Callable[[list[Any]], Any]


class EpochLoader(DataLoader[Any]):
    """Goes to the next epoch by itself. `steps` counts the calls of `step`: it distinguishes training from looking."""

    def __init__(self, samples: Dataset[Any], sampler: DistributedSampler[Any], steps: Callable[[], int],
                 **options: Any) -> None:
        super().__init__(samples, sampler=sampler, **options)
        self._order, self._steps = sampler, steps
        self._ended_at: int | None = None
        """The steps there were when the epoch's last batch was handed out, where that was the last thing to happen."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, begun_at = self._order.epoch, self._steps()
        for number, batch in enumerate(super().__iter__(), 1):
            self._ended_at = self._steps() if number == len(self) else None
            yield batch
        if self._steps() != begun_at and self._order.epoch == epoch:
            self.go_to_epoch(epoch + 1)

    def next_epoch(self) -> int:
        """The one that a run continues with from here."""
        is_over = self._ended_at is not None and self._steps() != self._ended_at
        return self._order.epoch + is_over

    def go_to_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch."""
        self._order.set_epoch(epoch)
        self._ended_at = None


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
