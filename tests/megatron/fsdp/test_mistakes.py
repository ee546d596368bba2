"""What users do with a sharded model: each ends in the right result or in an error that says what to do; none hangs."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.distributed import watchdog
from megatron.errors import ConfigError, TrainerError
from megatron.fsdp import (FSDP, MixedPrecisionPolicy, checkpoint_wrapper, clip_grad_norm_, fully_shard,
                           summon_full_params)
from megatron.fsdp.root import FSDPRoot
from megatron.fsdp.sharded_tensor import ShardedParam, UnreducedGrad, local_tensor
from tests.distributed import on_ranks
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, by_ddp, train, whole
from tests.megatron.zero.models import Net


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int = 0) -> None:
    model(batch(rank, number)).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- refused, with what to do ------------------------------------------------------------------------------------


def sharded(**given: Any) -> Any:
    return around(Net(), "torch", **given)


def after_a_backward(rank: int) -> Any:
    model = sharded()
    model(batch(rank, 0)).backward()
    return model


class Edits(Net):
    """Edits a weight in a forward."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.last.weight.mul_(0.5)
        return super().middle(x)


class ByHand(Net):
    """Uses a parameter of a block that is the next to run, and on its way."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x + self.blocks[0].narrow.bias)  # type: ignore[operator, union-attr]


class Aside(Net):
    """Keeps a loss as an attribute."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = x.float().square().mean()
        return super().middle(x)


class RankDrop(Net):
    """Each rank runs another block."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[dist.get_rank()](x))  # type: ignore[no-any-return]


class Summons(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with summon_full_params(self):
            return super().middle(x)


class ByShape(torch.optim.Optimizer):
    """Keeps a state of the parameter's shape, made by its shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.zeros(parameter.shape).add_(parameter.grad), alpha=-0.1)


class Pair(nn.Module):
    """Two layers, registered in an order and used in another."""

    def __init__(self, first: str = "a") -> None:
        super().__init__()
        for name in ("a", "b") if first == "a" else ("b", "a"):
            setattr(self, name, nn.Linear(4, 4, bias=False))


def a_grad_scaler(rank: int) -> None:
    model = sharded()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(rank, 0))).backward()
    scaler.step(adamw(model))


def by_safetensors(rank: int) -> None:
    """It goes by the size of a tensor and where it begins, and would read other memory."""
    from safetensors.torch import save
    save({"weight": sharded().first.weight.data})


def in_the_background(rank: int) -> None:
    import torch.distributed.checkpoint as dcp
    dcp.async_save({"model": sharded().state_dict()}, checkpoint_id="/nowhere")


def a_step_between_forward_and_backward(rank: int) -> None:
    model = around(Net(), "nested")
    optimizer = adamw(model)
    step(model, optimizer, rank)
    model(batch(rank, 1)).backward()
    loss = model(batch(rank, 2))
    optimizer.step()
    loss.backward()


def a_backward_of_a_forward_before_the_step(rank: int) -> None:
    model = sharded()
    old = model(batch(rank, 0))
    step(model, adamw(model), rank)
    old.backward()


def a_weight_edited_in_a_forward(rank: int) -> None:
    model = around(Edits(), "torch")
    for number in range(2):
        with torch.no_grad():
            model(batch(rank, number))


def unfrozen_afterwards(rank: int) -> None:
    model: Any = Net()
    model.last.bias.requires_grad_(False)
    around(model, "torch").requires_grad_(True)(batch(rank, 0))


def stepped_in_backward(rank: int) -> None:
    model = sharded()
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model(batch(rank, 0))


def another_tensor(rank: int) -> None:
    """The old values would be overwritten with the new ones."""
    model = sharded()
    model.first.weight.data = model.first.weight.data.clone()


def by_hand(rank: int) -> None:
    model = around(ByHand(), "torch")
    for number in range(3):
        model(batch(rank, number)).backward()


