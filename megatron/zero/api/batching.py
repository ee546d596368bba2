"""How many samples a step has, and how many there have been; both may change between two steps.

Each rank sets its sizes by itself. A step compares them (settings.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.config.setting import require
from megatron.config.tree import Config
from megatron.zero.engine import ZeroEngine
from megatron.zero.precision import DTYPES


class Batching:
    """The batch sizes of one engine, and its count of samples."""

    def __init__(self, core: ZeroEngine, config: Config) -> None:
        self._core, self._dp = core, core.groups.dp.size
        core.micro_batch = self.micro = config.train.batch_size
        self.samples = 0
        """Of all optimizer steps, also of those with another batch size."""
        self._mid_step = self._was_set = False
        # Buffers for sums in fp32 are made with the engine.
        self._may_accumulate = (core.accumulation > 1 or config.precision.fp32_allreduce
                                or DTYPES[config.precision.name] == torch.float32)

    @property
    def total(self) -> int:
        return self.micro * self._core.accumulation * self._dp

    def after_step(self, ended: bool) -> None:
        """A call of `step`, which ended an optimizer step or did not."""
        self._mid_step = not ended
        self.samples += self.total if ended else 0

    def begin_step(self) -> None:
        """What has been accumulated was discarded."""
        self._mid_step = False

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"global_samples": self.samples, "train_batch_size": self.total if self._was_set else None}

    def restore(self, saved: Mapping[str, Any]) -> str | None:
        """Count on from a checkpoint's samples. The sizes are those of this run, its configuration and its calls; a
        note where the saved run had set another."""
        self.samples = saved.get("global_samples", self._core.global_steps * self.total)
        size = saved.get("train_batch_size")
        if size in (None, self.total):
            return None
        return (f"the checkpoint's run had called set_train_batch_size or set_train_micro_batch_size, and took {size} "
                f"samples a step; this one takes {self.total}: call it here as well to go on with {size}")

    def set_micro(self, size: int) -> None:
        self._check_between_steps("set_train_micro_batch_size")
        require(isinstance(size, int) and size >= 1, f"set_train_micro_batch_size: {size!r}; expected an integer >= 1")
        self._core.micro_batch = self.micro = size
        self._was_set = True

    def set_total(self, total: int) -> None:
        self._check_between_steps("set_train_batch_size")
        require(isinstance(total, int), f"set_train_batch_size: {total!r}; expected an integer")
        unit = self.micro * self._dp
        count, rest = divmod(total, unit)
        require(count >= 1 and rest == 0, f"set_train_batch_size: {total} is not a multiple of micro-batch "
                f"{self.micro} x data parallel {self._dp} = {unit}")
        require(count == 1 or self._may_accumulate, f"set_train_batch_size: {count} micro-batches need an fp32 sum of "
                "their gradients, which an engine has that starts with gradient_accumulation_steps above 1")
        self._core.accumulate(count)
        self._was_set = True

    def _check_between_steps(self, what: str) -> None:
        under_way = self._mid_step or self._core.has_gradients
        require(not under_way, f"{what}: a step is under way; call it after the last micro-batch of one")
