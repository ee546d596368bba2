"""What a rank does to start, save, open and resume does not grow with the number of ranks. Counts, not times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.megatron.checkpoint import scale

SMALL = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, scale.Cost]]:
    return phases(tmp_path_factory.mktemp("small"), SMALL)


def phases(root: Path, size: int) -> list[dict[int, scale.Cost]]:
    saved = scale.save(root, size, 1)
    opened, resumed, _ = scale.open_and_read(root, size)
    return [saved, opened, resumed]


@pytest.mark.parametrize("size", [64, pytest.param(512, marks=pytest.mark.slow),
                                  pytest.param(4096, marks=pytest.mark.slow)])
def test_no_phase_grows_with_the_world(size: int, tmp_path: Path, reference: list[dict[int, scale.Cost]]) -> None:
    for what, few, many in zip(("save", "open", "resume"), reference, phases(tmp_path, size), strict=True):
        for before, now in ((few[0], many[0]), (few[SMALL // 2], many[size // 2])):
            place = "rank 0" if before is few[0] else "another"
            assert now.calls == before.calls, (what, place, now.calls - before.calls, before.calls - now.calls)
            assert now.told <= before.told + 64, (what, place)  # a path, a number more
    assert len(os.listdir(tmp_path / "global_step1")) > size  # which rank 0 alone has listed


@pytest.mark.parametrize("size", [16, 4096])
def test_a_rank_draws_what_it_keeps(size: int) -> None:
    cost = scale.start(size)
    assert cost.drawn <= cost.kept


def test_a_micro_batch_is_as_much_work_for_the_host_however_many_ranks_there_are() -> None:
    assert scale.schedule(2)[0] == scale.schedule(4096)[0]
