"""Orders of backward and step that a loop may choose: each is the sum that it looks like, or is refused in words."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from tests.covering import pairs
from tests.distributed import on_ranks, run_ranks
from tests.megatron.zero.small import STAGES, WIDTH, Model, backward, engine_of, rows, train, whole
from tests.wires import accelerator_side


# ---- several backwards before one step -----------------------------------------------------------------------------


def one_by_one(engine: Engine, rank: int) -> None:
    backward(engine, 0, 1, 2, rank=rank)
    engine(rows(rank, 9))  # a forward without its backward changes nothing


def first_unsummed(engine: Engine, rank: int) -> None:
    """The second backward sums over the ranks what the first left on them, the third only its own."""
    engine.set_gradient_accumulation_boundary(False)
    backward(engine, 0, rank=rank)
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 1, 2, rank=rank)


def first_without_sync(engine: Engine, rank: int) -> None:
    if engine.zero_optimization_stage() > 1:
        with pytest.raises(ConfigError, match="no_sync needs stage 0 or 1"), engine.no_sync():
            pass
        return one_by_one(engine, rank)
    with engine.no_sync():
        with engine.no_sync():
            pass  # the outer block goes on
        backward(engine, 0, rank=rank)
    backward(engine, 1, 2, rank=rank)


def in_the_middle_unsummed(engine: Engine, rank: int) -> None:
    for number in range(3):
        engine.set_gradient_accumulation_boundary(number != 1)
        backward(engine, number, rank=rank)


ORDERS = (one_by_one, first_unsummed, first_without_sync, in_the_middle_unsummed)


@on_ranks(2)
def test_several_backwards_before_a_step_add_up(rank: int, world: int) -> None:
    for stage in STAGES:
        wanted = engine_of(stage)
        for _ in range(2):
            wanted.backward(torch.stack([wanted(rows(rank, number)) for number in range(3)]).sum())
            wanted.step()
        for order in ORDERS:
            engine = engine_of(stage)
            for _ in range(2):
                order(engine, rank)
                engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(wanted.get_global_grad_norm(), rel=1e-5)
            assert torch.allclose(whole(engine), whole(wanted), rtol=0, atol=1e-6), f"{order.__name__}, stage {stage}"


class Twice(nn.Module):
    """A block that is used twice, recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in (*self.blocks, *self.blocks):
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))  # type: ignore[no-untyped-call]
        return x.square().sum()


@on_ranks(2)
def test_a_block_used_twice_is_recomputed_rightly_or_refused(rank: int, world: int) -> None:
    model = Twice(False)
    model(rows(0, 0)).backward()
    wanted = float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())
    for stage in STAGES:
        engine, refused = engine_of(stage, Twice(False)), engine_of(stage, Twice(True))
        engine.backward(engine(rows(0, 0)))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(wanted, rel=1e-5)
        with pytest.raises(ConfigError, match=r"blocks\..* got a second gradient in one backward.*use_reentrant=False"):
            refused.backward(refused(rows(0, 0)))


class UsedByOne(nn.Linear):
    """It has a parameter that one rank does not use."""

    def __init__(self, uses_it: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.extra, self.uses_it = nn.Parameter(torch.ones(WIDTH)), uses_it

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.extra if self.uses_it else 0)


@on_ranks(2)
def test_a_forward_without_its_backward_changes_no_order(rank: int, world: int) -> None:
    """A rank that waited for the backward of its calls would reduce later than others."""
    section = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "ignore_unused_parameters": True}
    model = Model()
    model.blocks[2] = UsedByOne(uses_it=rank == 0)
    engine = engine_of(3, model, **section)
    for number in range(2):
        engine(rows(rank, 5))
        failed = engine(rows(rank, 6))
        failed.register_hook(_no_room)
        with pytest.raises(RuntimeError, match="no room"):
            engine.backward(failed)
        train(engine, number, rank=rank)


# ---- steps where none can be taken ---------------------------------------------------------------------------------


def step_in_no_sync(engine: Engine) -> None:
    with engine.no_sync():
        train(engine, 0)


def step_after_no_sync(engine: Engine) -> None:
    with engine.no_sync():
        backward(engine, 0)
    step_without_backward(engine)


