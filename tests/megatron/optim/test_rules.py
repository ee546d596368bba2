"""Every rule does to spans of a flat shard what its published form does to whole parameters.

Spans are cut at multiples of the layout's alignment, as in the engine: a vectorised kernel then treats every element
alike, and cuts change no bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.config.optimizer_config import OPTIMIZERS
from megatron.config.tree import OptimConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.optim.adam import MAX_TILE_NUMEL, AdamW, Lion
from megatron.optim.lamb import Lamb
from megatron.optim.rule import SlotRange, StepScalars, UpdateRule, UpdateSegment
from megatron.optim.torch_rule import build_rule, from_torch
from megatron.zero.layout import ALIGNMENT

SIZE, STEPS, FACTOR = 5 * 3 * ALIGNMENT, 20, 0.25
LENGTHS = {"one span": (SIZE,), "two spans": (2 * ALIGNMENT, 13 * ALIGNMENT),
           "five spans": tuple(part * ALIGNMENT for part in (1, 3, 5, 3, 3))}


def weights() -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def grads(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, float]]:
    """Gradients, and the learning rate of their step; a warm-up starts at 0."""
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        yield torch.randn(SIZE, generator=generator).to(dtype), 1e-2 * step / STEPS


def at(steps_taken: int, factor: float = 1.0) -> StepScalars:
    return StepScalars.for_applied_step(factor, steps_taken, torch.device("cpu"))


def segments_of(master: Tensor, grad: Tensor, states: dict[str, Tensor], lengths: Sequence[int],
                lp_out: Tensor | None = None) -> Iterator[UpdateSegment]:
    """Consecutive ones of these lengths, each a part of one parameter."""
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        cut = slice(end - length, end)
        yield UpdateSegment(0, master[cut], grad[cut], {name: flat[cut] for name, flat in states.items()},
                            (SlotRange(0, 0, length),), 1, lambda sums: sums, None if lp_out is None else lp_out[cut],
                            param_names=("weight",))


def flat_run(rule: UpdateRule, hyper: dict[str, Any], lengths: Sequence[int] = (SIZE,),
             dtype: torch.dtype = torch.float32, reload_at: int = -1, fresh: Any = None) -> dict[str, Tensor]:
    """Twenty steps; states and weights ("") after them. At `reload_at` a fresh rule takes over from JSON."""
    master = weights()
    states = {name: torch.zeros(SIZE) for name in rule.states}
    for step, (grad, lr) in enumerate(grads(dtype)):
        if step == reload_at:
            saved, rule = json.dumps(rule.scalars()), fresh()
            rule.restore(json.loads(saved))
        for span in segments_of(master, grad.clone(), states, lengths):
            rule.step([span], {**hyper, "lr": lr}, at(step, FACTOR))
    return {"": master, **states}


def torch_run(make: Any, hyper: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same by torch, on one matrix."""
    parameter = torch.nn.Parameter(weights().view(3, -1))
    optimizer = make([parameter], **hyper)
    for grad, lr in grads(dtype):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = grad.float().mul(FACTOR).view(3, -1)
        optimizer.step()
    state = optimizer.state[parameter]
    return {"": parameter.detach().flatten(), **{
        name: value.flatten() for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], of: str = "") -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{of} {name}: {(found[name] - value).abs().max()}"
    assert found[""].isfinite().all() and not torch.equal(found[""], weights())


# ---- torch.optim -------------------------------------------------------------------------------------------------


class Drift(Optimizer):
    """A user's own: settings and a counter beside the param groups, a state that is made anew, and one that is int."""

    def __init__(self, params: Any, lr: float = 1e-3, *, power: float) -> None:
        super().__init__(params, {"lr": lr})
        self.power = power

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.ones_like(parameter)) + 0.1 * parameter.grad
                parameter.sub_(state["mean"] * (group["lr"] * state["count"]**self.power))