def a_loss_that_is_not_returned(rank: int) -> None:
    model: Any = around(Aside(), "torch", mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    model(batch(rank, 0))
    model.aside.backward()


def stepped_by(kind: Any, rank: int) -> None:
    model = sharded()
    step(model, kind(model.parameters()), rank)


def different_blocks(rank: int) -> None:
    model = around(RankDrop(), "torch")
    for number in range(2):
        step(model, adamw(model), rank, number)


def inside_summon(act: Callable[[Any, int], Any], rank: int) -> None:
    model = sharded()
    with summon_full_params(model), torch.no_grad():
        act(model, rank)


def different_weights(rank: int) -> None:
    model = Net()
    with torch.no_grad():
        model.last.bias += rank
    around(model, "torch")


def registered_in_another_order(rank: int) -> None:
    torch.manual_seed(0)
    around(Pair("ab"[rank]), "torch", sync_module_states=True)


def sharded_in_another_order(rank: int) -> None:
    model = Pair()
    for layer in (model.a, model.b) if rank == 0 else (model.b, model.a):
        fully_shard(layer, sync_module_states=True)
    fully_shard(model, sync_module_states=True)


def frozen_on_one(rank: int) -> None:
    model = Pair()
    model.a.weight.requires_grad = rank == 0
    fully_shard(model, sync_module_states=True)


def a_clip_without_sums(rank: int) -> None:
    model: Any = FSDP(Net())
    with model.no_sync():
        model(batch(rank, 0)).backward()
        model.clip_grad_norm_(CLIP)


def a_gradient_by_hand(rank: int) -> None:
    model = sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    model(batch(rank, 0)).backward()


def a_local_state_dict_of_another_shape(rank: int) -> None:
    model = FSDP(Net())
    model.load_local_state_dict({name: tensor[:1] for name, tensor in model.local_state_dict().items()})


ORDER = "the ranks shard Pair differently: parameter 0 is a.weight: float32 [4, 4] on rank 0, b.weight: float32"
CLIPPING, SUMMON, COPY = "clip_grad_norm_", "summon_full_params", "state dict"

MISTAKES: dict[str, tuple[Callable[[int], Any], str]] = {
    "a weight outside": (lambda rank: around(Net(), "nested").first.weight @ torch.ones(6), SUMMON),
    "a layer alone": (lambda rank: sharded().first(torch.ones(1, 6)), SUMMON),
    "a penalty": (lambda rank: sum(p.square().sum() for p in sharded().parameters()), SUMMON),
    "as a number": (lambda rank: float(fully_shard(nn.Linear(1, 1)).weight), "float()"),
    "orthogonal values": (lambda rank: nn.init.orthogonal_(sharded().first.weight), SUMMON),
    "torch's clip": (lambda rank: nn.utils.clip_grad_norm_(after_a_backward(rank).parameters(), CLIP), CLIPPING),
    "a norm": (lambda rank: after_a_backward(rank).first.weight.grad.norm(), CLIPPING),
    **{f"{copy.__name__} {way}": (lambda rank, copy=copy, way=way: copy(around(Net(), way)), COPY)  # type: ignore[misc]
       for copy in (deepcopy, torch.optim.swa_utils.AveragedModel, pickle.dumps) for way in ("torch", "nested")},
    "safetensors": (by_safetensors, "save_checkpoint"), "async_save": (in_the_background, ""),
    "into a plain tensor": (lambda rank: torch.zeros(6, 6).copy_(sharded().first.weight), "first.weight"),
    "GradScaler": (a_grad_scaler, "GradScaler"),
    "wrapped twice": (lambda rank: FSDP(FSDP(Net()).module), "already"),
    "sharded twice": (lambda rank: fully_shard(sharded()), "already"),
    "a step before the backward": (a_step_between_forward_and_backward, "before the weights changed"),
    "an old backward": (a_backward_of_a_forward_before_the_step, "before the weights changed"),
    "edited in a forward": (a_weight_edited_in_a_forward, "written to"),
    "half": (lambda rank: sharded().half(), "mixed_precision"),
    "to": (lambda rank: around(Net(), "nested").to(torch.bfloat16), "mixed_precision"),
    "unfrozen": (unfrozen_afterwards, "unfrozen after it was sharded"),
    "a step in backward": (stepped_in_backward, "post_accumulate"),
    "another tensor": (another_tensor, "p.data.clone()"),
    "a parameter by hand": (by_hand, "narrow.bias"), "a loss aside": (a_loss_that_is_not_returned, "not scaled"),
    **{kind.__name__: (partial(stepped_by, kind), "docs/fsdp.md") for kind in (ByShape, torch.optim.Adafactor)},
    "a forward in summon": (partial(inside_summon, lambda model, rank: model(batch(rank, 0))), SUMMON),
    "summon in a forward": (lambda rank: around(Summons(), "torch")(batch(rank, 0)), SUMMON),
    "different edits": (partial(inside_summon, lambda model, rank: model.first.weight.add_(rank)), SUMMON),
    "different weights": (different_weights, "last.bias"), "different blocks": (different_blocks, "different blocks"),
    "another order": (registered_in_another_order, ORDER),
    "sharded in another order": (sharded_in_another_order, "module sharded before 0 is a on rank 0, b on rank 1"),
    "frozen on one": (frozen_on_one,
                      "parameter 0 is a.weight: float32 [4, 4] on rank 0, a.weight: float32 [4, 4] (frozen) on rank 1"),
    "a dtype on one": (lambda rank: FSDP(Pair(), mixed_precision=rank == 1),
                       "is param_dtype = None on rank 0, param_dtype = torch.float16 on rank 1"),
    "a clip in no_sync": (a_clip_without_sums, "no_sync"),
    "a gradient by hand": (a_gradient_by_hand, "by hand"),
    "assign=True": (lambda rank: FSDP(Net()).load_state_dict(Net().state_dict(), assign=True), "assign=True"),
    "another local shape": (a_local_state_dict_of_another_shape, "consolidate_shard_weights"),
    "ranks that do not divide": (lambda rank: fully_shard(Net(), reshard_after_forward=3), "divides the 2 ranks"),
}
"""What is done, and a part of what is said about it on every rank."""


@on_ranks(2, timeout=120)
def test_a_mistake_is_refused_on_all_ranks_with_what_to_do(rank: int, world: int) -> None:
    for name, (mistake, words) in MISTAKES.items():
        with pytest.raises(TrainerError) as caught:
            mistake(rank)
        assert words in str(caught.value), name


@on_ranks(2)
def test_a_rank_that_waits_for_long_says_where(rank: int, world: int) -> None:
    """The other is in a barrier of the script's own, as most scripts have it; here it comes when this one has said so.
    """
    said: list[bytes] = []
    store = dist.distributed_c10d._get_default_store()

    def note(line: bytes) -> None:
        said.append(line)
        store.set("said", "")

    with patch.multiple(watchdog, CHECK_SECONDS=0.02, write_lines=note):
        model: Any = around(Net(), "nested")
        model(batch(rank, 0)).backward()
        if rank == 1:
            store.wait(["said"])
        model.state_dict()
    assert [re.sub(r"\S+ s ", "", line.decode()) for line in said] == (rank == 0) * [
        "note: rank 0 has waited at a full state dict for ranks that are not there yet: every rank has to come to it\n"]


def with_a_number(module: nn.Module) -> Any:
    """It cannot be sharded as it is."""
    module.number = nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
    return module


@on_ranks(2)
def test_what_is_refused_leaves_modules_inside_as_they_were(rank: int, world: int) -> None:
    for shard in (fully_shard, FSDP):
        torch.manual_seed(0)
        model = with_a_number(Pair())
        model.b.weight, before = model.a.weight, model.a.weight.detach().clone()
        fully_shard(model.a)
        with pytest.raises(TrainerError, match="number is of torch.int64"):
            shard(model)
        assert isinstance(model.a.weight, ShardedParam)
        model.a(torch.ones(1, 4)).sum().backward()
        fully_shard(model, ignored_params=[model.number])
        assert torch.equal(whole(model)["b.weight"], before)


@on_ranks(2)
def test_a_list_of_which_one_is_refused_is_not_sharded(rank: int, world: int) -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), with_a_number(nn.Linear(4, 4))
    one.weight.grad = torch.ones(4, 4)
    for second, words in ((other, "number is of torch.int64"), (nn.ModuleList(), "has no forward")):
        with pytest.raises(TrainerError, match=words):
            fully_shard([one, second])
        assert type(one) is nn.Linear and type(one.weight) is nn.Parameter and one.weight.grad is not None
    one.weight.grad = None
    fully_shard([one, other], ignored_params=[other.number])


