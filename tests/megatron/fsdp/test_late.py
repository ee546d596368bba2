"""What a module has beside its parameters, and what it is given after it was sharded: buffers, modules, hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.errors import ConfigError
from megatron.fsdp import FSDP, checkpoint_wrapper, disable_checkpointing, fully_shard
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import around, batch, whole
from tests.megatron.zero.models import Net


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


# ---- buffers -----------------------------------------------------------------------------------------------------


def started(rank: int, world: int, way: str, persistent: bool) -> list[str]:
    """With buffers and weights that differ, with sync_module_states; with buffers that do, without."""
    found = []
    for sync in (True, False):
        model = Net()
        model.blocks[0].register_buffer("scale", torch.full((2,), float(rank)), persistent=persistent)
        with torch.no_grad():
            model.last.bias += rank * sync
        try:
            assert torch.equal(whole(around(model, way, sync_module_states=sync))["last.bias"], Net().last.bias)
            found.append(str(model.get_buffer("blocks.0.scale").tolist()))
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("way, persistent", [("nested", True), ("torch", False)])
def test_values_that_differ_are_refused_or_taken_from_the_first_rank(way: str, persistent: bool) -> None:
    for synced, refused in run_ranks(started, 2, way, persistent):
        assert synced == "[0.0, 0.0]"
        assert "buffers" in refused and "scale" in refused and "sync_module_states" in refused


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("way", ["plain", "wrapped", "torch"])
def test_recomputation_counts_a_batch_once(way: str, disabled: bool) -> None:
    plain: Any = normed()
    model: Any = normed()
    if way == "plain":
        checkpoint_wrapper(model)
    elif way == "wrapped":
        model[1] = FSDP(checkpoint_wrapper(model[1]))
        model = FSDP(model)
    else:
        fully_shard(checkpoint_wrapper(model))
    for number in range(3):
        for one in (plain, model):
            one.zero_grad()
            if disabled:
                with disable_checkpointing():
                    loss = one(batch(0, number)).square().sum()
            else:
                loss = one(batch(0, number)).square().sum()
            loss.backward()
    assert all(torch.equal(one, other) for one, other in zip(plain.buffers(), model.buffers(), strict=True))


class Quantiser(nn.Module):
    """A moving mean that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)  # type: ignore[operator, union-attr]
        return (self.layer(x) * self.mean.clone()).square()  # type: ignore[operator]


