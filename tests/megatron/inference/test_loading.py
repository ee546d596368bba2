"""Data parallel ranks hold the same weights, which one of them has read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.cli import main as checkpoint
from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint
from megatron.checkpoint.reader import Checkpoint
from megatron.errors import CheckpointError
from megatron.inference import load
from megatron.inference.int8 import Int8
from mpu import groups as mpu_groups
from mpu.groups import Groups
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, train

CPU = torch.device("cpu")
CELLS = [("run", "fp32"), ("run", "bf16"), ("run", "fp16"), ("run", "int8"), ("int8", "int8"), ("hf", "fp32")]
"""Folder and precision."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the same as int8, and as a Hugging Face folder."""
    made = tmp_path_factory.mktemp("loading")
    train([*TINY, "--mock-data", "--train-iters", 2, "--save", made / "run"])
    assert checkpoint(["convert", str(made / "run"), "--dtype", "int8", "--output", str(made / "int8")]) == 0
    assert checkpoint(["convert", str(made / "run"), "--output", str(made / "hf")]) == 0
    return made


def build(folder: Path, cell: tuple[str, str], groups: Groups) -> dict[str, list[Tensor]]:
    """The bits of the weights, by name."""
    name, dtype = cell
    found = (load.open_hf_folder if name == "hf" else load.open_run_checkpoint)(str(folder / name), groups)
    model = load.build_model(found, groups, load.DTYPES[dtype], CPU, torch.float32)
    return {name: [part.data.levels, part.data.scale] if isinstance(part.data, Int8) else [part.data]
            for name, part in model.named_parameters()}


def reads(rank: int, world: int, folder: Path, tp: int) -> list[tuple[dict[str, list[Tensor]], int]]:
    """The weights of each cell, and how often this rank read; what is sent is cut in the middle of a matrix."""
    groups, found, count = mpu_groups.build(tp), [], [0]

    def counting(kind: type[Any]) -> Any:
        real = kind.read

        def read(*args: Any, **kwargs: Any) -> None:
            count[0] += 1
            real(*args, **kwargs)
        return patch.object(kind, "read", read)

    for cell in CELLS:
        with counting(Checkpoint), counting(ExternalCheckpoint), patch.object(load, "BROADCAST_ELEMENTS", 1000):
            found.append((build(folder, cell, groups), count[0]))
        count[0] = 0
    return found


def same(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        len(parts) == len(other[name]) and all(map(torch.equal, parts, other[name])) for name, parts in one.items())


@pytest.mark.parametrize(("world", "tp"), [(3, 1), (4, 2)])
def test_one_of_the_ranks_reads_and_all_have_its_bits(folder: Path, world: int, tp: int) -> None:
    ranks = run_ranks(reads, world, folder, tp)
    expected = run_ranks(reads, tp, folder, tp)
    for rank, found in enumerate(ranks):
        for (weights, count), (alone, all_of_it) in zip(found, expected[rank % tp], strict=True):
            assert same(weights, alone)
            assert count == (all_of_it if rank < tp else 0) and all_of_it > 0


def fails(rank: int, world: int, folder: Path, tp: int, culprit: int, dtype: str) -> str:
    groups, real, calls = mpu_groups.build(tp), Checkpoint.read, [0]

    def read(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if rank == culprit and calls[0] == 5:
            raise CheckpointError(f"rank {rank} cannot read")
        real(*args, **kwargs)

    with patch.object(Checkpoint, "read", read), pytest.raises(CheckpointError) as caught:
        build(folder, ("run", dtype), groups)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_what_the_reader_cannot_read_is_an_error_of_all(folder: Path, culprit: int, dtype: str) -> None:
    found: Sequence[str] = run_ranks(fails, 4, folder, 2, culprit, dtype)
    assert found == [f"rank {culprit} cannot read"] * 4
