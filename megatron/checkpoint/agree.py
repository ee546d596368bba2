"""All ranks succeed, or all raise the same error: one collective after each step that can fail.

Without it a full disk on rank 3 would leave the others waiting in the next collective until its time-out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from data.storage import DataError, StorageFault, UsageError
from megatron.checkpoint.signature import FLAG, Key, read_key
from megatron.errors import (CheckpointError, ConfigError, MemoryLack, NumericsError, PeerError, StorageError,
                             TrainerError)
from megatron.launch.alike import difference
from megatron.launch.exits import is_lack_of_memory
from megatron.ranges import differences
from mpu.collectives import agree as reduce_number
from mpu.collectives import all_gather_json, broadcast_json
from mpu.groups import Group
from mpu.split import ParallelError

T = TypeVar("T")

_FAMILY: dict[str, type[Exception]] = {cls.__name__: cls for cls in (
    CheckpointError, ConfigError, MemoryLack, NumericsError, PeerError, StorageError, DataError, UsageError,
    StorageFault, ParallelError)}
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


def with_memory(action: Callable[[], T], world: Group, doing: str) -> T:
    """The result of `action`; lack of memory in it is an error that ranks agree on, as `agree` does not share it."""
    try:
        return action()
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise MemoryLack(f"rank {world.rank} is out of memory, while {doing}: {reason}; earlier checkpoints are "
                         "untouched; free memory on its machine, or use a smaller --batch-size, and start the same "
                         "command to resume") from error


def alike(facts: Mapping[str, Any], world: Group, what: str) -> None:
    """Every rank has these facts, or each raises a ConfigError that names where they differ: `what` is so. One number
    travels where all is well."""
    if told := unlike(facts, world):
        raise ConfigError(difference([(found, [rank]) for rank, found in enumerate(told)], what))


def called_alike(call: str, facts: Mapping[str, Any], world: Group) -> None:
    """The same of a call that every rank makes, with these arguments."""
    if told := unlike(facts, world):
        found = differences([(each, [rank]) for rank, each in enumerate(told)])
        raise ConfigError(f"the ranks call {call} with different arguments: {found}; nothing was done: give it the "
                          "same on every rank")


def unlike(facts: Mapping[str, Any], world: Group) -> list[dict[str, Any]]:
    """Those of every rank, where they differ; nothing where all are alike."""
    text = json.dumps(facts, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])  # a float of 64 bits holds it
    if reduce_number(number, world, "min") == reduce_number(number, world, "max"):
        return []
    return all_gather_json(json.loads(text), world)


def same_key(path: str | None, world: Group) -> Key | None:
    """What checkpoints are signed with, the same on all ranks, which may have its file each in a place of its own."""
    if path is None:
        return None
    key = agree(lambda: read_key(path), world)
    assert key is not None
    alike({f"content of {FLAG}": key.mark}, world, "the ranks would sign checkpoints with different keys")
    return key


def on_rank_0(action: Callable[[], Any], world: Group) -> Any:
    """`action` on rank 0 alone; its JSON value, or its error, on every rank."""
    return broadcast_json(agree(action if world.rank == 0 else _nothing, world), world)


def total(count: int, world: Group) -> int:
    """The sum over the ranks of a count below 2**53."""
    return int(reduce_number(count, world, "sum"))


def _nothing() -> None:
    """What the other ranks do."""