class Rebinding(torch.optim.SGD):
    """New weights in a new tensor, which must reach whoever lent the old one."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam, L2": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam, fused": (torch.optim.Adam, {"weight_decay": 0.1, "fused": True}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "fused": True}),
    "SGD, nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"betas": (0.9, 0.99)}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 10.0, "lambd": 0.1}),
    "Rprop": (torch.optim.Rprop, {}),
    "a user's": (Drift, {"power": 0.5}),
    "a user's, with new data": (Rebinding, {}),
}


def made(name: str) -> tuple[Optimizer, dict[str, Any]]:
    """The optimizer of a client, and its param group's entries."""
    cls, hyper = CASES[name]
    optimizer = cls([torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))], **hyper)
    return optimizer, {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def test_spans_tiles_and_a_restart_from_json_change_no_bit_of_a_torch_optimizer() -> None:
    for name in CASES:
        optimizer, hyper = made(name)
        for lengths in LENGTHS.values():
            assert_equal(flat_run(from_torch(optimizer), hyper, lengths), torch_run(*CASES[name]), name)
        found = flat_run(from_torch(optimizer, tile=ALIGNMENT), hyper, LENGTHS["two spans"], torch.float16, reload_at=7,
                         fresh=lambda: from_torch(optimizer))
        assert_equal(found, torch_run(*CASES[name], torch.float16), name)


def test_the_clients_optimizer_is_left_as_it_was() -> None:
    optimizer, hyper = made("NAdam")
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # wraps the `step` of the instance
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    before, random = str(optimizer.state_dict()), torch.get_rng_state()
    parameters = [parameter.clone() for parameter in optimizer.param_groups[0]["params"]]
    assert_equal(flat_run(from_torch(optimizer), hyper), torch_run(*CASES["NAdam"]))
    assert str(optimizer.state_dict()) == before and torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], parameters))


def test_groups_have_their_own_numbers_and_all_their_states_are_kept() -> None:
    parameters = [[torch.nn.Parameter(torch.zeros(3))] for _ in range(2)]
    optimizer = torch.optim.ASGD([{"params": parameters[0], "t0": 3.0}, {"params": parameters[1], "t0": 1e6}])
    rule, hypers = from_torch(optimizer), optimizer.param_groups
    for step, (grad, _) in enumerate(grads()):
        for group, hyper in enumerate(hypers):
            span = UpdateSegment(group, weights(), grad.clone(), {"ax": torch.zeros(SIZE)}, (), 1, lambda sums: sums)
            rule.step([span], hyper, at(step))
    assert rule.scalars()["0/20"]["mu"] == pytest.approx(1 / 17) and rule.scalars()["1/20"]["mu"] == 1
    mixed = torch.optim.SGD([{"params": parameters[0]}, {"params": parameters[1], "momentum": 0.9}], lr=0.1)
    assert from_torch(mixed).states == ("momentum_buffer",)


def test_the_numbers_of_all_ranks_are_the_union_whatever_an_idle_rank_remembers() -> None:
    optimizer, hyper = made("NAdam")
    busy, idle = from_torch(optimizer), from_torch(optimizer)
    states = {name: torch.zeros(SIZE) for name in busy.states}
    for step, (grad, _) in enumerate(grads()):
        for rule in (busy, idle) if step < 3 else (busy,):
            rule.step([*segments_of(weights(), grad, states, [SIZE])], hyper, at(step))
    for union in ({**busy.scalars(), **idle.scalars()}, {**idle.scalars(), **busy.scalars()}):
        fresh = from_torch(optimizer)
        fresh.restore(json.loads(json.dumps(union)))
        for rule in (busy, fresh):
            rule.step([*segments_of(weights(), weights(), states, [SIZE])], hyper, at(STEPS))
        assert fresh.scalars()["0/21"] == busy.scalars()["0/21"]


def test_a_checkpoint_without_the_numbers_is_refused() -> None:
    optimizer, hyper = made("NAdam")
    states = {name: torch.zeros(SIZE) for name in ("exp_avg", "exp_avg_sq")}
    with pytest.raises(CheckpointError, match="step, mu_product of parameter group 0 after 3 steps is not known"):
        from_torch(optimizer).step([*segments_of(weights(), weights(), states, [SIZE])], hyper, at(3))


def test_adamw_is_our_own_where_it_can_be() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(3))]
    assert isinstance(from_torch(torch.optim.AdamW(parameter)), AdamW)
    for extra in ({"amsgrad": True}, {"maximize": True}):
        assert not isinstance(from_torch(torch.optim.AdamW(parameter, **extra)), AdamW)


