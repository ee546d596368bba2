"""An int8 model is the same at any tensor parallel size, computes what its numbers say, and has the bytes it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.indexed import IndexedCorpus
from megatron.checkpoint.cli import main as checkpoint
from megatron.checkpoint.int8_weights import BLOCK_ELEMENTS, is_quantised
from megatron.checkpoint.reader import Checkpoint, open_checkpoint, read_logical
from megatron.errors import ConfigError
from megatron.inference import int8, load as loading
from megatron.inference.decoder import Decoder
from megatron.inference.int8 import Int8
from megatron.model.gpt2 import GPT2
from mpu import groups
from mpu.partition import join_local_slices, partition_of
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.helpers import train, write_corpus
from tests.megatron.live_bytes import LiveBytes

CPU = torch.device("cpu")

FLAGS = ("--num-layers 3 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 24 --vocab-size 300 "
         "--tokenizer-type ByteLevelTokenizer --mock-data --train-iters 3 --eval-interval 0 --lr 0.02 "
         "--lr-warmup-fraction 0 --global-batch-size 4 --batch-size 1 --zero-stage 2")


def load(folder: Path, grid: groups.Groups, activations: torch.dtype | None = torch.float32) -> GPT2:
    return loading.build_model(loading.open_run_checkpoint(str(folder), grid), grid, torch.int8, CPU, activations)


def matrices(model: nn.Module) -> dict[str, Int8]:
    found = {name: parameter for name, parameter in model.named_parameters() if is_quantised(name, parameter.shape)}
    assert all(isinstance(parameter, Int8) for parameter in found.values())
    return cast(dict[str, Int8], found)


# ---- the product --------------------------------------------------------------------------------------------------

ROWS = [0, 1, 2, int8.PACKED_KERNEL_MAX_ROWS, int8.PACKED_KERNEL_MAX_ROWS + 1, 50]


@pytest.mark.parametrize(("dtype", "rows", "size", "at_a_time"), pairs(
    [torch.float32, torch.bfloat16], ROWS, [(1, 1), (7, 5), (64, 48), (301, 16), (129, 200)], [1 << 20, 1000]))
def test_a_product_is_that_of_the_numbers(dtype: torch.dtype, rows: int, size: tuple[int, int], at_a_time: int) -> None:
    torch.manual_seed(rows)
    outputs, inputs = size
    weight = Int8(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs).to(dtype))
    room, bias = torch.randn(1 + 2 * rows * inputs).to(dtype), torch.randn(outputs).to(dtype)
    x = room[1:].view(2, rows, inputs)  # not where a kernel could load a vector from
    with patch.dict(int8.BLOCK_ELEMENTS, {dtype: at_a_time}):
        found = F.linear(x, weight, bias)
    numbers = weight.levels.double() * weight.scale.double()[:, None]
    expected, added_up = x.double() @ numbers.T + bias, x.double().abs() @ numbers.abs().T + bias.abs()
    # the sum over the inputs in fp32: at most 2**-24 of what is added up, for each addition; three results are rounded
    # to dtype: the sum, times the scale, plus the bias
    bound = added_up * (inputs * 2**-24 + 3 * (2**-24 if dtype == torch.float32 else 2**-8)) * 1.01
    assert found.dtype == dtype and found.shape == expected.shape and bool(((found - expected).abs() <= bound).all())


def test_any_other_function_sees_the_numbers_and_none_can_write() -> None:
    weight = Int8(torch.randint(-127, 128, (9, 4), dtype=torch.int8), torch.rand(9))
    numbers, tokens = weight.levels * weight.scale[:, None], torch.tensor([[3, 0], [8, 8]])
    assert torch.equal(F.embedding(tokens, weight), numbers[tokens])
    assert torch.equal(weight.t() + 1, numbers.t() + 1) and torch.equal(weight[2], numbers[2])
    for write in (weight.zero_, lambda: weight.copy_(numbers)):
        with pytest.raises(NotImplementedError, match="cannot be written into"):
            write()


def a_layer(dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(32, 5, dtype=dtype)
    levels = torch.randint(-127, 128, (5, 32), dtype=torch.int8)
    layer.weight = nn.Parameter(Int8(levels, torch.rand(5).to(dtype)), requires_grad=False)
    return layer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_in_another_precision_has_the_same_levels(dtype: torch.dtype) -> None:
    layer = nn.Sequential(a_layer(torch.bfloat16))
    weight = cast(Int8, layer[0].weight)
    levels, scale, x = weight.levels, weight.scale, torch.randn(3, 32)
    layer.to(dtype)
    assert isinstance(layer[0].weight, Int8) and isinstance(layer[0].weight, nn.Parameter)
    assert layer[0].weight.dtype == layer[0].weight.scale.dtype == dtype
    assert torch.equal(layer[0].weight.levels, levels) and torch.equal(layer[0].weight.scale, scale.to(dtype))
    expected = x.to(dtype).double() @ (levels.double() * scale.double()[:, None]).T + layer[0].bias.double()
    # sums of 32 products of numbers up to about 4 and 127, a few roundings of each result
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 8.0}[dtype]
    found = layer(x.to(dtype)).detach()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected.detach(), atol=tolerance, rtol=0)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    layer = a_layer(torch.bfloat16)
    with pytest.raises(ConfigError, match="cannot be made float16: its activations are one of float64, float32, bf"):
        layer.to(torch.float16)
    with pytest.raises(NotImplementedError, match="data of an int8 weight cannot be replaced"):
        layer.weight.data = torch.zeros(5, 32)


# ---- a model, at any tensor parallel size -------------------------------------------------------------------------

def trained(rank: int, world: int, tp: int, folder: Path) -> None:
    train([*FLAGS.split(), "--model-parallel-size", tp, "--save", folder])


def parts(rank: int, world: int, folders: Sequence[Path]) -> list[dict[str, tuple[Tensor, Tensor, Any]]]:
    """Of each folder: name -> this rank's levels and scales, and how they are cut."""
    grid, found = groups.build(world), []
    for folder in folders:
        model = load(folder, grid)
        cut = {name: partition_of(parameter) for name, parameter in
               GPT2(model.config, grid.tp, deferred=True).named_parameters()}
        found.append({name: (matrix.levels, matrix.scale, cut[name]) for name, matrix in matrices(model).items()})
    return found


