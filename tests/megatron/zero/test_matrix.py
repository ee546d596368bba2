"""Every layout of the engine is the same training: losses, gradient norms and weights of a plain loop in one process. A
layout cuts every parameter exactly once, whatever the number of shards.

A *cell* is one choice of stage, tensor parallel, data parallel, precision, accumulation and recomputation. All cells
of one grid of ranks and one precision run in one job.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.tree import Config
from megatron.model import GPT2
from megatron.zero.layout import ALIGNMENT, FlatLayout, Slot
from mpu import groups
from mpu.groups import Groups
from tests.distributed import run_ranks
from tests.megatron.zero.run import (DTYPES, PlainLoop, Run, assemble, configure_gpt2, gpt2_engine, gpt2_loss,
                                     join_tensor_parallel, master_runs, weights)

ROWS, LENGTH, VOCABULARY, LR = 16, 8, 61, 2e-3
STEPS, STEPS_OF_SAMPLE = 50, 8
STAGES = (0, 1, 2, 3)

TIMEOUT = 1200  # seconds for one grid: eight ranks on two cores wait for each other most of the time

FIRST_SCALE, WINDOW = 64.0, 7
"""The loss scale of fp16 doubles at step 7 for the first time, and 7 times in 50 steps."""


@dataclass(frozen=True)
class Tolerance:
    """Of losses and norms: relative. Of each weight tensor: its distance, as a share of the way it went in training,
    so that a tensor of small steps counts as much as one of large steps."""

    losses: float
    norms: float
    weights: float


TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-5, 1e-5),  # sums in another order; measured at most 2e-7, 2e-7, 4e-6
    # Products of a part of the batch, or of a slice of the features, are rounded to 16 bits before they are added up.
    # Measured at most 7e-5, 8e-4, 6e-3 with the 2^-12 of fp16, and about 8 times that with the 2^-9 of bf16.
    "fp16": Tolerance(2e-4, 2.5e-3, 1.5e-2),
    "bf16": Tolerance(1.6e-3, 2e-2, 1.2e-1),
}


@dataclass(frozen=True)
class Cell:
    stage: int
    tp: int
    dp: int
    precision: str = "fp32"
    accumulation: int = 1
    recompute: bool = False
    replicas: int = 1  # of each shard (--zero-shard-group-size dp / replicas)

    def config(self) -> Config:
        precision = {"fp16": {"fp16": True, "initial_loss_scale": FIRST_SCALE, "loss_scale_window": WINDOW},
                     "bf16": {"bf16": True}, "fp32": {}}[self.precision]
        return configure_gpt2(
            zero_stage=self.stage, zero_shard_group_size=self.dp // self.replicas if self.replicas > 1 else None,
            model_parallel_size=self.tp, checkpoint_activations=self.recompute,
            batch_size=ROWS // self.dp // self.accumulation, global_batch_size=ROWS, **precision)


@dataclass(frozen=True)
class Trained:
    """What one rank saw of a run, or one process."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    weights: dict[str, Tensor]
    masters: list[Run]