class Normed(torch.optim.SGD):
    """The gradient of norm 1: looks at whole parameters, and says so nowhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        super().step()


NOT_ELEMENTWISE: list[tuple[Any, str]] = [
    (torch.optim.Adafactor, "Adafactor cannot be used here: its state 'row_var' is neither"),
    (torch.optim.Muon, "Muon cannot be used here"),
    (torch.optim.LBFGS, "LBFGS cannot be used here: TypeError"),
    (torch.optim.SparseAdam, "SparseAdam cannot be used here: RuntimeError: SparseAdam does not support dense"),
    (Normed, "Normed cannot be used here: it does not update every weight by itself"),
]


def test_what_is_not_elementwise_is_refused_by_name_with_the_reason() -> None:
    for cls, told in NOT_ELEMENTWISE:
        with pytest.raises(ConfigError, match=told):
            optimizer = cls([torch.nn.Parameter(torch.zeros(4, 4))])
            optimizer.param_groups[0]["lr"] = 0.0  # where a warm-up may begin: nothing moves then
            from_torch(optimizer)


def test_an_optimizer_that_has_taken_steps_is_refused() -> None:
    for cls in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = cls([parameter])
        parameter.grad = torch.arange(4.0)
        optimizer.step()
        with pytest.raises(ConfigError, match="it has taken steps already"):
            from_torch(optimizer)


def test_a_parameter_without_elements_or_dimensions_says_nothing_of_the_state_of_the_others() -> None:
    for shapes in ((4, 0), (0, 4), (0,), ((), 4), (4, ())):
        rule = from_torch(torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes],
                                              initial_accumulator_value=0.3))
        assert rule.name == "Adagrad"


# ---- our own -----------------------------------------------------------------------------------------------------


def slow_lion(beta1: float, beta2: float, decay: float) -> dict[str, Tensor]:
    w, m = weights().double(), torch.zeros(SIZE, dtype=torch.float64)
    for grad, lr in grads():
        g = grad.double() * FACTOR
        w = w - lr * (torch.sign(beta1 * m + (1 - beta1) * g) + decay * w)
        m = beta2 * m + (1 - beta2) * g
    return {"": w, "exp_avg": m}


def test_lion_is_the_published_loop_however_it_is_cut() -> None:
    hyper = {"betas": (0.9, 0.99), "weight_decay": 0.1}
    found = flat_run(Lion(), hyper)
    for name, value in slow_lion(0.9, 0.99, 0.1).items():
        # fp32 against fp64: 20 roundings of weights up to 4.
        torch.testing.assert_close(found[name].double(), value, atol=5e-6, rtol=0)
    for lengths in LENGTHS.values():
        assert_equal(flat_run(Lion(tile=ALIGNMENT), hyper, lengths), found)


LAMB = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1, "max_coeff": 10.0, "min_coeff": 0.01,
        "bias_correction": True, "eps_inside_sqrt": False}
SLOTS = ((0, 300), (384, 384 + 128), (512, 1900))
"""Three parameters, one behind the other, with padding between them: the second is 0, and remains without decay."""


def lamb_weights() -> Tensor:
    flat = weights()
    flat[384:512] = 0
    return flat


def slow_lamb(hyper: dict[str, Any]) -> list[Tensor]:
    """Whole parameters in fp64, one after the other, by the paper's algorithm 2."""
    result = []
    (beta1, beta2), eps = hyper["betas"], hyper["eps"]
    for start, stop in SLOTS:
        w = lamb_weights()[start:stop].double()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step, (grad, lr) in enumerate(grads()):
            g = grad[start:stop].double() * FACTOR
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            c1, c2 = (1 - beta1**(step + 1), 1 - beta2**(step + 1)) if hyper["bias_correction"] else (1, 1)
            root = (v / c2 + eps).sqrt() if hyper["eps_inside_sqrt"] else (v / c2).sqrt() + eps
            u = m / c1 / root + hyper["weight_decay"] * w
            ratio = 1.0
            if w.norm() > 0 and u.norm() > 0:
                ratio = min(max(float(w.norm() / u.norm()), hyper["min_coeff"]), hyper["max_coeff"])
            w = w - lr * ratio * u
        result.append(w)
    return result


def lamb_run(hyper: dict[str, Any], tile: int) -> Tensor:
    master, states = lamb_weights(), {name: torch.zeros(SIZE) for name in Lamb.states}
    slots = [SlotRange(slot, start, stop) for slot, (start, stop) in enumerate(SLOTS)]
    for step, (grad, lr) in enumerate(grads()):
        segment = UpdateSegment(0, master, grad.clone(), states, slots, len(SLOTS), lambda sums: sums)
        Lamb(tile).step([segment], {**hyper, "lr": lr}, at(step, FACTOR))
    return master


