"""Quantised is a row at a time, by a rule that a line of NumPy says; written is what would be quantised on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.checkpoint import int8_weights
from megatron.checkpoint.cli import main
from megatron.checkpoint.reader import digest_lines, open_checkpoint
from megatron.checkpoint.zero_to_fp32 import main as merge
from megatron.errors import CheckpointError
from tests.megatron.helpers import train

FLAGS = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --vocab-size 300 "
         "--tokenizer-type ByteLevelTokenizer --mock-data --train-iters 2 --eval-interval 0 --batch-size 2")


def reader(matrix: torch.Tensor) -> int8_weights.ReadRange:
    def read(start: int, out: torch.Tensor) -> None:
        out.copy_(matrix.flatten()[start : start + len(out)])
    return read


def quantised(matrix: torch.Tensor, maxima: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    levels = torch.empty(matrix.shape, dtype=torch.int8)
    return levels, int8_weights.quantise_into(levels, reader(matrix), "wte.weight", maxima)


def by_the_rule(matrix: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """In fp64; a quotient is rounded to fp32 first, as the arithmetic is fp32's (53 bits are enough for that to be the
    same number)."""
    rows = matrix.double().numpy()
    scale = (np.abs(rows).max(1) / 127).astype(np.float32)
    quotient = (rows / np.where(scale > 0, scale, np.inf).astype(np.float64)[:, None]).astype(np.float32)
    return np.clip(np.rint(quotient), -127, 127).astype(np.int8), scale


def test_levels_and_scales_are_those_of_a_slow_reference_at_any_block() -> None:
    matrix = torch.randn(23, 37, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 23)[:, None]
    matrix[4], matrix[22] = 0, 0
    matrix[7, 3] = 1e4  # all others are small beside it
    expected = by_the_rule(matrix)
    for block in (1, 40, 100, 1 << 18):
        with patch.object(int8_weights, "BLOCK_ELEMENTS", block):
            levels, scale = quantised(matrix)
            maxima = int8_weights.row_maxima(reader(matrix), matrix.shape)
        assert np.array_equal(levels.numpy(), expected[0]) and np.array_equal(scale.numpy(), expected[1])
        assert torch.equal(maxima, matrix.abs().amax(1)) and int(levels.abs().max()) == 127
        assert not levels[4].any() and scale[4] == 0


def test_ties_go_to_the_even_level() -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5]])
    assert quantised(row)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126, 126]]


def test_the_smallest_and_the_largest_numbers_give_no_nan_and_what_is_not_finite_is_refused() -> None:
    for number in (1e-45, 1e-42, 1e-38, 3e38):
        row = torch.tensor([[number, -number / 2, 0.0]])
        levels, scale = quantised(row)
        error = (levels.double() * scale.double()[:, None] - row.double()).abs().max()
        # half a level, and what a scale below fp32's normal numbers is off by: half of 2^-149, at 127 levels
        assert scale.isfinite().all() and float(error) <= 0.501 * float(scale[0]) + 127 * 2.0**-150
    for number in (torch.nan, torch.inf, -torch.inf):
        matrix = torch.ones(3, 4)
        matrix[1, 2] = number
        with pytest.raises(CheckpointError, match="wte.weight is not finite"):
            quantised(matrix)


# ---- written ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("run")
    train([*FLAGS.split(), "--save", made / "a"])
    assert main(["convert", str(made / "a"), "--dtype", "int8", "--output", str(made / "q")]) == 0
    yield made


def test_all_matrices_but_the_position_table_are_quantised_and_the_rest_is_as_it_was(folder: Path) -> None:
    """That the numbers are those of the rule is in tests/megatron/inference/test_int8.py."""
    source, written = open_checkpoint(folder / "a"), open_checkpoint(folder / "q", int8=True)
    assert (written.tag, written.iteration, written.config) == (source.tag, source.iteration, source.config)
    matrices = [f"blocks.{i}.{layer}.weight" for i in range(2) for layer in
                ("attn.proj", "attn.qkv", "mlp.fc", "mlp.proj")]
    assert written.names("int8") == written.names("scale") == (*matrices, "wte.weight")
    assert {*written.names("weight"), *written.names("int8")} == {*source.names("weight")}
    assert {line for line in digest_lines(written) if " weight " in line} < {*digest_lines(source)}
    assert main(["verify", str(folder / "q")]) == 0 and main(["digest", str(folder / "q")]) == 0


def test_for_anything_but_inference_it_is_refused(folder: Path, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    for typed in (["merge", folder / "q", "--output", tmp_path / "m"], ["convert", folder / "q", "--output",
                                                                        tmp_path / "hf"],
                  ["convert", folder / "q", "--dtype", "int8", "--output", tmp_path / "qq"]):
        assert main([*map(str, typed)]) == 4
        assert "holds int8 weights, which are for inference alone" in capsys.readouterr().err
    for more in ([], ["--finetune"]):
        with pytest.raises(CheckpointError, match="holds int8 weights, which are for inference alone"):
            train([*FLAGS.split(), "--load", folder / "q", "--train-iters", 4, *more])
    assert merge([str(folder / "q"), str(tmp_path / "out.bin")]) == 2
    assert "holds int8 weights" in capsys.readouterr().err


def test_a_hugging_face_folder_can_be_the_source(folder: Path, tmp_path: Path) -> None:
    assert main(["convert", str(folder / "a"), "--output", str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), "--dtype", "int8", "--output", str(tmp_path / "q")]) == 0
    ours, theirs = (list(digest_lines(open_checkpoint(root, int8=True))) for root in (folder / "q", tmp_path / "q"))
    assert ours == theirs
