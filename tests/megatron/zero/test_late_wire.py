"""The engine under a wire that does nothing until it is waited for: the same training, and every wait counts.

Waits that no number can show, because a later one covers them, are listed with the tests that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megatron.zero
from megatron import zero
from megatron.config.tree import build_config
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero.utils import safe_set_full_fp32_param
from mpu import groups
from tests.distributed import RankError, on_ranks, run_ranks
from tests.late_wire import late_wire
from tests.megatron.zero import test_one_bit as one_bit
from tests.megatron.zero.run import configure_gpt2, gpt2_loss, weights
from tests.megatron.zero.small import Model
from tests.wires import accelerator_side
from tests.without_waits import Place, waits, without

WIDTH = 24


class Net(Model):
    """Has a buffer, too; all is drawn differently on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(width=WIDTH, seed=rank)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def life(rank: int, stage: int, bf16: bool, folder: str) -> list[Tensor]:
    """An engine is built, trains with accumulation, evaluates, is edited, fails in a backward, saves and loads."""
    config = build_config({"zero_stage": stage, "lr": 1e-2, "lr_decay_style": "constant", "clip_grad": 0.5,
                           "bf16": bf16, "batch_size": 4, "global_batch_size": 16,
                           "stage3_param_persistence_threshold": 30})
    with zero.Init(enabled=stage == 3):
        net = Net(rank)
    with zero.GatheredParameters(net.head.weight, modifier_rank=1):
        net.head.weight.data.mul_(2.0)
    engine = zero.initialize(model=net, config=config, mpu=groups.build(1))[0]
    draw = torch.Generator().manual_seed(rank)
    dtype = torch.bfloat16 if bf16 else torch.float32
    found = [engine.module.get_buffer("shift").float()]

    def micro_step() -> None:
        engine.backward(engine(torch.randn(4, WIDTH, generator=draw).to(dtype)))
        engine.step()

    for step in range(4):
        micro_step()
        with torch.no_grad():
            found.append(engine(torch.ones(4, WIDTH, dtype=dtype)).float())
        micro_step()
        if step == 1:
            with zero.GatheredParameters(engine.module.head.weight, modifier_rank=1):
                engine.module.head.weight.data.add_(rank)
            engine.save_checkpoint(folder, tag=f"{stage}{bf16}")
        if step == 2:
            x = torch.ones(4, WIDTH, dtype=dtype, requires_grad=True)
            loss = engine(x)
            x.register_hook(_fail)
            with pytest.raises(ValueError, match="on purpose"):
                engine.backward(loss)
            engine.load_checkpoint(folder, tag=f"{stage}{bf16}")
    return found + [value.float() for value in weights(engine).values()]


def _fail(gradient: Tensor) -> None:
    raise ValueError("on purpose")


def gpt2(rank: int, stage: int, bf16: bool, shard_group_size: int | None = None) -> list[Tensor]:
    """Initial weights that the engine draws, edited before it has; recomputation, the loss head and tied weights."""
    grid = groups.build(1)
    config = configure_gpt2(zero_stage=stage, bf16=bf16, lr=1e-2, lr_warmup_iters=0, batch_size=2, global_batch_size=8,
                            checkpoint_activations=True, checkpoint_num_layers=1,
                            zero_shard_group_size=shard_group_size)
    model = build_model(config, grid)
    with zero.GatheredParameters(model.wpe.weight, modifier_rank=1):
        model.wpe.weight.data.mul_(2.0 + rank)
    engine = build_engine(config, model, grid, torch.device("cpu")).core
    draw = torch.Generator().manual_seed(rank)
    for _ in range(4):
        engine.backward(gpt2_loss(engine, torch.randint(0, 61, (2, 17), generator=draw)))
        engine.step()
    return [value.float() for value in weights(engine).values()]


@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow, id="cpu"),
                                    pytest.param(True, id="accelerator")])
@on_ranks(2, timeout=300)
def test_a_late_wire_changes_nothing(rank: int, world: int, native: bool, tmp_path: Path) -> None:
    with accelerator_side(native):
        for stage, bf16 in product(range(4), (False, True)):
            wanted = life(rank, stage, bf16, f"{tmp_path}/plain") + gpt2(rank, stage, bf16)
            assert not any(value.isnan().any() for value in wanted)
            for seed in (0, 1):
                with late_wire(seed) as network:
                    found = life(rank, stage, bf16, f"{tmp_path}/late{seed}") + gpt2(rank, stage, bf16)
                assert len(network.log) > 10
                assert all(map(torch.equal, found, wanted)), f"stage {stage}, bf16 {bf16}, seed {seed}"