def test_lamb_is_the_published_loop_over_whole_parameters() -> None:
    for change in ({}, {"bias_correction": False}, {"eps_inside_sqrt": True}, {"max_coeff": 0.5}, {"min_coeff": 9.0}):
        hyper = {**LAMB, **change}
        found = lamb_run(hyper, MAX_TILE_NUMEL)
        for (start, stop), expected in zip(SLOTS, slow_lamb(hyper), strict=True):
            # fp32 against fp64: 20 roundings of weights up to 4, and of ratios up to 10.
            torch.testing.assert_close(found[start:stop].double(), expected, atol=2e-5, rtol=0)
        assert torch.equal(found[300:384], weights()[300:384]), "padding is left alone"
        # Sums of squares of fp32 rows, taken in fp64 in another order.
        torch.testing.assert_close(lamb_run(hyper, ALIGNMENT), found, atol=1e-6, rtol=0)


# ---- from the configuration --------------------------------------------------------------------------------------


def test_every_optimizer_that_can_be_named_steps_with_its_defaults() -> None:
    for name, takes in OPTIMIZERS.items():
        rule, hyper = build_rule(OptimConfig(optimizer=name), MAX_TILE_NUMEL)
        assert "lr" not in hyper and hyper.get("weight_decay") == (None if name == "rprop" else 0.01), name
        found = flat_run(rule, {**hyper, "use_muon": False, "lr_scale": 1.0} if name == "muon" else hyper)
        assert found[""].isfinite().all() and not torch.equal(found[""], weights()), name
        if takes.torch_name and name != "adam":
            defaults = torch_run(getattr(torch.optim, takes.torch_name), {
                key: value for key, value in hyper.items() if key not in takes.extra})[""]
            # The fused kernels of Adam and SGD round in another place.
            torch.testing.assert_close(found[""], defaults, atol=1e-6, rtol=0)


ADAM = {"weight_decay": 0.5, "betas": (0.9, 0.99), "fused": True}


CONFIGURED: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
    ({"adam_w_mode": False}, torch.optim.Adam, ADAM),
    ({"optimizer_params": ("amsgrad=true",)}, torch.optim.AdamW, {**ADAM, "amsgrad": True}),
    ({"optimizer_params": ("amsgrad=true",), "adam_w_mode": False}, torch.optim.Adam, {**ADAM, "amsgrad": True}),
    ({"optimizer": "sgd", "sgd_momentum": 0.5, "optimizer_params": ("nesterov=true",)}, torch.optim.SGD,
     {"momentum": 0.5, "nesterov": True, "fused": True, "weight_decay": 0.5})]


def test_what_is_configured_is_torchs_optimizer() -> None:
    for given, cls, hyper in CONFIGURED:
        optim = OptimConfig(**{"optimizer": "adam", "weight_decay": 0.5, "adam_beta2": 0.99, **given})
        assert_equal(flat_run(*build_rule(optim, MAX_TILE_NUMEL)), torch_run(cls, hyper), str(given))
    uncorrected = OptimConfig(optimizer="adam", adam_w_mode=False, optimizer_params=("bias_correction=false",))
    assert build_rule(uncorrected, MAX_TILE_NUMEL)[0] == AdamW(bias_correction=False, decoupled=False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "adan"}, "--optimizer is adan: expected adam, adamw, sgd"),
    ({"optimizer_params": ("nesterov=true",)}, "nesterov is not a parameter of --optimizer adam: expected amsgrad"),
    ({"optimizer": "adamax", "optimizer_params": ("x=1",)},
     "x is not a parameter of --optimizer adamax: expected none"),
    ({"optimizer": "sgd", "optimizer_params": ("nesterov=2",)}, "nesterov is 2: expected true or false"),
    ({"optimizer": "sgd", "optimizer_params": ("dampening=true",)}, "dampening is True: expected a number"),
    ({"optimizer": "sgd", "optimizer_params": ("dampening=yes",)},
     "dampening is yes: expected a number, true or false"),
    ({"optimizer": "lion", "optimizer_params": ("betas=[0.9]",)}, "expected a list of two numbers"),
    ({"optimizer": "sgd", "optimizer_params": ("nesterov",)}, "expected NAME=VALUE"),
    ({"optimizer": "sgd", "optimizer_params": ("dampening=1", "dampening=1")}, "dampening is given twice"),
    ({"optimizer": "adamw", "adam_w_mode": False}, "contradicts --optimizer adamw"),
]


def test_a_parameter_that_does_not_belong_is_an_error() -> None:
    for given, told in REFUSED:
        with pytest.raises(ConfigError) as caught:
            OptimConfig(**given)
        assert told in str(caught.value)
    refused = OptimConfig(optimizer="sgd", optimizer_params=("nesterov=true", "dampening=0.5"))
    with pytest.raises(ConfigError, match="--optimizer sgd: Nesterov momentum requires"):
        build_rule(refused, MAX_TILE_NUMEL)
