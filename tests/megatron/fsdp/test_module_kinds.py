"""State dicts of every kind of module through both faces: those of the unwrapped model, there and back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.fsdp import (FSDP, MixedPrecisionPolicy, StateDictOptions, fully_shard, get_model_state_dict,
                           set_model_state_dict)
from tests.distributed import run_ranks


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 5))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.append(nn.Linear(3, 5, bias=False))
        self[3].weight = self[2].weight


class Buffers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self[1].running_mean.fill_(0.25)  # type: ignore[union-attr, operator]
        self[0].register_buffer("scale", torch.full((3,), 0.25))
        self[1].register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("unsaved", torch.full((2,), 0.25), persistent=False)


class Versioned(nn.Linear):
    """Version 1 stored half of the weight."""

    _version = 2

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
                              *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


class Versions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Versioned(5, 5), nn.Sequential(Versioned(5, 5), nn.ReLU()))


def of_version_1(model: nn.Module) -> Any:
    """What version 1 of its modules would have saved."""
    state = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, Versioned):
            state[f"{path}.weight"] = state[f"{path}.weight"] / 2
            state._metadata[path]["version"] = 1
    return state


class Hooked(Plain):
    """Hooks that read weights, and rename an entry, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self[0].register_state_dict_post_hook(self.after_saving)
        self[0].register_load_state_dict_pre_hook(self.before_loading)
        for module in (self, self[0]):
            module.register_load_state_dict_post_hook(self.after_loading)
        self.loads = 0

    @staticmethod
    def after_saving(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}norm"] = module.weight.detach().norm()
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").T.contiguous()

    @staticmethod
    def before_loading(module: Any, state: dict[str, Any], prefix: str, *more: Any) -> None:
        state.pop(f"{prefix}norm")
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").T

    def after_loading(self, module: Any, keys: Any) -> None:
        self.loads += 1


class Extra(Plain):
    """Extra state, frozen parameters, and a state dict of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"seen": [3]}
        self[0].requires_grad_(False)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def state_dict(self, *given: Any, **named: Any) -> Any:
        state = super().state_dict(*given, **named)
        state["made"] = torch.ones(1)
        return state

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        metadata = state._metadata
        state = OrderedDict((name, value) for name, value in state.items() if name != "made")
        state._metadata = metadata  # type: ignore[attr-defined]
        return super().load_state_dict(state, strict, assign)


KINDS: dict[str, type[nn.Module]] = {
    kind.__name__.lower(): kind for kind in (Tied, Buffers, Versions, Hooked, Extra)}
WAYS = ("wrapped", "wrapped inside", "in a plain module", "torch", "torch inside")
BF16 = torch.bfloat16


def model_of(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = KINDS[kind]()
    if seed:
        for buffer in model.buffers():
            buffer.zero_()
    return model


def sharded(model: Any, way: str, mixed: bool) -> nn.Module:
    wrapping = {"mixed_precision": True, "compute_dtype": BF16} if mixed else {}
    policy = MixedPrecisionPolicy(param_dtype=BF16) if mixed else MixedPrecisionPolicy()
    if way in ("torch inside",):
        fully_shard(model[0], mp_policy=policy)
    if way in ("torch", "torch inside"):
        return fully_shard(model, mp_policy=policy)
    if way == "wrapped":
        return FSDP(model, **wrapping)
    for name, child in [*model.named_children()]:
        if any(True for _ in child.parameters()):
            setattr(model, name, FSDP(child, **wrapping))
    return model if way == "in a plain module" else FSDP(model, **wrapping)


def about(found: Any, expected: Any) -> list[str]:
    """Differences but for values, of which a rank may have a part."""
    wrong = [] if type(found) is type(expected) is OrderedDict else [f"type {type(found).__name__}"]
    wrong += [] if list(found) == list(expected) else [f"names {list(found)}"]
    wrong += [] if getattr(found, "_metadata", None) == expected._metadata else ["metadata"]
    return wrong + [f"dtype of {name}" for name in found.keys() & expected.keys()
                    if getattr(found[name], "dtype", None) != getattr(expected[name], "dtype", None)]


def differences(found: Any, expected: Any) -> list[str]:
    """Type, names, their order, metadata, shapes, precisions and bits."""
    return about(found, expected) + [name for name in found.keys() & expected.keys() if not (
        torch.equal(found[name], expected[name])
        and not found[name].requires_grad if isinstance(found[name], Tensor) else found[name] == expected[name])]


def full(model: nn.Module, way: str) -> Any:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) if way.startswith("torch") \
        else model.state_dict()


def round_trips(rank: int, world: int, kinds: list[str], ways: list[str], mixed: bool) -> dict[str, Any]:
    """What differs from the unwrapped model, by way and direction."""
    found: dict[str, Any] = {}
    for kind in kinds:
        expected, old = model_of(kind).state_dict(), model_of(kind, 1).state_dict()
        for way in ways:
            cell = f"{kind}, {way}"
            model = sharded(model_of(kind), way, mixed)
            found[f"{cell}: saved"] = differences(full(model, way), expected)
            model.load_state_dict(old)
            found[f"{cell}: loaded"] = differences(full(model, way), old)
            if kind == "hooked" and model.loads != 2:
                found[f"{cell}: hooks after a load"] = [model.loads]
            if way == "in a plain module":
                model.load_state_dict(full(sharded(model_of(kind), way, mixed), way))
            else:
                set_model_state_dict(model, full(sharded(model_of(kind), way, mixed), way))
            found[f"{cell}: loaded what was saved"] = differences(full(model, way), expected)
            model.load_state_dict(of_version_1(model_of(kind)))
            found[f"{cell}: loaded version 1"] = differences(full(model, way), expected)
            plain = model_of(kind, 1)
            plain.load_state_dict(full(model, way))
            found[f"{cell}: into a plain model"] = differences(plain.state_dict(), expected)
            if kind != "hooked" and way != "in a plain module":  # that hook's norm of a part is refused by name
                found[f"{cell}: in parts"] = about(get_model_state_dict(model), expected)
                if not way.startswith("torch"):
                    found[f"{cell}: local"] = about(model.local_state_dict(), expected)
                elif not any(isinstance(one, FSDP) for one in model.modules()):
                    found[f"{cell}: sharded"] = about(model.state_dict(), expected)
            if way != "in a plain module":
                first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(model, of_version_1(model_of(kind, 1)) if rank == 0 else {}, options=first)
                found[f"{cell}: from the first rank"] = differences(full(model, way), old)
                with pytest.raises((ConfigError, RuntimeError)):
                    model.load_state_dict(expected, assign=True)
                found[f"{cell}: after assign"] = differences(full(model, way), old)
    return {cell: wrong for cell, wrong in found.items() if wrong}


def check(found: list[dict[str, Any]]) -> None:
    assert not any(found), found


@pytest.mark.parametrize("mixed", [False, True])
def test_state_dicts_of_some_modules_are_those_of_the_unwrapped_ones(mixed: bool) -> None:
    check(run_ranks(round_trips, 2, ["buffers", "versions", "hooked"], ["wrapped inside", "torch"], mixed))


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_of_every_module_are_those_of_the_unwrapped_one(kind: str, world: int, mixed: bool) -> None:
    ways = [way for way in WAYS if (way, kind) != ("in a plain module", "tied")]  # nothing sharded has both uses
    check(run_ranks(round_trips, world, [kind], ways, mixed))