def batches(steps: int) -> list[Tensor]:
    """[ROWS, LENGTH + 1] token ids a step: they count upwards by 1, 2 or 3, so that there is something to learn."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        first = torch.randint(VOCABULARY, (ROWS, 1), generator=draw)
        stride = torch.randint(1, 4, (ROWS, 1), generator=draw)
        found.append((first + stride * torch.arange(LENGTH + 1)) % VOCABULARY)
    return found


def train(cell: Cell, grid: Groups, steps: int) -> Trained:
    """The run of one cell on this rank."""
    engine = gpt2_engine(cell.config(), grid)
    for group in engine.param_groups:
        group["lr"] = LR
    losses, norms, scales = [], [], []
    for rows in batches(steps):
        loss = 0.0
        for part in rows.view(cell.accumulation, cell.dp, -1, LENGTH + 1)[:, grid.dp.rank]:
            micro_loss = gpt2_loss(engine, part)
            engine.backward(micro_loss)
            report = engine.step()
            loss += micro_loss.item() / cell.accumulation
        assert report is not None and report.applied
        losses.append(loss)
        norms.append(report.grad_norm)
        scales.append(report.loss_scale)
    return Trained(losses, norms, scales, weights(engine), master_runs(engine))


def train_all(rank: int, world: int, cells: list[Cell], steps: int) -> list[Trained]:
    grid = groups.build(cells[0].tp)
    return [train(cell, grid, steps) for cell in cells]


@cache
def reference(precision: str, steps: int) -> tuple[Trained, dict[str, Tensor]]:
    """The plain loop: whole batches, one process; and the weights it starts with."""
    config = Cell(0, 1, 1, precision).config()
    model = GPT2(config.model, seed=config.train.seed)
    loop = PlainLoop(model, config, DTYPES[precision])
    start = {name: weight.clone() for name, weight in loop.weights.items()}
    losses, norms, scales = [], [], []
    for step, rows in enumerate(batches(steps)):
        scale = FIRST_SCALE * 2 ** (step // WINDOW) if precision == "fp16" else 1.0
        loss, norm = loop.step(lambda model: plain_loss(model, rows), LR, scale)
        losses.append(loss)
        norms.append(norm)
        scales.append(scale)
    return Trained(losses, norms, scales, loop.weights, []), start


def plain_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Whole logits, torch's cross-entropy."""
    assert isinstance(model, GPT2)
    logits = F.linear(model.hidden_states(rows[:, :-1]), model.wte.weight)[..., :VOCABULARY]
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def joined(cell: Cell, ranks: list[Trained]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(fp32 masters, weights at work) of the whole model, from what all ranks have of it."""
    columns = [ranks[t :: cell.tp] for t in range(cell.tp)]  # one a tensor parallel rank
    model = GPT2(cell.config().model)
    size = cell.dp // cell.replicas
    replicas = [[assemble([run for rank in column[start : start + size] for run in rank.masters]) for column in columns]
                for start in range(0, cell.dp, size)]
    masters = replicas[0]
    assert all(torch.equal(value, first[name]) for replica in replicas for column, first in zip(replica, masters)
               for name, value in column.items()), "replicas of a shard differ"
    return join_tensor_parallel(masters, model), join_tensor_parallel([column[0].weights for column in columns], model)


def assert_ranks_agree(cell: Cell, ranks: list[Trained]) -> None:
    for number, rank in enumerate(ranks):
        assert rank.norms == ranks[0].norms and rank.scales == ranks[0].scales
        replica = ranks[number % cell.tp].weights
        assert all(torch.equal(weight, replica[name]) for name, weight in rank.weights.items())


def assert_equals_the_plain_loop(cell: Cell, ranks: list[Trained]) -> None:
    (wanted, start), tolerance = reference(cell.precision, len(ranks[0].losses)), TOLERANCES[cell.precision]
    masters, working = joined(cell, ranks)
    for t in range(cell.tp):
        losses = [sum(shares) / cell.dp for shares in zip(*(rank.losses for rank in ranks[t :: cell.tp]))]
        assert losses == pytest.approx(wanted.losses, rel=tolerance.losses), "losses"
    assert ranks[0].norms == pytest.approx(wanted.norms, rel=tolerance.norms), "gradient norms"
    assert ranks[0].scales == wanted.scales, "loss scales"
    for name, weight in wanted.weights.items():
        walked, off = (weight - start[name]).norm(), (masters[name] - weight).norm()
        assert off <= tolerance.weights * walked, f"{name} is {off / walked:.1e} of its way off"
        assert torch.equal(working[name], masters[name].to(DTYPES[cell.precision])), f"{name} at work is not its master"


def assert_equal_bits(cells: list[Cell], runs: list[list[Trained]]) -> None:
    """The table of docs/zero.md: at one or two ranks of data parallel, cells that add the same numbers have the same
    bits."""
    alike: dict[object, tuple[Cell, list[Trained]]] = {}
    for cell, ranks in zip(cells, runs, strict=True):
        order_of_sums = cell.stage >= 2 if cell.accumulation > 1 else None  # ranks first, or micro-batches first
        first, wanted = alike.setdefault((cell.accumulation, order_of_sums), (cell, ranks))
        for found, other in zip(ranks, wanted, strict=True):
            same = all(torch.equal(weight, other.weights[name]) for name, weight in found.weights.items())
            assert same and found.losses == other.losses, f"{cell} is not {first}"


def check(cells: list[Cell], steps: int) -> None:
    """Run cells of one grid of ranks, and hold each against the plain loop and those of `alike` sums together."""
    world = cells[0].tp * cells[0].dp
    by_rank = run_ranks(train_all, world, cells, steps, timeout=TIMEOUT)
    by_cell = [list(ranks) for ranks in zip(*by_rank)]
    for cell, ranks in zip(cells, by_cell, strict=True):
        try:
            assert_ranks_agree(cell, ranks)
            assert_equals_the_plain_loop(cell, ranks)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from error
    if cells[0].dp <= 2:
        assert_equal_bits(cells, by_cell)


@pytest.mark.parametrize("cells", [
    pytest.param([Cell(stage, 1, 2) for stage in STAGES], id="every stage"),
    pytest.param([Cell(stage, 1, 2, "fp32", 4, stage % 2 == 1) for stage in STAGES], id="accumulation, recomputation"),
    pytest.param([Cell(stage, 1, 2, "bf16", 1) for stage in STAGES], id="bf16"),
    pytest.param([Cell(stage, 1, 1) for stage in STAGES], id="one process"),
    pytest.param([Cell(3, 1, 1, "fp16", 4), Cell(0, 1, 1, "fp16", 4, True)], id="one rank"),
    pytest.param([Cell(2, 2, 1, "bf16", 1, True), Cell(1, 2, 1, "bf16", 4)], id="tensor parallel"),
    pytest.param([Cell(stage, 1, 4, "fp32", stage, replicas=2) for stage in (1, 2)] + [
        Cell(3, 1, 4, precision, recompute=True, replicas=2) for precision in ("fp32", "bf16")],
        id="replicas of shards"),
    pytest.param([Cell(2, 2, 2, "fp16"), Cell(3, 2, 2, "fp16", 1, True)], id="both"),
])
def test_a_sample_of_the_layouts_trains_like_a_plain_loop(cells: list[Cell]) -> None:
    check(cells, STEPS_OF_SAMPLE)


def sweep(tp: int, dp: int, precision: str) -> list[Cell]:
    """Every cell of a grid of ranks. On four ranks and more, of each pair with and without recomputation only one, in
    turns: each stage meets both, and both accumulations. On eight, accumulation at the last stage only."""
    every = [Cell(stage, tp, dp, precision, accumulation, recompute)
             for stage, accumulation, recompute in product(STAGES, (1, 4), (False, True))]
    if tp * dp >= 4:
        every = [cell for cell in every if cell.recompute == ((cell.stage + (cell.accumulation == 4)) % 2 == 1)]
    return [cell for cell in every if tp * dp < 8 or cell.accumulation == 1 or cell.stage == 3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("tp", "dp"), list(product((1, 2), (1, 2, 4))))
def test_every_layout_trains_like_a_plain_loop(tp: int, dp: int, precision: str) -> None:
    check(sweep(tp, dp, precision), STEPS)


# ---- the arithmetic of a layout --------------------------------------------------------------------------------------


def slots(seed: int) -> list[Slot]:
    draw = random.Random(seed)
    return [
        Slot(f"p{i}", tuple(draw.choices((1, 2, 3, 7, 64), k=draw.choice((0, 1, 2)))), group=draw.choice((0, 1)))
        for i in range(12)
    ]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 64])
def test_shards_have_every_element_once(shards: int) -> None:
    for seed in range(5):
        layout = FlatLayout(slots(seed), shards)
        seen: dict[str, list[int]] = {slot.name: [0] * slot.numel for slot in layout.slots}
        for rank in range(shards):
            groups = {slot.group: range(*layout.group_range(rank, slot.group)) for slot in layout.slots}
            for segment in layout.segments(rank):
                assert segment.shard_offset + rank * layout.shard_numel == segment.slot.offset + segment.slot_offset
                assert segment.shard_offset in groups[segment.slot.group], "every group is one range"
                for index in range(segment.slot_offset, segment.slot_offset + segment.count):
                    seen[segment.slot.name][index] += 1
        assert all(count == 1 for counts in seen.values() for count in counts)
        parts = sorted([*((slot.offset, slot.end) for slot in layout.slots if slot.numel), *layout.padding_ranges()])
        assert parts[0][0] == 0 and parts[-1][1] == layout.numel, "slots and padding tile the buffer"
        assert all(one[1] == two[0] for one, two in zip(parts, parts[1:], strict=False))
        assert layout.shard_numel % ALIGNMENT == 0 and all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)


def test_more_ranks_than_elements_fit() -> None:
    layout = FlatLayout([Slot("a", (3,)), Slot("b", (5,))], 64)
    assert [list(layout.segments(rank)) for rank in range(2, 64)] == [[]] * 62
