"""Collective error handling: all ranks succeed or all raise the same error; values must be equal on all ranks.

One collective follows each action that can fail. Without it, a full disk on rank 3 would leave the other ranks in the
next collective until its timeout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from data.storage import DataError, StorageFault, UsageError
from megatron.distributed.exit_codes import is_out_of_memory
from megatron.distributed.preflight import mismatch_message
from megatron.distributed.rank_text import describe_differences
from megatron.errors import (CheckpointError, ConfigError, NumericsError, PeerError, RankOutOfMemory, StorageError,
                             TrainerError)
from mpu.collectives import all_gather_json, all_reduce_scalar, all_reduce_scalars, broadcast_json
from mpu.groups import Group
from mpu.split import ParallelError

T = TypeVar("T")

# Error classes by name that ranks share; an error of a subclass is shared as its base class.
_SHARED_ERRORS: dict[str, type[Exception]] = {cls.__name__: cls for cls in (
    CheckpointError, ConfigError, RankOutOfMemory, NumericsError, PeerError, StorageError, DataError, UsageError,
    StorageFault, ParallelError)}
_SHARED_KINDS = (TrainerError, DataError, StorageFault, ParallelError)  # their base classes


def all_succeed_or_raise(action: Callable[[], T], world: Group) -> T:
    """This rank's result of `action` if every rank succeeds; otherwise the error of the lowest failing rank, on every
    rank. Communicates one number, and on failure the message. Only errors with an exit code are shared; any other
    exception is a bug and ends the job with its traceback."""
    result, failure = None, None
    try:
        result = action()
    except _SHARED_KINDS as error:
        failure = error
    _raise_first_failure(all_reduce_scalar(world.size if failure is None else world.rank, world, "min"), failure, world)
    return cast(T, result)


def _raise_first_failure(first: float, failure: Exception | None, world: Group) -> None:
    """Raise the error of rank `first` on every rank (collective); `first` is world.size if every rank has succeeded."""
    if first < world.size:
        name = next((cls.__name__ for cls in type(failure).__mro__ if cls.__name__ in _SHARED_ERRORS), "PeerError")
        shared = broadcast_json({"error": name, "message": str(failure)}, world, int(first))
        raise _SHARED_ERRORS[shared["error"]](shared["message"]) from failure


def on_rank_0(action: Callable[[], Any], world: Group) -> Any:
    """Run `action` on rank 0 only; returns its JSON value, or raises its error, on every rank."""
    return broadcast_json(all_succeed_or_raise(action if world.rank == 0 else lambda: None, world), world)


def sum_over_ranks(count: int, world: Group) -> int:
    """The sum over the ranks of a count below 2**53."""
    return int(all_reduce_scalar(count, world, "sum"))


def find_differences(values: Mapping[str, Any], world: Group, check: Callable[[], object] = lambda: None
                     ) -> list[dict[str, Any]]:
    """Every rank's `values` if they differ, else [], after `check`, whose error is shared. Collective: one reduction if
    the values are equal and `check` succeeds."""
    failure = None
    try:
        check()
    except _SHARED_KINDS as error:
        failure = error
    text = json.dumps(values, sort_keys=True, default=str)
    # 6 bytes, since the reduction is in float64. All digests are equal if the smallest is the largest, -min(-digest).
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])
    first, smallest, negated_largest = all_reduce_scalars(
        [world.size if failure is None else world.rank, digest, -digest], world, "min")
    _raise_first_failure(first, failure, world)
    return [] if smallest == -negated_largest else all_gather_json(json.loads(text), world)


def assert_equal_across_ranks(values: Mapping[str, Any], world: Group, problem: str) -> None:
    """Raise a ConfigError that begins with `problem` unless `values` are equal on all ranks. One reduction."""
    if per_rank := find_differences(values, world):
        raise ConfigError(mismatch_message([(each, [rank]) for rank, each in enumerate(per_rank)], problem))


def assert_same_arguments(call: str, arguments: Mapping[str, Any], world: Group,
                          check: Callable[[], object] = lambda: None, may_differ: str = "") -> list[dict[str, Any]]:
    """Raise a ConfigError unless every rank calls `call` with equal `arguments`, but for the one named `may_differ`.
    Returns every rank's arguments if that one differs, else []. Collective, as `find_differences`."""
    per_rank = find_differences(arguments, world, check)
    if not per_rank:
        return []
    must_be_equal = [({name: value for name, value in each.items() if name != may_differ}, [rank])
                     for rank, each in enumerate(per_rank)]
    if differences := describe_differences(must_be_equal):
        raise ConfigError(f"the ranks call {call} with different arguments: {differences}; nothing was done: give it "
                          "the same on every rank")
    return per_rank


@contextmanager
def explain_out_of_memory(world: Group, doing: str) -> Iterator[None]:
    """Turn out-of-memory errors in the block into RankOutOfMemory, which `all_succeed_or_raise` shares."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise RankOutOfMemory(
            f"rank {world.rank} is out of memory, while {doing}: {reason}; earlier checkpoints are untouched; free "
            "memory on its machine, or use a smaller --batch-size, and start the same command to resume") from error
