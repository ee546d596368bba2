"""A tensor that a user takes of a gathered weight stays valid, whatever made it and whatever the engine does next."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.fsdp import FullyShardedDataParallel, fully_shard, summon_full_params
from tests.distributed import run_ranks

WIDTH = 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


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
    engine = zero.initialize(model=Model(), config={
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]

    def step(x: Tensor) -> None:
        engine.backward(engine(x))
        engine.step()

    return engine.module, step, lambda: zero.GatheredParameters(engine.module.parameters())


def with_fsdp(shard: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Step, Any]:
    model = shard(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step, lambda: summon_full_params(model)


def in_blocks(wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return wrap(model)


def sharded_in_place(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


ENGINES: dict[str, Callable[[], tuple[nn.Module, Step, Any]]] = {
    **{f"stage {stage} {name}": partial(with_engine, stage, name) for stage in range(4) for name in ("bf16", "fp32")},
    "FullyShardedDataParallel": partial(with_fsdp, partial(in_blocks, FullyShardedDataParallel)),
    "fully_shard": partial(with_fsdp, partial(in_blocks, sharded_in_place)),
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
        linear, x, kept = linear_of(model), torch.randn(2, WIDTH, requires_grad=True), Kept()
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
    """Each engine and each way once."""
    names = [(engine, way) for number, (engine, way) in enumerate(EVERY) if number % (len(WAYS) + 1) == world - 1]
    assert run_ranks(wrong_reads, world, names) == [[]] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_none_is_in_any_cell(world: int) -> None:
    assert run_ranks(wrong_reads, world, EVERY, timeout=600) == [[]] * world