def step_with_a_rest(engine: Engine) -> None:
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 0)
    step_after_no_sync(engine)


def step_without_backward(engine: Engine) -> None:
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def step_after_a_failed_backward(engine: Engine) -> None:
    loss = engine(rows(0, 0))
    loss.register_hook(_no_room)
    with pytest.raises(RuntimeError, match="no room"):
        engine.backward(loss)
    engine.step()


def _no_room(gradient: Tensor) -> None:
    raise RuntimeError("no room")


LOST = {step_after_a_failed_backward: r"step\(\) after a backward that failed \(RuntimeError\)",
        step_in_no_sync: r"step\(\) inside no_sync\(\)",
        **dict.fromkeys((step_after_no_sync, step_with_a_rest, step_without_backward), r"step\(\) without gradients")}


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (1, 2)])
def test_a_step_that_would_lose_gradients_is_refused(stage: int, accumulation: int) -> None:
    for loop, said in LOST.items():
        engine = engine_of(stage, accumulation=accumulation)
        before = whole(engine)
        with pytest.raises(ConfigError, match=said):
            loop(engine)
        assert torch.equal(whole(engine), before) and (engine.global_steps, engine.micro_steps) == (0, 0)


class Interrupted(Model):
    """Ctrl-C in the backward of its first block, when `armed`."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.armed:
            x.register_hook(self.interrupt)
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()

    def interrupt(self, gradient: Tensor) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("stage, accumulation", pairs(STAGES, (1, 2), each=1))
def test_a_refused_or_interrupted_backward_leaves_nothing_behind(stage: int, accumulation: int) -> None:
    plain, engine = engine_of(stage, Interrupted(), accumulation), engine_of(stage, Interrupted(), accumulation)
    with pytest.raises(ConfigError, match="call engine.backward"):
        engine(rows(0, 7)).backward()
    train(engine, *range(8, 7 + accumulation))
    engine.module.armed = True
    with pytest.raises(KeyboardInterrupt):
        backward(engine, 9)
    engine.module.armed = False
    for each in (plain, engine):
        train(each, *range(2 * accumulation))
    assert torch.equal(whole(engine), whole(plain)) and engine.global_steps == 2


@on_ranks(2)
def test_ranks_do_not_go_on_from_an_interrupted_backward(rank: int, world: int) -> None:
    for stage in STAGES:
        engine = engine_of(stage, Interrupted())
        engine.module.armed = True
        with pytest.raises(KeyboardInterrupt):
            backward(engine, 0, rank=rank)
        for go_on in (engine.step, lambda: engine.backward(torch.ones((), requires_grad=True))):
            with pytest.raises(ConfigError, match="an earlier backward or step was interrupted"):
                go_on()


# ---- parameters without a gradient ---------------------------------------------------------------------------------


class UsedOnRank0(Model):
    """Has the parameters on every rank, and uses them on rank 0 alone."""

    def __init__(self, rank: int) -> None:
        super().__init__(unused=True)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        extra = sum(p.sum() for p in self.blocks[1].extra.parameters())
        return loss + 0.01 * extra if self.rank == 0 else loss


def strict_steps(rank: int, world: int) -> None:
    """Steps with models whose parameters all get a gradient, or two get none, or none on rank 1."""
    for stage, uses in product(STAGES, ("used", "unused", "on rank 0")):
        if stage == 3 and uses == "on rank 0":  # there a model cannot use parameters of a block outside of it
            continue
        model = UsedOnRank0(rank) if uses == "on rank 0" else Model(unused=uses == "unused")
        engine = engine_of(stage, model, accumulation=2, ignore_unused_parameters=False)
        told = "^2 parameters got no gradient, blocks.1.extra.weight first"
        is_unused = uses == "unused" or uses == "on rank 0" and world == 2
        with pytest.raises(ConfigError, match=told) if is_unused else nullcontext() as caught:
            train(engine, *range(4), rank=rank)
        assert caught is None or ("on rank 1, not on all" in str(caught.value)) == (uses == "on rank 0")


@pytest.mark.parametrize("world", [1, 2])
def test_unused_parameters_are_counted_once_and_used_ones_never(world: int) -> None:
    run_ranks(strict_steps, world)


@on_ranks(2)
def test_a_backward_that_failed_on_one_rank_ends_all_of_them(rank: int, world: int) -> None:
    """One rank, or both, catch what their backward raised and go on with the next batch, as if nothing had been."""
    for stage, everywhere in ((1, False), (2, False), (1, True)):
        engine = engine_of(stage)

        def go_on() -> None:
            for number in range(3):
                loss = engine(rows(rank, number))
                if number == 1 and (rank == 1 or everywhere):
                    loss.register_hook(_no_room)
                    with pytest.raises(RuntimeError, match="no room"):
                        engine.backward(loss)
                else:
                    engine.backward(loss)
                    engine.step()

        with nullcontext() if everywhere else pytest.raises(ConfigError, match="a backward failed on some ranks only"):
            go_on()


# ---- a parameter that one rank does not use, where sums travel in order with parameters ------------------------------


class Choosing(nn.Module):
    """Two linears, the second used or not."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = zero.TiledLinear(WIDTH, WIDTH, in_splits=2, out_splits=2) if tiled else nn.Identity()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.inner(torch.tanh(self.first(x)))
        return x + self.second(x) if both else x


