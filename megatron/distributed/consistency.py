"""Collective error handling: all ranks succeed or all raise the same error; values must be equal on all ranks.

One collective follows each action that can fail. Without it, a full disk on rank 3 would leave the other ranks in the
next collective until its timeout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
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

_SHARED_ERRORS: dict[str, type[Exception]] = {cls.__name__: cls for cls in (
    CheckpointError, ConfigError, RankOutOfMemory, NumericsError, PeerError, StorageError, DataError, UsageError,
    StorageFault, ParallelError)}
"""Error classes by name that ranks share: every class with an exit code in errors.exit_code."""


def all_succeed_or_raise(action: Callable[[], T], world: Group) -> T:
    """This rank's result of `action` if every rank succeeds; otherwise the error of the lowest failing rank, on every
    rank. Communicates one number, and on failure the message. Only errors with an exit code are shared; any other
    exception is a bug and ends the job with its traceback."""
    result, failure = _try_action(action)
    _raise_first_failure(int(all_reduce_scalar(world.size if failure is None else world.rank, world, "min")), failure,
                         world)
    return cast(T, result)


def _try_action(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(result, None), or (None, error) for the error classes that ranks share."""
    try:
        return action(), None
    except (TrainerError, DataError, StorageFault, ParallelError) as error:
        return None, error


def _raise_first_failure(first: int, failure: Exception | None, world: Group) -> None:
    """Raise the error of rank `first` on every rank (collective); `first` >= world.size means that no rank failed."""
    if first < world.size:
        report = None if failure is None else {"error": type(failure).__name__, "message": str(failure)}
        shared = broadcast_json(report, world, first)
        raise _SHARED_ERRORS.get(shared["error"], PeerError)(shared["message"]) from failure


def explain_out_of_memory(action: Callable[[], T], world: Group, doing: str) -> T:
    """The result of `action`. Turns out-of-memory errors into RankOutOfMemory, which `all_succeed_or_raise` shares."""
    try:
        return action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise RankOutOfMemory(
            f"rank {world.rank} is out of memory, while {doing}: {reason}; earlier checkpoints are untouched; free "
            "memory on its machine, or use a smaller --batch-size, and start the same command to resume") from error


def assert_equal_across_ranks(values: Mapping[str, Any], world: Group, problem: str) -> None:
    """Raise a ConfigError that begins with `problem` unless `values` are equal on all ranks. One reduction."""
    if per_rank := find_differences(values, world):
        raise ConfigError(mismatch_message([(each, [rank]) for rank, each in enumerate(per_rank)], problem))


def assert_same_arguments(call: str, arguments: Mapping[str, Any], world: Group) -> None:
    """Raise a ConfigError unless every rank calls `call` with equal `arguments`. Collective."""
    raise_if_arguments_differ(call, find_differences(arguments, world))


def raise_if_arguments_differ(call: str, arguments_by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ConfigError for a non-empty result of `find_differences`."""
    if arguments_by_rank:
        differences = describe_differences([(each, [rank]) for rank, each in enumerate(arguments_by_rank)])
        raise ConfigError(f"the ranks call {call} with different arguments: {differences}; nothing was done: give it "
                          "the same on every rank")


def find_differences(values: Mapping[str, Any], world: Group) -> list[dict[str, Any]]:
    """Every rank's `values` if they differ, else []. Collective: one min-reduction if they are equal."""
    return find_differences_in_each([values], world)[0]


def find_differences_in_each(value_sets: Sequence[Mapping[str, Any]], world: Group,
                             check: Callable[[], object] = lambda: None) -> list[list[dict[str, Any]]]:
    """`find_differences` for each set of values, after `check`, whose error is shared. One collective if the values are
    equal and `check` succeeds: min(d) == -min(-d) iff all digests d agree."""
    _, failure = _try_action(check)
    texts = [json.dumps(values, sort_keys=True, default=str) for values in value_sets]
    digests = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) for text in texts]  # float64 holds them
    first, *minima = all_reduce_scalars([world.size if failure is None else world.rank,
                                         *digests, *(-digest for digest in digests)], world, "min")
    _raise_first_failure(int(first), failure, world)
    return [[] if smallest == -negated else all_gather_json(json.loads(text), world)
            for text, smallest, negated in zip(texts, minima[:len(texts)], minima[len(texts):], strict=True)]


def on_rank_0(action: Callable[[], Any], world: Group) -> Any:
    """Run `action` on rank 0 only; returns its JSON value, or raises its error, on every rank."""
    return broadcast_json(all_succeed_or_raise(action if world.rank == 0 else lambda: None, world), world)


def sum_over_ranks(count: int, world: Group) -> int:
    """The sum over the ranks of a count below 2**53."""
    return int(all_reduce_scalar(count, world, "sum"))
