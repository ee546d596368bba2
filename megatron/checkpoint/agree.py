"""All ranks succeed, or all raise the same error: one collective after each step that can fail.

Without it a full disk on rank 3 would leave the others waiting in the next collective until its time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from data.storage import DataError, StorageFault, UsageError
from megatron.errors import CheckpointError, ConfigError, NumericsError, PeerError, StorageError, TrainerError
from mpu.collectives import agree as reduce_number
from mpu.collectives import broadcast_json
from mpu.groups import Group
from mpu.split import ParallelError

T = TypeVar("T")

_FAMILY: dict[str, type[Exception]] = {cls.__name__: cls for cls in (
    CheckpointError, ConfigError, NumericsError, PeerError, StorageError, DataError, UsageError, StorageFault,
    ParallelError)}
"""Of this package, and of the two that must not import it: all that `errors.exit_code` has a code for."""


def agree(action: Callable[[], T], world: Group) -> T:
    """This rank's result of `action` if every rank succeeds; otherwise the first failing rank's error, on every rank.

    One number travels; where a rank failed, its message as well. Only errors that have an exit code are shared.
    Anything else is a bug: it ends this rank with its traceback, and so the job.
    """
    failure: Exception | None = None
    try:
        result = action()
    except (TrainerError, DataError, StorageFault, ParallelError) as error:
        failure = error
    first = int(reduce_number(world.size if failure is None else world.rank, world, "min"))
    if first < world.size:
        report = None if failure is None else {"error": type(failure).__name__, "message": str(failure)}
        said = broadcast_json(report, world, first)
        raise _FAMILY.get(said["error"], PeerError)(said["message"]) from failure
    return result


def on_rank_0(action: Callable[[], Any], world: Group) -> Any:
    """`action` on rank 0 alone; its JSON value, or its error, on every rank."""
    return broadcast_json(agree(action if world.rank == 0 else _nothing, world), world)


def total(count: int, world: Group) -> int:
    """The sum over the ranks of a count below 2**53."""
    return int(reduce_number(count, world, "sum"))


def _nothing() -> None:
    """What the other ranks do."""