def test_recomputation_reads_the_buffers_of_its_forward() -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Quantiser()
        if wrapped:
            checkpoint_wrapper(model)
        losses = [model(batch(0, number)).sum() for number in range(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([model.layer.weight.grad, model.mean])
    assert all(map(torch.equal, *found))


def test_a_disabled_wrapper_runs_once() -> None:
    model = checkpoint_wrapper(Quantiser())
    with disable_checkpointing():
        loss = model(batch(0, 0)).sum()
    loss.backward()
    assert model.runs == 1


# ---- modules and parameters that came late -----------------------------------------------------------------------


def a_new_module(model: Any) -> None:
    width = model.blocks[1].wide.out_features
    model.blocks[1].wide = nn.Sequential(model.blocks[1].wide, nn.Linear(width, width))


def a_replaced_module(model: Any) -> None:
    model.blocks[0].narrow = nn.Linear(model.blocks[0].narrow.in_features, model.blocks[0].narrow.out_features)


def a_replaced_parameter(model: Any) -> None:
    model.last.bias = nn.Parameter(torch.zeros(model.last.bias.shape))


def a_new_parameter(model: Any) -> None:
    model.blocks[0].adapter = nn.Parameter(torch.zeros(3))


CHANGES = (a_new_module, a_replaced_module, a_replaced_parameter, a_new_parameter)


def changed(rank: int, world: int, way: str) -> list[str]:
    """What the next forward after each change says."""
    found = []
    for change in CHANGES:
        model = around(Net(), way)
        model(batch(rank, 0)).sum().backward()
        change(model)
        try:
            model(batch(rank, 1)).sum().backward()
            found.append("trained")
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("way", ["nested", "torch"])
def test_what_is_added_after_sharding_is_refused(way: str) -> None:
    for said in run_ranks(changed, 2, way):
        assert len(said) == 4 and all("after it was sharded" in one for one in said), said


def grown(rank: int, world: int) -> dict[str, torch.Tensor]:
    """A new module that is sharded as well trains as others do."""
    model: Any = around(Net(), "torch")
    torch.manual_seed(0)
    model.last = fully_shard(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        model(batch(rank, number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.last)


def test_a_new_module_that_is_sharded_trains() -> None:
    first, second = run_ranks(grown, 2)
    torch.manual_seed(0)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["weight"], nn.Linear(6, 6).weight)


# ---- hooks that came late ----------------------------------------------------------------------------------------


def hooked(rank: int, world: int, way: str) -> list[Any]:
    """What hooks registered after sharding see of a weight in a forward, and what is said elsewhere."""
    model: Any = around(Net(), way)
    seen: list[Any] = []

    def look(module: Any, *more: Any) -> None:
        try:
            seen.append(torch.equal(module.wide.weight, expected))
        except ConfigError as error:
            seen.append(str(error))

    expected = Net().blocks[1].wide.weight.detach()
    block = model.blocks[1]
    block = getattr(block, "module", block)
    block.register_forward_pre_hook(look)
    block.register_forward_hook(look)
    block.wide.register_forward_hook(lambda *given: look(block))
    with torch.no_grad():
        model(batch(rank, 0))
    for number in range(2):
        model(batch(rank, number)).sum().backward()
    look(block)
    return seen


@pytest.mark.parametrize("way", ["nested", "torch"])
def test_hooks_registered_after_sharding_see_full_weights(way: str) -> None:
    for seen in run_ranks(hooked, 2, way):
        assert seen[:-1] == [True] * 9 and "forward hooks" in seen[-1]


# ---- names of the faces ------------------------------------------------------------------------------------------


def test_names_of_fairscale_and_torch() -> None:
    model: Any = FSDP(Net(), mixed_precision=True, compute_dtype=torch.bfloat16)
    assert model.mixed_precision is True and model.flatten_parameters is True
    assert model.compute_dtype is torch.bfloat16 and model.reshard_after_forward is True
    assert model.append_shared_param(model.first.weight) is None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        model.nothing_like_it
    with pytest.raises(ConfigError, match="set_all_reduce_hook.*p.grad"):
        fully_shard(Net()).set_all_reduce_hook(print)


# ---- reentrant checkpointing -------------------------------------------------------------------------------------


class Calls(nn.Module):
    """Three blocks in any order, those in capital letters by torch's reentrant checkpoint."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for one in self.order:
            block = self.blocks["abc".index(one.lower())]
            x = (checkpoint(block, x, use_reentrant=True) if one.isupper() else block(x)).tanh()
        return x.sum()


def reentrant(rank: int, world: int, orders: list[str], way: str) -> list[str]:
    """Orders that are neither refused by name nor right."""
    wrong = []
    for order in orders:
        plain, model = Calls(order), around(Calls(order), way)
        try:
            for number in range(2):
                model(batch(0, number)).backward()
        except ConfigError as error:
            if "use_reentrant" not in str(error) or not any(order.lower().count(one) > 1 for one in order.lower()
                                                            if one.upper() in order):
                wrong.append(f"{order}: {error}")
            continue
        for number in range(2):
            plain(batch(0, number)).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.step()
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        found = whole(model)
        if max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items()) > 1e-6:
            wrong.append(order)
    return wrong


def test_reentrant_checkpoints_are_right_or_refused_by_name() -> None:
    assert run_ranks(reentrant, 2, ["Abb", "bAb", "bbA", "Aab", "aAb", "bAbA", "ABB", "abcAB"], "nested") == [[], []]
