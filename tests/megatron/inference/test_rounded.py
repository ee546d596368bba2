"""A run that was quantised in training is loaded with the weights it had at work, and as int8 with their own levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.cli import main as checkpoint
from megatron.inference import load
from megatron.inference.int8 import Int8
from megatron.model.gpt2 import GPT2
from megatron.zero.api.checkpoint_io import gather_full_state_dict
from megatron.zero.moq import MoQState
from mpu import groups
from mpu.partition import join_local_slices, partition_of
from tests.distributed import run_ranks
from tests.megatron.helpers import tiny_model
from tests.megatron.train.test_quantise import engine_for

CPU = torch.device("cpu")
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
def test_the_weights_are_those_at_work_at_any_tensor_parallel_size(run: str, tmp_path: Path) -> None:
    expected = trained(tmp_path, **RUNS[run])
    for tp in (1, 2):
        found = joined(run_ranks(loaded, tp, str(tmp_path), torch.float32) if tp > 1 else
                       [loaded(0, 1, str(tmp_path), torch.float32)], expected)
        for name, value in expected.items():
            assert found[name].to(value.dtype).equal(value), (name, tp)  # masters of vectors are loaded exact


def test_where_a_checkpoint_does_not_say_which_all_matrices_are_rounded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of an older version."""
    numbers = MoQState.state_dict
    monkeypatch.setattr(MoQState, "state_dict",
                        lambda self: {name: value for name, value in numbers(self).items() if name != "rounded"})
    expected = trained(tmp_path, quantize_start_bits=8)
    found = joined([loaded(0, 1, str(tmp_path), torch.float32)], expected)
    assert all(found[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize("run", [run for run in RUNS if run not in ("asymmetric", "binary, but for what is frozen")])
def test_int8_is_their_own_grid(run: str, tmp_path: Path) -> None:
    """Levels times scales are the very numbers, and the same for any tensor parallel size."""
    expected = trained(tmp_path, **RUNS[run])
    alone = joined([loaded(0, 1, str(tmp_path), torch.int8)], expected)
    cut = joined(run_ranks(loaded, 2, str(tmp_path), torch.int8), expected)
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