def test_arguments_that_are_not_known() -> None:
    for given, word in (({"reshard_after_foward": True}, "reshard_after_forward"),
                        ({"mixed_precison": True}, "mixed_precision"), ({"something_else": 1}, "something_else"),
                        ({"sharding_strategy": "FULL_SHARD"}, "reshard_after_forward"),
                        ({"auto_wrap_policy": None}, "auto_wrap"),
                        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor")):
        with pytest.raises(TrainerError, match=word):
            FSDP(Net(), **given)


# ---- the right result --------------------------------------------------------------------------------------------

STEPS = 6


def trained(rank: int, model: Any = None, learn: Callable[..., Any] | None = None,
            before_clip: Callable[..., Any] | None = None, optimizer: Any = None) -> dict[str, torch.Tensor]:
    """`learn(model, rank, number)` makes the gradients of a step."""
    model = sharded() if model is None else model

    def clip() -> None:
        if before_clip is not None:
            before_clip(model, rank)
        clip_grad_norm_(model.parameters(), CLIP)

    train(model, clip, rank, STEPS, optimizer=optimizer,
          learn=None if learn is None else lambda number: learn(model, rank, number))
    return whole(model)


def optimizer_before_wrapping(rank: int) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = adamw(model)
    return trained(rank, around(model, "torch"), optimizer=optimizer)


def zeroed_gradients(rank: int) -> dict[str, torch.Tensor]:
    """zero_grad(set_to_none=False)."""
    model = sharded()
    optimizer = adamw(model)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return trained(rank, model, optimizer=optimizer)


def zeroed_between_forward_and_backward(rank: int) -> dict[str, torch.Tensor]:
    model = sharded()
    optimizer = adamw(model)

    def learn(model: nn.Module, rank: int, number: int) -> None:
        for micro in range(2):
            loss = model(batch(rank, 2 * number + micro)) / 2
            if micro == 0:
                zero()
            loss.backward()

    zero, optimizer.zero_grad = optimizer.zero_grad, lambda: None  # type: ignore[method-assign]
    return trained(rank, model, learn, optimizer=optimizer)


def halves(model: nn.Module, rank: int, number: int) -> list[torch.Tensor]:
    return [model(batch(rank, 2 * number + micro)) / 2 for micro in range(2)]


def one_backward(model: nn.Module, rank: int, number: int) -> None:
    sum(halves(model, rank, number)).backward()  # type: ignore[union-attr]


def forwards_first(model: nn.Module, rank: int, number: int) -> None:
    for loss in halves(model, rank, number):
        loss.backward()


def no_sync(model: Any, rank: int, number: int) -> None:
    with model.no_sync():
        (model(batch(rank, 2 * number)) / 2).backward()
    (model(batch(rank, 2 * number + 1)) / 2).backward()


def without_sync_by_torchs_name(model: Any, rank: int, number: int) -> None:
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        (model(batch(rank, 2 * number + micro)) / 2).backward()


def gradients_halved_by_hand(model: Any, rank: int, number: int) -> None:
    for micro in range(2):
        model(batch(rank, 2 * number + micro)).backward()
    for index, parameter in enumerate(model.parameters()):
        if index % 2:
            parameter.grad = parameter.grad / 2
        else:
            parameter.grad.mul_(0.5)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("on purpose")


def a_failed_backward(at_the_end: bool, model: Any, rank: int, number: int) -> None:
    """The backward that follows has no forward of its own in between; what the failed one had is dropped."""
    if at_the_end:
        wrong = model(Fails.apply(batch(rank, 77).requires_grad_()))
    else:
        handle = model.blocks[0].register_forward_hook(lambda block, args, out: Fails.apply(out))
        wrong = model(batch(rank, 77))
        handle.remove()
    losses = halves(model, rank, number)
    with pytest.raises(RuntimeError, match="on purpose"):
        wrong.backward()
    for loss in losses:
        loss.backward()


class Skips(Net):
    """In evaluation it leaves out a block that is on its way."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if self.training or number != 1 else x
        return x


def evaluate(model: Any, rank: int) -> None:
    with torch.no_grad():
        model.eval()(batch(rank, 99))
    model.train()
    assert isinstance(model.blocks[1].wide.weight, ShardedParam), "it is at rest"


def a_failed_forward(model: Any, rank: int) -> None:
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))


def a_forward_without_a_backward(rank: int) -> dict[str, torch.Tensor]:
    """Before a clip, before a step, and before states are taken and loaded."""
    model = sharded()
    optimizer = adamw(model)

    def step(self: torch.optim.Optimizer) -> None:
        model(batch(rank, 98))
        type(self).step(self)

    def look(model: Any, rank: int) -> None:
        model(batch(rank, 99))
        model.load_state_dict(model.state_dict())
        model(batch(rank, 99))

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return trained(rank, model, before_clip=look, optimizer=optimizer)


def frozen_and_thawed_before_the_outer_one(rank: int) -> dict[str, torch.Tensor]:
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block)
        block.requires_grad_(False)
    fully_shard(model)
    model.requires_grad_(True)
    return trained(rank, model, one_backward)


def recomputed(wrap: Callable[[nn.Module], Any], rank: int) -> dict[str, torch.Tensor]:
    model = Net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrap(block)
    return trained(rank, FSDP(model))


ORDERS: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "optimizer before wrapping": optimizer_before_wrapping, "zeroed gradients": zeroed_gradients,
    "zeroed between forward and backward": zeroed_between_forward_and_backward,
    "one backward": lambda rank: trained(rank, around(Net(), "nested"), one_backward),
    "forwards first": lambda rank: trained(rank, learn=forwards_first),
    "no_sync": lambda rank: trained(rank, around(Net(), "nested"), no_sync),
    "no sync by torch's name": lambda rank: trained(rank, learn=without_sync_by_torchs_name),
    "halved by hand": lambda rank: trained(rank, learn=gradients_halved_by_hand),
    "an evaluation": lambda rank: trained(rank, around(Net(), "nested"), before_clip=evaluate),
    "an evaluation that skips": lambda rank: trained(rank, around(Skips(), "torch"), before_clip=evaluate),
    "a forward alone": a_forward_without_a_backward, "thawed": frozen_and_thawed_before_the_outer_one,
    "a failed forward": lambda rank: trained(rank, before_clip=a_failed_forward),
    "a failed backward": lambda rank: trained(rank, learn=partial(a_failed_backward, False)),
    "a backward that fails at its end": lambda rank: trained(rank, learn=partial(a_failed_backward, True)),
    "recomputed": partial(recomputed, lambda block: FSDP(checkpoint_wrapper(block))),
    "recomputed outside": partial(recomputed, lambda block: checkpoint_wrapper(FSDP(block)))}


@on_ranks(2, timeout=120)
def test_other_orders_of_calls_give_the_same_weights(rank: int, world: int) -> None:
    weights = by_ddp(Net, rank, STEPS)[1]
    for name, order in ORDERS.items():
        found = order(rank)
        assert max(float((weights[one] - found[one]).abs().max()) for one in weights) <= 1e-6, name


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return (self.second(self.first(x)) if both else self.first(x)).square().sum()


@on_ranks(2)
def test_a_block_left_out_of_a_backward_without_sync_keeps_its_reduced_gradients(rank: int, world: int) -> None:
    model: Any = TwoWays()
    for block in (model.first, model.second):
        fully_shard(block)
    fully_shard(model)
    model(torch.ones(2, 6), both=True).backward()
    before = local_tensor(model.second.weight.grad).clone()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 6), both=False).backward()
    assert isinstance(model.first.weight.grad, UnreducedGrad)
    assert torch.equal(before, local_tensor(model.second.weight.grad))


@on_ranks(2)
def test_no_step_or_forward_follows_a_backward_that_one_rank_interrupted_at_its_end(rank: int, world: int) -> None:
    for part in ("end_backward", "reshard_model", "_compare_backwards"):
        model: Any = around(Net(), "nested")
        optimizer = adamw(model)
        loss = model(batch(rank, 0)).square().mean()
        with patch.object(FSDPRoot, part, side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
            loss.backward()
        for go_on in (optimizer.step, lambda: model(batch(rank, 1))):
            with pytest.raises(ConfigError, match="an earlier backward or step was interrupted half way"):
                go_on()
