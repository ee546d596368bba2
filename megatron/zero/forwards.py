"""Whether the ranks ran the same blocks in a forward that no step follows.

A step's verdict says so of everything since the last one. A forward without gradients (an evaluation) may be all that
a program does: at its end the ranks compare what they gathered. On an accelerator the host learns of it at the end of
the next such forward, or where it waits anyway.
"""

from __future__ import annotations

import torch

from megatron.errors import ConfigError
from megatron.zero.exchanges import (NO_ENTRY, CollectiveLog, CollectiveLogSnapshot, describe_positions,
                                     divergence_positions)
from megatron.zero.verdict import HostScalars, scalars_on_device
from mpu.collectives import all_gather_json, all_reduce_into
from mpu.device import on_accelerator
from mpu.groups import Group


class NoGradForwardChecker:
    def __init__(self, dp: Group, device: torch.device, log: CollectiveLog) -> None:
        self._dp, self._device, self._log = dp, device, log
        self._pending: HostScalars | None = None

    def __call__(self, gather_digest: int) -> None:
        """A forward is over that has made the digest `trace`."""
        self.raise_if_diverged()
        self._log.purpose = ""
        self._log.awaited_entry = self._log.record_collective("the end of a forward without gradients")
        numbers = scalars_on_device(self._device, (gather_digest, gather_digest * gather_digest))
        all_reduce_into(numbers, self._dp).wait()
        self._log.awaited_entry = NO_ENTRY
        self._pending = HostScalars(numbers)
        if not on_accelerator(self._device):
            self.raise_if_diverged()

    def raise_if_diverged(self) -> None:
        """Raise where the ranks of the last check differed. All of them come here."""
        numbers, self._pending = self._pending, None
        if numbers is None:
            return
        traces, squares = numbers.values()
        if squares * self._dp.size != traces * traces:
            raise diverged_blocks_error(self._log, self._dp)


def diverged_blocks_error(log: CollectiveLog, ranks: Group) -> ConfigError:
    """What to say of ranks whose digests differ. Collective."""
    packed = all_gather_json(log.snapshot(ranks.rank).pack(), ranks)
    where = describe_positions(divergence_positions([CollectiveLogSnapshot.unpack(one) for one in packed]))
    return ConfigError(
        "the ranks ran different blocks of the model, or in another order, and have received each other's "
        f"parameters{where and f' ({where})'}: at ZeRO stage 3 what is random in the forward (layer drop) must be "
        "drawn alike on every data parallel rank; draw it alike, or use stage 2. Or a backward failed on some ranks "
        "only, and they went on without it: end the run then, and resume it from the last checkpoint")