@on_ranks(4)
def test_a_late_wire_between_replicas_of_shards_changes_nothing(rank: int, world: int) -> None:
    for stage, native in product((1, 2, 3), (False, True)):
        with accelerator_side(native):
            wanted = gpt2(rank, stage, True, 2)
            with late_wire() as network:
                assert all(map(torch.equal, gpt2(rank, stage, True, 2), wanted))
            assert any(what.startswith("all-reduce of") for what in network.log)


class Idle(Model):
    """The last block takes part in the first forward only."""

    used = 3

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.used]:
            x = torch.tanh(block(x))
        self.used = 2
        return self.head(x).square().mean()


@pytest.mark.parametrize("native", [False, True], ids=["cpu", "accelerator"])
@on_ranks(2)
def test_weights_on_their_way_are_waited_for_before_new_ones(rank: int, world: int, native: bool) -> None:
    """Those of a block that no forward has used since, and those that somebody sets right after a step."""
    with accelerator_side(native):
        for stage, bf16 in ((1, True), (2, False)):
            config = build_config({"zero_stage": stage, "bf16": bf16, "batch_size": 4, "global_batch_size": 8,
                                   "ignore_unused_parameters": True, "lr": 1e-2})
            with late_wire():
                engine = zero.initialize(model=Idle(width=WIDTH), config=config, mpu=groups.build(1))[0]
                for _ in range(3):
                    engine.backward(engine(torch.ones(4, WIDTH, dtype=engine.working_dtype)))
                    engine.core.step()  # new weights travel until they are needed
                last = engine.module.blocks[2].weight
                safe_set_full_fp32_param(last, torch.full((WIDTH, WIDTH), 0.25))
                with zero.GatheredParameters(last):
                    assert bool((last == 0.25).all())
                engine.destroy()


# ---- every wait counts -----------------------------------------------------------------------------------------------

FOLDER = Path(megatron.zero.__file__).parent


def places() -> Iterator[Place]:
    """In the mechanism; api/ waits for threads, not ranks. Nothing here looks for eigenvalues (test_moq.py)."""
    for path in sorted(FOLDER.glob("*.py")):
        yield from (place for place in waits(f"megatron.zero.{path.stem}") if path.stem != "eigenvalue")
    yield from waits("mpu.compressed_all_reduce")


def said(stage: int) -> list[Tensor]:
    """What optimizers make of weights that have an exchange of their own, or look at whole matrices."""
    found = []
    for name in ("onebit_adam", "muon") if stage < 2 else ("muon",):
        engine = one_bit.engine_of(stage, optimizer=name)
        one_bit.train(engine, 0, one_bit.FREEZE + 3)
        found += weights(engine).values()
    return found


STAGES = (1, 3)


def whole(rank: int, stage: int, folder: str) -> list[Tensor]:
    return life(rank, stage, True, folder) + gpt2(rank, stage, True) + said(stage)


def whole_lives(rank: int, world: int, folder: str) -> list[list[Tensor]]:
    return [whole(rank, stage, f"{folder}/{stage}") for stage in STAGES]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[Tensor]]]:
    """By rank and stage, with all waits."""
    return run_ranks(whole_lives, 2, str(tmp_path_factory.mktemp("plain")))


def mutated(rank: int, world: int, folder: str, place: Place, wanted: list[list[list[Tensor]]]) -> str:
    """What becomes of the lives without one wait: "" if nothing."""
    try:
        for stage, expected in zip(STAGES, wanted[rank], strict=True):
            with without(place), late_wire():
                found = whole(rank, stage, folder)
            if not all(map(torch.equal, found, expected)):
                return "other numbers"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.few(6)
@pytest.mark.parametrize("place", [*places()], ids=str)
def test_no_wait_of_the_engine_can_be_left_out(place: Place, tmp_path: Path, wanted: list[list[list[Tensor]]]) -> None:
    try:
        found = run_ranks(mutated, 2, str(tmp_path), place, wanted, timeout=60)
    except RankError as error:  # a rank that hangs or dies is red, too
        found = [str(error)]
    assert any(found), f"{place} without its wait"
