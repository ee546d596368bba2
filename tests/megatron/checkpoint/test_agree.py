"""What fails on one rank alone is the same error, with the same exit code, on all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from data.storage import DataError, StorageFault, UsageError
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import (CODES_BY_NAME, CheckpointError, ConfigError, NumericsError, RankOutOfMemory, StorageError,
                             TrainerError, exit_code)
from mpu import groups as mpu_groups
from mpu.split import ParallelError
from tests.distributed import RankError, run_ranks
from tests.megatron.helpers import TINY, train, write_corpus

KINDS: list[type[Exception]] = [CheckpointError, ConfigError, DataError, RankOutOfMemory, NumericsError, ParallelError,
                                StorageError, StorageFault, UsageError]


def raised(action: Callable[[], object]) -> tuple[str, str, int | None]:
    try:
        action()
    except (TrainerError, DataError, StorageFault, ParallelError) as error:
        return type(error).__name__, str(error), exit_code(error)
    return "", "", None


def fails(rank: int, kind: type[Exception]) -> int:
    if rank != 0:
        raise kind(f"rank {rank} cannot")
    return rank


def every_kind(rank: int, world: int) -> list[tuple[str, str, int | None]]:
    group = mpu_groups.build(1).world
    return [raised(partial(all_succeed_or_raise, partial(fails, rank, kind), group)) for kind in KINDS]


def test_every_error_that_has_an_exit_code_is_the_first_failing_ranks_on_all() -> None:
    assert CODES_BY_NAME.keys() <= {kind.__name__ for kind in KINDS}
    expected = [(kind.__name__, "rank 1 cannot", exit_code(kind())) for kind in KINDS]
    assert run_ranks(every_kind, 3) == [expected] * 3


def a_bug(rank: int, world: int) -> None:
    all_succeed_or_raise(partial(fails, rank, KeyError), mpu_groups.build(1).world)


def test_a_bug_is_shared_with_nobody() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_ranks(a_bug, 2)
    assert isinstance(caught.value.error, KeyError)


def training(rank: int, world: int, corpora: list[Path]) -> tuple[str, str, int | None]:
    return raised(lambda: train([*TINY, "--train-data", corpora[rank], "--train-iters", 1]))


def test_a_corpus_that_is_damaged_on_one_rank_ends_training_on_all(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        write_corpus(tmp_path / name)
    index = tmp_path / "bad.idx"
    index.write_bytes(index.read_bytes()[:-8])
    found = run_ranks(training, 2, [tmp_path / "good", tmp_path / "bad"])
    assert found == [found[0]] * 2 and found[0][0] == "DataError" and found[0][2] == 3 and str(index) in found[0][1]
