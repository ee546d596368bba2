"""What nobody has any more is gone: an engine with its model, its files on a drive and its threads; a model alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megatron import zero
from megatron.errors import TrainerError
from megatron.train.build import model as build_model
from megatron.zero.api.engine import Engine
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.offload.test_equal import batches, train
from tests.megatron.zero.offload.test_use import built, configured
from tests.megatron.zero.run import gpt2_loss
from tests.megatron.zero.small import Model

Use = Callable[[Engine, Path], object]


def nothing(engine: Engine, folder: Path) -> None:
    """The engine is built."""


def destroy(engine: Engine, folder: Path) -> None:
    train(engine.core, batches(1))
    engine.destroy()


def all_kinds_of_things(engine: Engine, folder: Path) -> None:
    train(engine.core, batches(2))
    engine.save_checkpoint(folder, in_background=True)
    engine.load_checkpoint(folder)
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        engine.module.wte.weight.add_(1)
    engine.core.backward(gpt2_loss(engine.core, batches(1)[0]).mean())


def errors(engine: Engine, folder: Path) -> None:
    (folder / "file").touch()
    with suppress(TrainerError, OSError):
        engine.save_checkpoint(folder / "file")
    with suppress(RuntimeError), zero.GatheredParameters(engine.module.parameters()):
        raise RuntimeError
    with suppress(RuntimeError):
        engine.module.wte.register_forward_hook(fail)
        train(engine.core, batches(1))


def fail(*arguments: object) -> None:
    raise RuntimeError


def left(rank: int, world: int, drive: Path, folder: Path, use: Use, is_on_drive: bool = True) -> list[str]:
    threads = set(threading.enumerate())
    things = made(drive if is_on_drive else None, folder, use)
    gc.collect()
    latest = time.monotonic() + 30  # what is on its way to the drive holds the files until it is there
    while (rest := remaining(things, drive, rank, threads)) and time.monotonic() < latest:
        time.sleep(0.01)
    return rest


def remaining(things: list[weakref.ref[object]], drive: Path, rank: int, before: set[threading.Thread]) -> list[str]:
    return [*(type(it).__name__ for thing in things if (it := thing()) is not None),
            *(path.name for path in drive.glob(f"*-rank{rank}")),
            *(thread.name for thread in set(threading.enumerate()) - before)]


def made(drive: Path | None, folder: Path, use: Use) -> list[weakref.ref[object]]:
    engine = built(configured(drive))
    use(engine, folder)
    return [weakref.ref(thing) for thing in (engine, engine.core, engine.module, *engine.core.buckets,
                                             *engine.module.parameters())]


@pytest.mark.parametrize("use, is_on_drive", [(nothing, True), (destroy, False), (errors, True), (errors, False)])
def test_an_engine_goes_with_its_model(tmp_path: Path, is_on_drive: bool, use: Use) -> None:
    (tmp_path / "drive").mkdir()
    assert left(0, 1, tmp_path / "drive", tmp_path, use, is_on_drive) == []


def test_engines_of_several_ranks_go(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    assert run_ranks(left, 2, tmp_path / "drive", tmp_path, all_kinds_of_things) == [[]] * 2


def test_a_model_that_waits_for_an_engine_goes(tmp_path: Path) -> None:
    grid = groups.build(1)
    with zero.Init():
        models = [Model()]
    models.append(build_model(configured(None), grid))
    parts = [weakref.ref(part) for model in models for part in (model, *model.parameters())]
    for _ in range(2):
        assert all(part() is not None for part in parts)
        with zero.GatheredParameters([p for model in models for p in model.parameters()], modifier_rank=0):
            torch.nn.init.ones_(next(models[0].parameters()))
        gc.collect()
    models.clear()
    gc.collect()
    assert not [part() for part in parts if part() is not None]
