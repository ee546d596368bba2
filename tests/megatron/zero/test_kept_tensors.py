"""Tensors that a user takes of a gathered weight stay valid, whatever made them and whatever the engine does next; a
deep copy of a model is a plain model; and what nobody has any more is gone."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.fsdp import FullyShardedDataParallel, fully_shard, summon_full_params
from megatron.train.build import model as build_model
from megatron.zero.api.engine import Engine
from mpu import groups
from tests.distributed import on_ranks, run_ranks
from tests.megatron.zero import models
from tests.megatron.zero.offload.test_equal import batches, train as train_gpt2
from tests.megatron.zero.offload.test_use import configured
from tests.megatron.zero.run import built, gpt2_loss
from tests.megatron.zero.small import Model, engine_of

# ---- ways to keep a weight: each gives a function that reads what was kept -------------------------------------------

Read = Callable[[], Tensor]
Way = Callable[[nn.Parameter], Read]


def saved_to_a_file(p: nn.Parameter) -> Read:
    kept = p.detach()

    def read() -> Tensor:
        file = io.BytesIO()
        torch.save({"weight": kept}, file)
        file.seek(0)
        loaded: Tensor = torch.load(file)["weight"]
        return loaded

    return read


def storage(p: nn.Parameter) -> Read:
    kept, place = p.untyped_storage(), (p.storage_offset(), p.shape)
    empty = torch.empty(0, dtype=p.dtype)
    return lambda: empty.set_(kept, *place)


WAYS: dict[str, Way] = {
    "detach": lambda p: lambda kept=p.detach(): kept,
    "data": lambda p: lambda kept=p.data: kept,
    "cpu": lambda p: lambda kept=p.detach().cpu(): kept,
    "to": lambda p: lambda kept=p.to(p.dtype).detach(): kept,
    "numpy": lambda p: lambda kept=p.detach().float().numpy(): torch.from_numpy(kept),
    "dlpack": lambda p: lambda kept=torch.from_dlpack(p.detach()): kept,
    "view": lambda p: lambda kept=p.view(-1): kept.detach().view(p.shape),
    "transpose": lambda p: lambda kept=p.t(): kept.detach().t(),
    "row": lambda p: lambda kept=p[0]: kept.detach(),
    "deepcopy": lambda p: lambda kept=copy.deepcopy(p): kept.detach(),
    "file": saved_to_a_file,
    "storage": storage,
}

# ---- engines and moments ---------------------------------------------------------------------------------------------

Step = Callable[[Tensor], None]


def with_engine(stage: int, dtype: str) -> tuple[nn.Module, Step, Any]:
    engine = engine_of(stage, models.Net(), precision=dtype)

    def step(x: Tensor) -> None:
        engine.backward(engine(x))
        engine.step()

    return engine.module, step, lambda: zero.GatheredParameters(engine.module.parameters())


def with_fsdp(wrap: Callable[[nn.Module], Any]) -> tuple[nn.Module, Step, Any]:
    model: Any = models.Net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block) or block
    model = wrap(model) or model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step, lambda: summon_full_params(model)


ENGINES: dict[str, Callable[[], tuple[nn.Module, Step, Any]]] = {
    **{f"stage {stage} {name}": partial(with_engine, stage, name) for stage in range(4) for name in ("bf16", "fp32")},
    "FullyShardedDataParallel": partial(with_fsdp, FullyShardedDataParallel),
    "fully_shard": partial(with_fsdp, lambda module: (fully_shard(module), None)[1]),
}

Kept = list[tuple[str, Tensor, Read]]  # who kept it, the right values, and how to read what was kept


def linear_of(model: nn.Module) -> nn.Module:
    """One in the middle, whose weights are released between its forward and its backward."""
    return next(module for name, module in model.named_modules()
                if "blocks.1" in name and isinstance(module, nn.Linear))


@contextmanager
def hooked(module: nn.Module, register: str, way: Way, kept: Kept) -> Iterator[None]:
    def keep(*given: Any) -> None:
        weight = module.weight
        kept.append((register, weight.detach().float().clone(), way(weight)))

    handle = getattr(module, register)(keep)
    yield
    handle.remove()


HOOKS = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook")


def wrong_reads(rank: int, world: int, names: list[tuple[str, str]]) -> list[str]:
    """(engine, way): who read something else than the weight that was kept, or than the weight of today."""
    wrong = []
    for engine, way in names:
        torch.manual_seed(0)
        model, step, gathered = ENGINES[engine]()
        linear, x, kept = linear_of(model), torch.randn(2, models.WIDTH, requires_grad=True), Kept()
        for hook in HOOKS:
            with hooked(linear, hook, WAYS[way], kept):
                step(x.to(linear.weight.dtype))
                wrong += readers_of_garbage(kept, gathered, linear, f"{engine}: {way}")
        with gathered():
            kept.append(("gathered", linear.weight.detach().float().clone(), WAYS[way](linear.weight)))
        wrong += readers_of_garbage(kept, gathered, linear, f"{engine}: {way}")
        step(x.to(linear.weight.dtype))
        wrong += readers_of_garbage(kept, gathered, linear, f"{engine}: {way}, after a step")
    return wrong


def readers_of_garbage(kept: Kept, gathered: Any, linear: nn.Module, where: str) -> list[str]:
    with gathered():
        today = linear.weight.detach().float().clone()
    return [f"{where}, {who}" for who, then, read in kept
            if not any(is_beginning(read(), weight) for weight in (then, today))]


def is_beginning(found: Tensor, weight: Tensor) -> bool:
    return torch.equal(found.float().flatten(), weight.flatten()[: found.numel()])


EVERY = [*product(ENGINES, WAYS)]


@pytest.mark.parametrize("world", [1, 2])
def test_no_kept_tensor_is_garbage(world: int) -> None:
    names = [(engine, way) for number, (engine, way) in enumerate(EVERY) if number % (len(WAYS) + 1) == world - 1]
    assert run_ranks(wrong_reads, world, names) == [[]] * world


# ---- a deep copy of a model that an engine trains is a plain model ---------------------------------------------------


def taught(model: nn.Module) -> list[Tensor]:
    """The loss and the gradients of a plain backward."""
    loss = model(torch.linspace(-1, 1, 4 * models.WIDTH).view(4, models.WIDTH))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_deep_copy_is_a_plain_model(rank: int, world: int, stage: int) -> None:
    model: Any = models.Net()
    engine = engine_of(stage, model)

    def step() -> Tensor:
        loss: Tensor = engine(torch.linspace(-1, 1, 4 * models.WIDTH).view(4, models.WIDTH))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    step()
    with zero.GatheredParameters(list(model.parameters())):
        plain = models.Net()
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        copies = [copy.deepcopy(model), copy.deepcopy(engine.module)]
        block = copy.deepcopy(model.blocks[1])
    expected = taught(plain)
    for made in (*copies, copy.deepcopy(copies[0])):
        found = taught(made)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert all(map(torch.equal, block.parameters(), plain.blocks[1].parameters()))
    block(torch.ones(1, models.WIDTH)).sum().backward()
    copies[0].load_state_dict(models.Net().state_dict())
    assert step() == expected[0], "the engine goes on"
    if stage == 3:
        with pytest.raises(ConfigError, match=r"first\.weight.* cannot be used here"):
            copy.deepcopy(model)


# ---- an engine goes with its model, its files on a drive and its threads ---------------------------------------------


Use = Callable[[Engine, Path], object]


def destroy(engine: Engine, folder: Path) -> None:
    train_gpt2(engine.core, batches(1))
    engine.destroy()


def all_kinds_of_things(engine: Engine, folder: Path) -> None:
    train_gpt2(engine.core, batches(2))
    engine.save_checkpoint(folder, in_background=True)
    engine.load_checkpoint(folder)
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        engine.module.wte.weight.add_(1)
    engine.core.backward(gpt2_loss(engine.core, batches(1)[0]).mean())


def errors(engine: Engine, folder: Path) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError

    with suppress(RuntimeError), zero.GatheredParameters(engine.module.parameters()):
        fail()
    with suppress(RuntimeError):
        engine.module.wte.register_forward_hook(fail)
        train_gpt2(engine.core, batches(1))


def left(rank: int, world: int, drive: Path, folder: Path, use: Use, is_on_drive: bool) -> list[str]:
    threads = set(threading.enumerate())
    things = things_of(drive if is_on_drive else None, folder, use)
    gc.collect()
    latest = time.monotonic() + 30  # what is on its way to the drive holds the files until it is there
    while (rest := remaining(things, drive, rank, threads)) and time.monotonic() < latest:
        time.sleep(0.01)
    return rest


def remaining(things: list[weakref.ref[object]], drive: Path, rank: int, before: set[threading.Thread]) -> list[str]:
    return [*(type(it).__name__ for thing in things if (it := thing()) is not None),
            *(path.name for path in drive.glob(f"*-rank{rank}")),
            *(thread.name for thread in set(threading.enumerate()) - before)]


def things_of(drive: Path | None, folder: Path, use: Use) -> list[weakref.ref[object]]:
    engine = built(configured(drive))
    use(engine, folder)
    return [weakref.ref(thing) for thing in (engine, engine.core, engine.module, *engine.core.buckets,
                                             *engine.module.parameters())]


@pytest.mark.parametrize("use, is_on_drive, ranks", [
    (destroy, False, 1), (errors, True, 1), (errors, False, 1), (all_kinds_of_things, True, 2)])
def test_an_engine_goes_with_its_model(tmp_path: Path, is_on_drive: bool, use: Use, ranks: int) -> None:
    (tmp_path / "drive").mkdir()
    assert run_ranks(left, ranks, tmp_path / "drive", tmp_path, use, is_on_drive) == [[]] * ranks


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
