"""Data parallel ranks hold the same weights, which one of them has read; a run that was quantised in training is loaded
with the weights it had at work, and as int8 with their own levels.
"""

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
from megatron.model.gpt2 import GPT2
from megatron.zero.api.full_state_dict import gather_full_state_dict
from mpu import groups as mpu_groups, groups
from mpu.groups import Groups
from mpu.partition import join_local_slices, partition_of
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, tiny_model, train
from tests.megatron.train.test_quantise import engine_for

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
        real = kind.read_slice

        def read(*args: Any, **kwargs: Any) -> None:
            count[0] += 1
            real(*args, **kwargs)
        return patch.object(kind, "read_slice", read)

    for cell in CELLS:
        with counting(Checkpoint), counting(ExternalCheckpoint), patch.object(load, "BROADCAST_ELEMENTS", 1000):
            found.append((build(folder, cell, groups), count[0]))
        count[0] = 0
    return found


def same(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        len(parts) == len(other[name]) and all(map(torch.equal, parts, other[name])) for name, parts in one.items())


def test_one_of_the_ranks_reads_and_all_have_its_bits(folder: Path) -> None:
    world, tp = 4, 2
    ranks = run_ranks(reads, world, folder, tp)
    expected = run_ranks(reads, tp, folder, tp)
    for rank, found in enumerate(ranks):
        for (weights, count), (alone, all_of_it) in zip(found, expected[rank % tp], strict=True):
            assert same(weights, alone)
            assert count == (all_of_it if rank < tp else 0) and all_of_it > 0


def fails(rank: int, world: int, folder: Path, tp: int, culprit: int, dtype: str) -> str:
    groups, real, calls = mpu_groups.build(tp), Checkpoint.read_slice, [0]

    def read(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if rank == culprit and calls[0] == 5:
            raise CheckpointError(f"rank {rank} cannot read")
        real(*args, **kwargs)

    with patch.object(Checkpoint, "read_slice", read), pytest.raises(CheckpointError) as caught:
        build(folder, ("run", dtype), groups)
    return str(caught.value)


def test_what_the_reader_cannot_read_is_an_error_of_all(folder: Path) -> None:
    found: Sequence[str] = run_ranks(fails, 4, folder, 2, 1, "int8")
    assert found == ["rank 1 cannot read"] * 4


FROZEN = ["wpe.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc.weight"]
RUNS: dict[str, dict[str, Any]] = {
    "8 bits": dict(quantize_start_bits=8),
    "8 bits with noise, bf16": dict(quantize_start_bits=8, quantize_rounding="stochastic", bf16=True),
    "ternary": dict(quantize_start_bits=2, quantize_target_bits=2),
    "binary": dict(quantize_start_bits=1, quantize_target_bits=1),
    "binary, but for what is frozen": dict(quantize_start_bits=1, quantize_target_bits=1, bf16=True, frozen=FROZEN),
    "asymmetric": dict(quantize_start_bits=4, quantize_target_bits=4, quantize_type="asymmetric"),
}


def trained(folder: Path, **values: Any) -> dict[str, Tensor]:
    """A checkpoint of a few steps, and the weights at work then."""
    engine = engine_for(**values)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(257, (2, 17), generator=draw)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:], grad_scale=engine.backward_scale))
        engine.step()
    engine.save_checkpoint(folder)
    return gather_full_state_dict(engine.core)


def loaded(rank: int, world: int, folder: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The logical tensors; of int8 matrices levels and scales."""
    grid = groups.build(world)
    model = load.build_model(load.open_run_checkpoint(folder, grid), grid, dtype, CPU, torch.float32)
    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Int8):
            found[name], found[f"{name} scale"] = parameter.levels, parameter.scale
        else:
            found[name] = parameter.detach()
    return found


def loaded_twice(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return loaded(rank, world, folder, torch.float32), loaded(rank, world, folder, torch.int8)


def joined(parts: list[dict[str, Tensor]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of tensor parallel ranks, as one; padding is left out."""
    cut = {name: partition_of(parameter) for name, parameter in GPT2(tiny_model()).named_parameters()}
    whole = {}
    for name in parts[0]:
        matrix = name.removesuffix(" scale")
        how = cut[matrix]
        is_cut = how is not None and len(parts) > 1 and (name == matrix or how.dim == 0)
        value = join_local_slices([part[name] for part in parts], how) if is_cut and how is not None else parts[0][name]
        whole[name] = value[: len(like[matrix])]
    return whole


@pytest.mark.parametrize("run", RUNS)
def test_the_weights_are_those_at_work_at_any_tensor_parallel_size_and_int8_is_their_own_grid(run, tmp_path):
    """Levels times scales are the very numbers, and the same for any tensor parallel size."""
    expected = trained(tmp_path, **RUNS[run])
    whole = joined([loaded(0, 1, str(tmp_path), torch.float32)], expected)
    for name, value in expected.items():
        assert whole[name].to(value.dtype).equal(value), name  # masters of vectors are loaded exact
    both = run_ranks(loaded_twice, 2, str(tmp_path))
    parts = joined([wide for wide, _ in both], expected)
    assert all(parts[name].equal(whole[name]) for name in expected)
    if run in ("asymmetric", "binary, but for what is frozen"):
        return
    alone = joined([loaded(0, 1, str(tmp_path), torch.int8)], expected)
    cut = joined([narrow for _, narrow in both], expected)
    for name, value in expected.items():
        if f"{name} scale" in alone:
            assert alone[name].dtype == torch.int8
            numbers = alone[name].float() * alone[f"{name} scale"][:, None]
            assert numbers.to(value.dtype).equal(value), name
            assert cut[name].equal(alone[name]) and cut[f"{name} scale"].equal(alone[f"{name} scale"])
        else:
            assert alone[name].to(value.dtype).equal(value), name
    assert sum(name.endswith("scale") for name in alone) == 1 + 4 * 2


def test_levels_that_int8_does_not_hold_are_quantised_like_any_others(tmp_path: Path) -> None:
    """Of 12 bits, of a grid that does not lie around 0, and of none: within half a step of max / 127."""
    for number, values in enumerate((dict(quantize_start_bits=12), RUNS["asymmetric"] | dict(quantize_start_bits=8),
                                     dict(quantize_start_bits=8, frozen=FROZEN))):
        folder = tmp_path / str(number)
        expected = trained(folder, **values)
        found = loaded(0, 1, str(folder), torch.int8)
        name = next(name for name in expected if f"{name} scale" in found and name.startswith("blocks"))
        scale = found[f"{name} scale"]
        assert scale.allclose(expected[name].abs().amax(1) / 127)
        assert ((found[name].float() * scale[:, None] - expected[name]).abs() <= scale[:, None] * 0.501).all()


def test_a_conversion_says_that_it_writes_the_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run", quantize_start_bits=8)
    checkpoint(["convert", str(tmp_path / "run"), "--output", str(tmp_path / "int8"), "--dtype", "int8"])
    assert "global_step3 was quantised in training, and these are its exact masters" in capsys.readouterr().out
