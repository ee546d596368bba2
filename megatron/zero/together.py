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
from megatron.zero.exchanges import NOTHING, ExchangeLog
from mpu.collectives import all_gather
from mpu.groups import Group

SECONDS_OF_THE_WATCH = 20.0
"""It names the places of all ranks sooner than that."""


class Owner(Protocol):
    """The engine of a bucket, as far as it is needed here."""

    log: ExchangeLog

    def change(self, what: str) -> AbstractContextManager[None]:
        """Weights, or states of the optimizer, are written to inside: what ends half way is no base to go on from."""

    def finish_update(self) -> None:
        """The weights are those of the last step. Collective."""

    def count_new_states(self, bucket: object) -> None:
        """States of a bucket have changed otherwise than by a step. Every rank comes here, where parts are split."""

    def count_new_weights(self) -> None:
        """Weights have changed otherwise than by a step: a backward of a forward before it is refused."""


_OWNERS: WeakKeyDictionary[object, ref[Owner]] = WeakKeyDictionary()


def own(bucket: object, engine: Owner) -> None:
    _OWNERS[bucket] = ref(engine)


def owner_of(bucket: object) -> Owner | None:
    found = _OWNERS.get(bucket)
    return None if found is None else found()


def meet(log: ExchangeLog, group: Group, where: str, value: Tensor | None = None, details: str = "") -> bool:
    """Every rank of `group` is at `where` when this returns, with the same `details`; True where all have the same
    `value`."""
    log.meet(where)
    if group.is_solo:
        return True
    log.entry_awaited = log.count - 1
    mine = torch.tensor([_number(f"{where} {details}".encode()), 0 if value is None else _number(_bytes(value))])
    try:
        all_of_them = all_gather(mine, group, dim=0).view(group.size, 2)
        if not bool((all_of_them[:, 0] == mine[0]).all()):
            Event().wait(SECONDS_OF_THE_WATCH)
            raise ConfigError(f"the ranks do not do the same: this one is at {where}, another one is not; every data "
                              "parallel rank must make this call, at the same place")
    except RuntimeError as error:
        log.explain(error)
        raise
    log.entry_awaited = NOTHING
    return bool((all_of_them[:, 1] == mine[1]).all())


def _bytes(value: Tensor) -> bytes:
    return value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()


def _number(data: bytes) -> int:
    """A digest, as an int64."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
