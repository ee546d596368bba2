"""Models and loops that are not GPT-2's: the engine at every stage is a plain loop over the same model (models.py).

Each data parallel rank has a share of the rows; the plain loop sees the shares one by one and takes their mean.
A *script* is what a loop does in one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megatron.zero.api.engine import Engine
from mpu import groups
from tests.distributed import RankError, run_ranks
from tests.late_wire import late_wire
from tests.megatron.zero.models import (WIDTH, BlockTwice, Dicts, EndsInABlock, Experts, Frozen, FrozenTwice, InPlace,
                                        LayerDrop, Net, OddSizes, Opaque, Passes, Permuted, RankDrop, ReadLater,
                                        RootReadsBlock, ThreeElements, Tied, Words)
from tests.megatron.zero.offload.test_equal import everywhere
from tests.megatron.zero.run import DTYPES, PlainLoop, configure, engine_around, step, weights

STEPS, LR = 4, 1e-2

Script = Callable[[Engine, Tensor], None]  # one optimizer step on this rank's share of the rows


def plainly(engine: Engine, x: Tensor) -> None:
    engine.backward(engine(x))
    step(engine, LR)


def evaluating(engine: Engine, x: Tensor) -> None:
    """Forwards without gradients before, and between forward and backward."""
    with torch.no_grad():
        engine(x + 1)
    loss = engine(x)
    with torch.no_grad():
        engine(x + 2)
    engine.backward(loss)
    step(engine, LR)


def summing(engine: Engine, x: Tensor) -> None:
    one, two = x.chunk(2)
    engine.backward((engine(one) + engine(two)) / 2)
    step(engine, LR)


def queueing(engine: Engine, x: Tensor) -> None:
    """Two forwards, then two backwards, of two micro-batches."""
    losses = [engine(part) for part in x.chunk(2)]
    for loss in losses:
        engine.backward(loss)
        step(engine, LR)


def failing_forward(engine: Engine, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), broken(engine.module, backward=False):
        engine(x)
    plainly(engine, x)


def failing_backward(engine: Engine, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), broken(engine.module, backward=True):
        engine.backward(engine(x))
    plainly(engine, x)


@contextmanager
def broken(module: nn.Module, backward: bool) -> Iterator[None]:
    """The second block fails within, on all ranks."""

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    def fail_later(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(fail)

    layer = module.get_submodule("blocks.1.narrow")
    handle = layer.register_forward_hook(fail_later if backward else fail)
    try:
        yield
    finally:
        handle.remove()


def rows(step: int) -> Tensor:
    """[8, WIDTH]; the last column is the number of the step."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    x[:, -1] = step
    return x


class Case(NamedTuple):
    model: type[nn.Module]
    script: Script = plainly
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.model.__name__} {self.script.__name__} {self.precision}"


def train(rank: int, world: int, cases: list[Case], stage: int, drive: Path | None = None) -> list[dict[str, Tensor]]:
    """The weights each case ends with. A weight that is read before it has arrived is read as nan. State is on a drive
    where one is given."""
    grid = groups.build(1)
    ends = []
    with late_wire():
        for model, script, precision in cases:
            settings: dict[str, Any] = {precision: True} if precision != "fp32" else {}
            if drive is not None:
                settings |= everywhere(drive, stage)
            config = configure(zero_stage=stage, **settings)
            engine = engine_around(model(), config, grid, accumulation=2 if script is queueing else 1)
            for number in range(STEPS):
                script(engine, rows(number).to(DTYPES[precision]).chunk(world)[rank])
            ends.append(weights(engine))
    return ends


@cache
def plain(model: type[nn.Module], world: int, precision: str) -> dict[str, Tensor]:
    """The weights of a plain loop over the same rows."""
    dtype = DTYPES[precision]
    loop = PlainLoop(model(), configure(), dtype)
    for number in range(STEPS):
        shares = rows(number).to(dtype).chunk(world)
        loop.step(lambda net: torch.stack([net(share) for share in shares]).mean(), LR)
    loop.load_model()
    return {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}


TOLERANCES = {
    "fp32": 1e-5,  # ranks are added up in another order (measured 2e-7)
    "bf16": 4e-3,  # one rounding of a weight below 1 (measured 0)
}


def check(cases: list[Case], stage: int, world: int = 2, drive: Path | None = None) -> None:
    for number, ends in enumerate(run_ranks(train, world, cases, stage, drive, timeout=60 if drive is None else 300)):
        for case, found in zip(cases, ends, strict=True):
            wanted = plain(case.model, world, case.precision)
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCES[case.precision],
                                       msg=lambda text: f"{case} on rank {number}: {text}")


ALL = (0, 1, 2, 3)

WORKS: dict[Case, tuple[int, ...]] = {
    **{Case(model): ALL for model in (
        Net, OddSizes, ThreeElements, EndsInABlock, Passes, FrozenTwice, Dicts, BlockTwice, LayerDrop, Frozen, InPlace,
        Permuted, Words, Tied, Experts)},
    **{Case(Net, script): ALL for script in (evaluating, summing, queueing, failing_forward, failing_backward)},
    **{Case(Words, script): ALL for script in (evaluating, summing, queueing)},
    **{Case(model, precision="bf16"): ALL for model in (Net, OddSizes, Frozen, InPlace)},
    **{Case(model): (0, 1, 2) for model in (RootReadsBlock, RankDrop, ReadLater)},
}
"""Case -> stages at which it is as the plain loop."""


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow),
                                   pytest.param(2, marks=pytest.mark.slow), 3])
def test_an_engine_around_any_model_is_the_plain_loop(stage: int) -> None:
    check([case for case, stages in WORKS.items() if stage in stages], stage)


@pytest.mark.parametrize("stage, part", [pytest.param(1, slice(None), marks=pytest.mark.slow), (3, slice(0, None, 3))],
                         ids=str)
def test_so_it_is_with_its_state_on_a_drive(stage: int, part: slice, tmp_path: Path) -> None:
    check([case for case, stages in WORKS.items() if stage in stages][part], stage, drive=tmp_path)


@pytest.mark.parametrize("model, error", [
    (RankDrop, "the ranks ran different blocks"),  # they have received each other's
    (RootReadsBlock, "cannot be used here"),  # a placeholder
    (ReadLater, "while it was split"),  # its memory is gone
    (Opaque, "blocks.0 returned a Boxed, in which no tensor can be found"),
])
def test_what_stage_3_cannot_run_fails_and_never_trains_wrongly(model: type[nn.Module], error: str) -> None:
    with pytest.raises(RankError, match=error):
        run_ranks(train, 2, [Case(model)], 3)
