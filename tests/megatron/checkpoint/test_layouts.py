"""A checkpoint of any layout is read by any other: every ordered pair of tp in {1, 2, 4} x dp in {1, 2, 4}. An engine
loads its buffers, and takes no memory of its own for a load. What a rank does to start, save, open and resume does not
grow with the number of ranks: counts, not times."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.checkpoint import reader
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.reshard import TPSharding, TPSlice
from megatron.config.tree import build_config
from megatron.errors import CheckpointError
from megatron.train import build
from megatron.zero.api.engine import Engine
from megatron.zero.partitioned_param import Placeholder
from megatron.zero.state import persistent_buffers
from mpu import groups
from mpu.split import Partition
from tests.distributed import run_ranks
from tests.megatron.checkpoint import scale
from tests.megatron.checkpoint.faults import before_each
from tests.megatron.checkpoint.made import GRIDS, KINDS, SHAPES, Grid, ThreadWorld, logical, runs, save_grid
from tests.megatron.live_bytes import STEP, LiveBytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Grid, Path]:
    """One state, saved under each layout. Its padding is not zero, which no reader may notice."""
    folder = tmp_path_factory.mktemp("layouts")
    for grid in GRIDS:
        reports = save_grid(folder / str(grid), grid, padding=7.0)
        assert all(isinstance(report.bytes, int) for report in reports), reports
    return {grid: folder / str(grid) for grid in GRIDS}


def check_all_runs(checkpoint: Checkpoint, grid: Grid, padding: float) -> None:
    """Every run that any rank of `grid` would ask for is what plain slicing gives."""
    for rank in range(grid.tp * grid.dp):
        for kind, name, cut, offset, wanted in runs(logical(), grid, rank % grid.tp, rank // grid.tp, padding):
            out = torch.full((len(wanted),), torch.nan)
            checkpoint.read(kind, name, offset=offset, out=out, **vars(cut))
            assert torch.equal(out, wanted), (kind, name, rank, grid)


def test_every_layout_reads_every_other(saved: dict[Grid, Path]) -> None:
    for written, asked in product(GRIDS, GRIDS):
        # The same cut is read back bit for bit, padding and all; any other finds zero there.
        check_all_runs(open_checkpoint(saved[written]), asked, padding=7.0 if written.tp == asked.tp else 0.0)


def test_the_digest_is_the_same_for_every_layout_and_another_for_another_state(
        saved: dict[Grid, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "DIGEST_BLOCK", 37)
    digests = {tuple(reader.digest_lines(open_checkpoint(path))) for path in saved.values()}
    assert len(digests) == 1
    (lines,) = digests
    assert len(lines) == len(SHAPES) * len(KINDS) + 1 and lines[-1].startswith("total ")
    save_grid(tmp_path, Grid(1, 1), seed=1)
    assert list(reader.digest_lines(open_checkpoint(tmp_path)))[-1] != lines[-1]


def test_a_read_touches_only_the_files_that_hold_its_run(saved: dict[Grid, Path]) -> None:
    opened: list[str] = []
    checkpoint = open_checkpoint(saved[Grid(2, 2)])
    with before_each(saved[Grid(2, 2)], lambda operation, path: opened.append(Path(path).name), ["open"]):
        checkpoint.read_slice("weight", "embedding.weight", TPSlice((28, 8), Partition(0, size=50), 1, 2), 0,
                              torch.empty(8))
    assert {*opened} == {"rank1.json", "rank1.safetensors"}


def test_another_logical_shape_is_an_error_that_lists_both(saved: dict[Grid, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"weight 'fc.weight': shape expected \[40, 8\], found \[20, 8\]"):
        open_checkpoint(saved[Grid(2, 1)]).read_slice("weight", "fc.weight", TPSlice((20, 8), Partition(0), 0, 2), 0,
                                                      torch.empty(1))
    with pytest.raises(CheckpointError, match="holds no weight 'fc2.weight'"):
        open_checkpoint(saved[Grid(2, 1)]).shape("weight", "fc2.weight")
    assert open_checkpoint(saved[Grid(2, 1)]).rank_state(2) is None


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_share_the_verification_and_fail_together(ranks: int, tmp_path: Path) -> None:
    save_grid(tmp_path, Grid(2, 2))
    for victim in sorted((tmp_path / "global_step1").glob("rank*")):
        content = victim.read_bytes()
        victim.write_bytes(content[:-1] + b"\xff")
        results = ThreadWorld(ranks).run(lambda world: open_checkpoint(tmp_path, world=world))
        assert [type(result) for result in results] == [CheckpointError] * ranks
        assert len({str(result) for result in results}) == 1 and victim.name in str(results[0])
        victim.write_bytes(content)


def test_a_logical_shape_has_no_padding_and_an_impossible_cut_is_refused() -> None:
    assert TPSharding((16, 8), 0, 1, 50, 4).logical_shape == (50, 8)
    assert TPSharding((12, 8), 0, 3, None, 4).logical_shape == (48, 8)
    assert TPSharding((16, 8), None, 1, None, 1).logical_shape == (16, 8)
    for impossible in (TPSharding((4,), 1, 1, None, 2), TPSharding((4,), 0, 3, None, 2), TPSharding((4,), 0, 1, 9, 2),
                       TPSharding((4,), 0, 2, 3, 2), TPSharding((4,), 0, 1, None, 0), TPSharding((4,), 0, 0, None, 1),
                       TPSharding((4,), None, 1, None, 2)):
        assert not impossible.can_exist


# ---- an engine -------------------------------------------------------------------------------------------------------

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


class Scaled(nn.Linear):
    """With a buffer that its state dict holds, and one that the model computes."""

    def __init__(self, name: str = "scale", size: int = 1) -> None:
        super().__init__(3, 1)
        self.register_buffer(name, torch.full((size,), float(size)))
        self.register_buffer("computed", torch.tensor([float(size)]), persistent=False)


def test_buffers_are_loaded_by_name_and_shape_and_computed_ones_stay(tmp_path: Path) -> None:
    def load(model: Scaled, *, strict: bool = True) -> Scaled:
        run: Engine = zero.initialize(model=model, config=CONFIG)[0]
        run.load_checkpoint(tmp_path, load_module_strict=strict)
        return model

    saved: Engine = zero.initialize(model=Scaled(), config=CONFIG)[0]
    saved.module.scale.fill_(7.0)
    saved.module.computed.fill_(8.0)
    saved.save_checkpoint(tmp_path)
    model = load(Scaled())
    assert (model.scale, model.computed) == (torch.tensor([7.0]), torch.tensor([1.0]))
    for other, words in ((Scaled("shift"), "buffers are not in the checkpoint, shift"),
                         (Scaled(size=2), "'scale': shape")):
        with pytest.raises(CheckpointError, match=words):
            load(other)
    assert load(Scaled("shift"), strict=False).shift == torch.tensor([1.0])


def test_a_buffer_that_one_of_two_modules_keeps_is_saved() -> None:
    for keeps_first in (True, False):
        model, table = nn.Sequential(nn.Module(), nn.Module()), torch.ones(1)
        model[0].register_buffer("scale", table, persistent=keeps_first)
        model[1].register_buffer("scale", table, persistent=not keeps_first)
        assert persistent_buffers(model) == {"0.scale": table}


# ---- a load takes no memory of its own -------------------------------------------------------------------------------

SHAPE_OF_GPT2 = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64,
                 "vocab_size": 2048, "batch_size": 1}
LARGEST = 2048 * 128 * 4
"""Bytes of the word embedding, the largest parameter: a load that kept copies would rise by this at least."""

SMALL = LARGEST // 8


def engine_at(tp: int, stage: int) -> Engine:
    config = build_config({**SHAPE_OF_GPT2, "model_parallel_size": tp, "zero_stage": stage})
    grid = groups.build(tp)
    return build.engine(config, build.model(config, grid), grid, torch.device("cpu"))


def save_by_engine(rank: int, world: int, folder: Path, tp: int, stage: int) -> None:
    engine_at(tp, stage).save_checkpoint(folder)


def rise(rank: int, world: int, folder: Path, tp: int, stage: int) -> int:
    """Bytes alive at the peak of a load, above those before it."""
    asking, live = engine_at(tp, stage), LiveBytes()
    with live:
        for bucket in asking.core.all_buckets:
            for kind in bucket.master_state.kinds:
                bucket.master_state.view(kind).view(-1)  # so that the meter knows the state
        for weight in asking.core.module.parameters():
            if not isinstance(weight, Placeholder):  # one without elements
                weight.view(-1)
        before = live.sample()
        live.reset_peak()
        asking.load_checkpoint(folder)
    assert before > SMALL
    return live.peak - before


@pytest.mark.parametrize(("written", "asked"), [
    pytest.param((1, 1, 0), (1, 2, 3), id="split"),
    pytest.param((2, 1, 1), (1, 2, 2), id="tensor parallelism undone"),
])
def test_a_load_takes_no_memory_beside_the_state(written: tuple[int, int, int], asked: tuple[int, int, int],
                                                 tmp_path: Path) -> None:
    (tp, dp, stage) = written
    run_ranks(save_by_engine, tp * dp, tmp_path, tp, stage)
    (tp, dp, stage) = asked
    rises = run_ranks(rise, tp * dp, tmp_path, tp, stage)
    assert max(rises) < SMALL + STEP, rises


# ---- a rank of many --------------------------------------------------------------------------------------------------

FEW = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, scale.Cost]]:
    return phases(tmp_path_factory.mktemp("small"), FEW)


def phases(root: Path, size: int) -> list[dict[int, scale.Cost]]:
    return [scale.save(root, size), *scale.open_and_read(root, size)]


@pytest.mark.parametrize("size", [64, pytest.param(512, marks=pytest.mark.slow),
                                  pytest.param(4096, marks=pytest.mark.slow)])
def test_no_phase_grows_with_the_world(size: int, tmp_path: Path, reference: list[dict[int, scale.Cost]]) -> None:
    for what, few, many in zip(("save", "open", "resume"), reference, phases(tmp_path, size), strict=True):
        for before, now in ((few[0], many[0]), (few[FEW // 2], many[size // 2])):
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