def test_levels_and_scales_are_the_same_at_any_size_read_or_quantised(tmp_path: Path) -> None:
    for tp in (1, 2):
        run, converted = (tmp_path / f"{kind}{tp}" for kind in ("run", "int8"))
        run_ranks(trained, 2, tp, run)
        assert checkpoint(["convert", str(run), "--dtype", "int8", "--output", str(converted)]) == 0
        ((expected, read_alone),) = run_ranks(parts, 1, [run, converted])
        ranks, saved = run_ranks(parts, 2, [run, converted]), open_checkpoint(run)
        assert len(expected) == 13
        for name, (levels, scale, partition) in expected.items():
            shape = saved.shape("weight", name)
            numbers = read_logical(saved, "weight", name, 0, prod(shape)).view(shape)
            real = len(numbers)  # the rest is padding
            assert torch.equal(scale[:real], numbers.abs().amax(1) / 127), name
            assert torch.equal(levels[:real], (numbers / scale[:real, None]).round()), name
            assert torch.equal(read_alone[name][0], levels) and torch.equal(read_alone[name][1], scale), name
            for number in range(2):
                cut = [folders[number][name] for folders in ranks]
                joined = join_local_slices([part for part, _, _ in cut], partition)
                scales = [one for _, one, _ in cut]
                joined_scale = join_local_slices(scales, partition) if partition.dim == 0 else scales[number]
                assert torch.equal(joined[:real], levels[:real]) and not joined[real:].any(), (name, tp)
                assert torch.equal(joined_scale[:real], scale[:real]) and not joined_scale[real:].any(), (name, tp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that has learnt something, of `data` beside it."""
    made = tmp_path_factory.mktemp("int8")
    write_corpus(made / "data")
    train(["--preset", "tiny", "--train-data", made / "data", "--train-iters", 300, "--eval-interval", 0,
           "--lr", "3e-3", "--global-batch-size", 16, "--batch-size", 16, "--save", made / "run"])
    yield made / "run"


def perplexity(model: GPT2, tokens: Tensor) -> float:
    with torch.no_grad():
        logits = model.logits(model.hidden_states(tokens[:, :-1])).double()
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp())


def test_perplexity_is_that_of_the_weights_they_were_made_of(folder: Path) -> None:
    activations, grid, corpus = torch.bfloat16, groups.build(1), IndexedCorpus(folder.parent / "data")
    stream = torch.cat([torch.from_numpy(block.astype("int64")) for _, block in corpus.token_blocks()])
    tokens = stream[: len(stream) // 32 * 32].view(-1, 32)
    plain = loading.build_model(loading.open_run_checkpoint(str(folder), grid), grid, activations, CPU)
    expected, found = perplexity(plain, tokens), perplexity(load(folder, grid, activations), tokens)
    assert expected < 3  # of 257: it has learnt
    assert abs(found / expected - 1) < 0.005


def test_no_step_makes_numbers_of_a_whole_matrix(folder: Path) -> None:
    for activations in (torch.float32, torch.bfloat16):
        decoder = Decoder(load(folder, groups.build(1), activations), 3)
        with patch.object(Int8, "dequantized", side_effect=AssertionError("it did")):
            for row in range(3):
                decoder.prefill([row], [[1, 2, 3]])
            for rows in (1, 2, 3):
                decoder.decode_step([4] * rows)


def resident(model: nn.Module, activations: int) -> int:
    """Bytes, by the shapes: one a number and one scale a row of a matrix, and `activations` a number of the rest."""
    return sum(parameter.numel() + activations * len(parameter) if is_quantised(name, parameter.shape) else
               activations * parameter.numel() for name, parameter in model.named_parameters())


def loaded(rank: int, world: int, folder: Path, dtype: str) -> tuple[int, int, int]:
    """(bytes held, expected, at the peak of loading). The files are mapped."""
    grid = groups.build(world)
    with LiveBytes() as live, patch.object(Checkpoint, "read_slice", lambda *place: place[-1].zero_()):
        model = loading.build_model(loading.open_run_checkpoint(str(folder), grid), grid, loading.DTYPES[dtype], CPU,
                                    torch.bfloat16)
    held = sum(parameter.nbytes for parameter in model.parameters())
    return held, resident(model, 2) if dtype == "int8" else held, live.peak


TILED = "--memory-centric-tiled-linear --tile-factor 2 --zero-stage 3 --hidden-size 512".split()


@pytest.mark.parametrize(("tp", "dtype", "more"), [(2, "int8", []), (1, "fp32", []), (1, "bf16", TILED)])
def test_a_rank_holds_its_part_and_some_blocks_at_any_moment(tmp_path, tp, dtype, more):
    train([*FLAGS.split(), "--save", tmp_path, "--vocab-size", 40_000, *more])
    for held, expected, peak in run_ranks(loaded, tp, tmp_path, dtype):
        assert held == expected
        assert held <= peak < 1.01 * held + 3 * 4 * BLOCK_ELEMENTS, (held, peak)


def test_int8_cannot_be_made_wide_again(folder: Path, tmp_path: Path) -> None:
    assert checkpoint(["convert", str(folder), "--dtype", "int8", "--output", str(tmp_path / "q")]) == 0
    grid = groups.build(1)
    with pytest.raises(ConfigError, match="holds int8 weights: give --dtype int8"):
        loading.build_model(loading.open_run_checkpoint(str(tmp_path / "q"), grid), grid, torch.bfloat16, CPU)
