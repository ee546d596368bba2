"""Batch sizes of an engine, its sample counter, and the data loader it builds from a dataset.

Batch sizes may change between two steps; each rank sets its own, and the step compares them. The loader yields
micro-batches of this data-parallel rank. The order of an epoch depends on the seed and the epoch only, not on the
number of ranks. An epoch ends when a loop that took optimizer steps reaches its end; a loop without steps, or one left
early, repeats the same order. A checkpoint stores the epoch and resumes from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megatron.config.schema import require
from megatron.config.tree import Config
from megatron.zero.engine import ZeroEngine
from megatron.zero.flat_buffers import DTYPES


class BatchSizes:
    """The batch sizes of one engine, and its sample counter."""

    def __init__(self, core: ZeroEngine, config: Config) -> None:
        self._core, self._dp = core, core.groups.dp.size
        self._configured_size = config.global_batch_size(self._dp)
        core.micro_batch = self.micro_batch_size = config.train.batch_size
        self.consumed_samples = 0
        """Of all optimizer steps, whatever their batch size."""
        # fp32 accumulation buffers can only be allocated with the engine
        self._can_accumulate = (core.accumulation_steps > 1 or config.precision.fp32_allreduce
                                or DTYPES[config.precision.name] == torch.float32)

    @property
    def train_batch_size(self) -> int:
        return self.micro_batch_size * self._core.accumulation_steps * self._dp

    def state_dict(self) -> dict[str, Any]:
        size = self.train_batch_size
        return {"global_samples": self.consumed_samples,
                "train_batch_size": None if size == self._configured_size else size}

    def restore(self, saved: Mapping[str, Any]) -> str | None:
        """Restore the sample counter. The batch sizes stay those of this run; a note if the saved run had changed its
        own."""
        self.consumed_samples = saved.get("global_samples", self._core.global_steps * self.train_batch_size)
        size = saved.get("train_batch_size")
        if size in (None, self.train_batch_size):
            return None
        return (f"the checkpoint's run had called set_train_batch_size or set_train_micro_batch_size, and took {size} "
                f"samples a step; this one takes {self.train_batch_size}: call it here as well to go on with {size}")

    def set_micro_batch_size(self, size: int) -> None:
        self._check_between_steps("set_train_micro_batch_size")
        require(isinstance(size, int) and size >= 1, f"set_train_micro_batch_size: {size!r}; expected an integer >= 1")
        self._core.micro_batch = self.micro_batch_size = size

    def set_train_batch_size(self, total: int) -> None:
        self._check_between_steps("set_train_batch_size")
        require(isinstance(total, int), f"set_train_batch_size: {total!r}; expected an integer")
        unit = self.micro_batch_size * self._dp
        count, rest = divmod(total, unit)
        require(count >= 1 and rest == 0, f"set_train_batch_size: {total} is not a multiple of micro-batch "
                f"{self.micro_batch_size} x data parallel {self._dp} = {unit}")
        require(count == 1 or self._can_accumulate, f"set_train_batch_size: {count} micro-batches need an fp32 sum of "
                "their gradients, which an engine has that starts with gradient_accumulation_steps above 1")
        self._core.set_accumulation_steps(count)

    def _check_between_steps(self, call: str) -> None:
        require(not self._core.has_gradients,
                f"{call}: a step is under way; call it after the last micro-batch of one")


class EpochDataLoader(DataLoader[Any]):
    """Advances to the next epoch by itself. `count_steps` returns the optimizer's step calls: an epoch without any
    (evaluation) repeats."""

    def __init__(self, samples: Dataset[Any], sampler: DistributedSampler[Any], count_steps: Callable[[], int],
                 **options: Any) -> None:
        super().__init__(samples, sampler=sampler, **options)
        self._epoch_sampler, self._count_steps = sampler, count_steps
        self._ended_at_step: int | None = None
        """Step count when the epoch's last batch was yielded; None if the iteration is not there."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, begun_at = self._epoch_sampler.epoch, self._count_steps()
        for number, batch in enumerate(super().__iter__(), 1):
            self._ended_at_step = self._count_steps() if number == len(self) else None
            yield batch
        if self._count_steps() != begun_at and self._epoch_sampler.epoch == epoch:
            self.set_epoch(epoch + 1)

    def epoch_to_resume(self) -> int:
        """The epoch in which a run resumed from here begins."""
        is_over = self._ended_at_step is not None and self._count_steps() != self._ended_at_step
        return self._epoch_sampler.epoch + is_over

    def set_epoch(self, epoch: int) -> None:
        self._epoch_sampler.set_epoch(epoch)
        self._ended_at_step = None
