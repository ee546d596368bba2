"""Together: calls of the public interface that every data parallel rank makes, at the same place of its program.

Where passes and steps come follows from the loop; a getter, a loan or a save comes where a script has it, and so may
come on one rank alone. Its exchange would then meet another one: numbers of something else, or an abort. So the ranks
say where they are before such a call's numbers travel. What does not fit is never computed with, and the log says to
the watch who is where.

The functions of utils.py and `GatheredParameters` are given parameters and nothing else: whose they are is noted here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import blake2b
from threading import Event
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.zero.exchanges import NO_ENTRY, CollectiveLog
from mpu.collectives import all_gather
from mpu.groups import Group

WATCHDOG_REPORT_SECONDS = 20.0
"""It names the places of all ranks sooner than that."""


class OwningEngine(Protocol):
    """The engine of a bucket, as far as it is needed here."""

    log: CollectiveLog

    def guard_state_change(self, what: str) -> AbstractContextManager[None]:
        """Weights, or states of the optimizer, are written to inside: what ends half way is no base to go on from."""

    def finish_delayed_update(self) -> None:
        """The weights are those of the last step. Collective."""

    def invalidate_communicated_states(self, bucket: object) -> None:
        """States of a bucket have changed otherwise than by a step. Every rank comes here, where parts are split."""

    def increment_weight_version(self) -> None:
        """Weights have changed otherwise than by a step: a backward of a forward before it is refused."""


_OWNING_ENGINES: WeakKeyDictionary[object, ref[OwningEngine]] = WeakKeyDictionary()


def register_owning_engine(bucket: object, engine: OwningEngine) -> None:
    _OWNING_ENGINES[bucket] = ref(engine)


def owning_engine(bucket: object) -> OwningEngine | None:
    found = _OWNING_ENGINES.get(bucket)
    return None if found is None else found()


def assert_collective_call(log: CollectiveLog,
                           group: Group,
                           call: str,
                           value: Tensor | None = None,
                           details: str = "") -> bool:
    """Every rank of `group` is at `where` when this returns, with the same `details`; True where all have the same
    `value`."""
    log.record_barrier(call)
    if group.is_solo:
        return True
    log.awaited_entry = log.entry_count - 1
    local_digests = torch.tensor(
        [_digest_int64(f"{call} {details}".encode()), 0 if value is None else _digest_int64(_value_bytes(value))])
    try:
        all_digests = all_gather(local_digests, group, dim=0).view(group.size, 2)
        if not bool((all_digests[:, 0] == local_digests[0]).all()):
            Event().wait(WATCHDOG_REPORT_SECONDS)
            raise ConfigError(f"the ranks do not do the same: this one is at {call}, another one is not; every data "
                              "parallel rank must make this call, at the same place")
    except RuntimeError as error:
        log.raise_root_cause(error)
        raise
    log.awaited_entry = NO_ENTRY
    return bool((all_digests[:, 1] == local_digests[1]).all())


def _value_bytes(value: Tensor) -> bytes:
    return value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()


def _digest_int64(data: bytes) -> int:
    """A digest, as an int64."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
