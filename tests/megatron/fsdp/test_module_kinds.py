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
from tests.distributed import on_ranks


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 5))


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
    kind.__name__.lower(): kind for kind in (Versions, Hooked, Extra)}


def model_of(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[kind]()


def sharded(model: Any, way: str) -> nn.Module:
    if way == "torch":
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    wrapping = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
    for name, child in [*model.named_children()]:
        if any(True for _ in child.parameters()):
            setattr(model, name, FSDP(child, **wrapping))
    return FSDP(model, **wrapping)


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


def full(model: nn.Module) -> Any:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_state_dicts_are_those_of_the_unwrapped_model(rank: int, world: int, kind: str) -> None:
    """Saved, loaded, loaded in an old version, into a plain model, in parts, and from the first rank alone."""
    expected, old = model_of(kind).state_dict(), model_of(kind, 1).state_dict()
    for way in ("wrapped inside", "torch"):
        model: Any = sharded(model_of(kind), way)
        assert not differences(full(model), expected)
        if way != "torch":
            assert not differences(model.state_dict(), expected)
        model.load_state_dict(old)
        assert not differences(full(model), old)
        assert kind != "hooked" or model.loads == 2
        set_model_state_dict(model, full(sharded(model_of(kind), way)))
        assert not differences(full(model), expected)
        model.load_state_dict(of_version_1(model_of(kind)))
        assert not differences(full(model), expected)
        plain = model_of(kind, 1)
        plain.load_state_dict(full(model))
        assert not differences(plain.state_dict(), expected)
        if kind != "hooked":  # that hook's norm of a part is refused by name
            assert not about(get_model_state_dict(model), expected)
            assert not about(model.state_dict() if way == "torch" else model.local_state_dict(), expected)
        first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, of_version_1(model_of(kind, 1)) if rank == 0 else {}, options=first)
        assert not differences(full(model), old)
        with pytest.raises((ConfigError, RuntimeError)):
            model.load_state_dict(expected, assign=True)
        assert not differences(full(model), old)