class Choices(nn.Module):
    def __init__(self, uses: tuple[int, ...], way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Choosing(way == "tiled") for _ in range(4))
        self.uses, self.way = uses, way

    def forward(self, x: Tensor, without: int) -> Tensor:
        for number in self.uses:
            block, both = self.blocks[number], number != without
            x = checkpoint(block, x.requires_grad_() if x.is_leaf else x, both, use_reentrant=self.way == "reentrant") \
                if self.way in ("recomputed", "reentrant") else block(x, both)
        return x.square().mean()


USES = [(0, 1, 2, 3), (3, 1, 0, 2), (1, 0, 1, 2, 3), (2, 0, 3, 1, 2, 1), (0, 1, 2, 3, 3, 2)]
"""What rank 1 leaves a part of is the last but one."""
CHOICES = [*((uses, "plain") for uses in USES), *((USES[0], way) for way in ("recomputed", "reentrant", "tiled")),
           (USES[-1], "recomputed"), (USES[-1], "tiled")]


def choose(rank: int, world: int, accelerator: bool) -> list[tuple[Tensor, list[tuple[str, str]]]]:
    """Weights and exchanges of steps in which rank 1 leaves out a part of one block, each way of using the blocks."""
    seen = []
    with accelerator_side(accelerator):
        for uses, way in CHOICES:
            engine = engine_of(3, Choices(uses, way))
            for number in range(3):
                with torch.no_grad():
                    engine(rows(rank, number), -1)  # an evaluation in between is no forward of the backward
                without = uses[-2] if rank == 1 and number else -1
                engine.backward(engine(rows(rank, number), without))
                engine.step()
            # Of two forwards the sum; nothing may be sent before the second.
            more = 0 if way == "reentrant" else engine(rows(rank, 4), -1)
            engine.backward(engine(rows(rank, 3), -1) + more)
            engine.step()
            engine.wait_for_param_gathers()
            entries = list(engine.core.log.snapshot(rank).entries)
            seen.append((whole(engine), entries))
    return seen


def test_a_parameter_unused_on_one_rank_leaves_the_order_of_exchanges_alone() -> None:
    """On an accelerator all of them share one queue, and elsewhere gathers do."""
    plain, other = run_ranks(choose, 2, False)
    assert [noted for _, noted in plain] == [noted for _, noted in other]
    first, second = run_ranks(choose, 2, True)
    for (uses, way), (_, noted) in zip(CHOICES, plain, strict=True):
        # What a backward has used up is not gathered again, however the order of blocks was guessed.
        assert way != "plain" or noted.count((f"blocks.{uses[-2]}", "backward")) <= 4, uses
    for case, (weights, _), (ours, noted), (_, theirs) in zip(CHOICES, plain, first, second, strict=True):
        assert noted == theirs, case
        assert torch.allclose(ours, weights, atol=1e-6), case
