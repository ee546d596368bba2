"""Which modules are wrapped: FairScale's helpers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.fsdp import (FSDP, auto_wrap, checkpoint_wrapper, config_auto_wrap_policy, default_auto_wrap_policy,
                           enable_wrap, transformer_auto_wrap_policy, wrap)
from tests.megatron.zero.models import Block, Net


def wrapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDP)]


def test_wrap_takes_the_arguments_of_the_context_the_modules_and_its_own() -> None:
    layer = nn.Linear(2, 2)
    assert wrap(layer) is layer and auto_wrap(layer) is layer, "it does nothing elsewhere"
    layer.wrapper_config = {"fp32_reduce_scatter": True}
    with enable_wrap(reshard_after_forward=False, compute_dtype=torch.float16, mixed_precision=True):
        with enable_wrap():
            assert wrap(nn.Linear(2, 2)).arguments.reshard_after_forward is True
        given = wrap(layer, compute_dtype=torch.bfloat16).arguments
    assert given.reshard_after_forward is False and given.compute_dtype is torch.bfloat16 and given.fp32_reduce_scatter
    assert wrap(layer) is layer


def test_auto_wrap_wraps_from_the_inside_out_by_size() -> None:
    with enable_wrap():
        model = auto_wrap(Net(), partial(default_auto_wrap_policy, min_num_params=80))
    assert wrapped(model) == ["", "blocks.0", "blocks.1", "blocks.2"]
    with enable_wrap(partial(default_auto_wrap_policy, min_num_params=10**6)):
        assert wrapped(auto_wrap(Net())) == []
    with enable_wrap():
        assert wrapped(auto_wrap(Net())) == []  # 1e8 elements


def test_neither_lists_nor_attention_are_wrapped() -> None:
    everything = partial(default_auto_wrap_policy, min_num_params=0)
    with enable_wrap():
        lists = auto_wrap(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), everything)  # type: ignore[arg-type]
        attention = auto_wrap(nn.Sequential(nn.MultiheadAttention(4, 2)), everything)
    assert wrapped(lists) == ["", "0.0"]
    assert wrapped(attention) == [""]  # its forward reads the weights of a child


def test_by_configuration_and_by_class() -> None:
    model = Net()
    model.blocks[1].wrapper_config = {"reshard_after_forward": False}
    with enable_wrap():
        assert wrapped(auto_wrap(model, config_auto_wrap_policy)) == ["blocks.1"]
        by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        assert wrapped(auto_wrap(Net(), by_class)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_names_are_those_of_the_model_inside_and_parameters_are_found_once() -> None:
    with enable_wrap():
        model = FSDP(auto_wrap(Net(), partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})))
    found, expected = ([(name, one.numel()) for name, one in net.named_parameters()] for net in (model, Net()))
    assert found == expected and model.first is model.module.first and model.blocks[1].wide is not None


def test_what_can_do_nothing_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    FSDP(Net(), flatten_parameters=False, bucket_cap_mb=50, disable_reshard_on_root=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("has no effect" in line for line in lines)
    FSDP(Net(), flatten_parameters=True, bucket_cap_mb=25)
    assert not capsys.readouterr().out


class Odd(nn.Module):
    """Keyword arguments, and outputs that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.runs = 0

    def forward(self, x: torch.Tensor, *, scale: float, names: tuple[str, ...], mask: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, dict[str, object]]:
        self.runs += 1
        y = (self.layer(x) * scale).tanh()
        return y if mask is None else y * mask, {"names": names, "rows": len(x), "twice": 2 * y}


@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_checkpoint_wrapper_passes_everything_through(offload_to_cpu: bool) -> None:
    torch.manual_seed(0)
    plain, kept = Odd(), Odd()
    kept.load_state_dict(plain.state_dict())
    kept = checkpoint_wrapper(kept, offload_to_cpu=offload_to_cpu)
    x = torch.randn(2, 3)
    results = []
    for module in (plain, kept):
        mine = x.clone().requires_grad_()
        y, more = module(mine, scale=2.0, names=("a", "b"), mask=torch.ones(3))
        assert more["names"] == ("a", "b") and more["rows"] == 2
        (y.sum() + more["twice"].square().sum()).backward()  # type: ignore[attr-defined]
        results.append([mine.grad, *(parameter.grad for parameter in module.parameters())])
    assert all(map(torch.equal, *results))
    assert (plain.runs, kept.runs) == (1, 2) and list(kept.state_dict()) == list(plain.state_dict())


def test_auto_wrap_of_what_is_wrapped_is_refused() -> None:
    with enable_wrap(), pytest.raises(ConfigError, match="wrapped"):
        auto_wrap(FSDP(Net()))
