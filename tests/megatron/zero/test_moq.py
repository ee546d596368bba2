"""Quantization in training (MoQ): eigenvalues of blocks are those of the dense second derivative, and steep blocks keep
their bits longer; what a script does to weights that are rounded beside masters that are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.distributed import on_ranks
from tests.megatron.zero import small
from tests.megatron.zero.run import weights as weights_of

BLOCKS = 3


class Model(nn.Module):
    """Blocks of different steepness; the forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(BLOCKS))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh((1 + 2 * number) * self.dropout(layer(x)))
        return (self.head(x) - 1).square().mean()


def engine_around(model: nn.Module, stage: int, quantizing: dict[str, Any], keys: dict[str, Any], **more: Any
                  ) -> Engine:
    quantizing = {"enabled": True, "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}, **quantizing}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return small.engine_of(stage, model, keys={"optimizer": optimizer, "quantize_training": quantizing, **keys}, **more)


def made(stage: int = 0, model: nn.Module | None = None, accumulation: int = 1, eigenvalue: Any = None,
         period: int = 2, **more: Any) -> Engine:
    return engine_around(model or Model(), stage, {
        "quantize_verbose": True, "quantize_bits": {"start_bits": 16, "target_bits": 12},
        "quantize_schedule": {"quantize_period": period, "schedule_offset": 0}}, {
        "train_micro_batch_size_per_gpu": 3, "eigenvalue": {"enabled": True, "verbose": True, "tol": 1e-4,
                                                            **(eigenvalue or {})}, **more}, accumulation=accumulation)


def batch(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def step(engine: Engine, count: int = 1) -> None:
    for _ in range(count):
        engine.backward(engine(batch(engine.groups.dp.rank)))
        engine.step()


def looked_for(engine: Engine) -> list[list[float]]:
    """The eigenvalues that it will find, each time."""
    seen: list[list[float]] = []
    quantisation = engine.core.state.moq
    assert quantisation is not None
    learn = quantisation.set_eigenvalues
    quantisation.set_eigenvalues = lambda values: (seen.append(list(values)), learn(values))  # type: ignore
    return seen


def dense(weights: dict[str, Tensor], ranks: int) -> list[float]:
    """From the whole second derivative by the parameters of each block, in fp64."""
    model = Model().double()
    wide = {name: value.double() for name, value in weights.items()}
    values = []
    for number in range(BLOCKS):
        names = [name for name in wide if name.startswith(f"layers.{number}.")]
        flat = torch.cat([wide[name].flatten() for name in names])

        def loss(x: Tensor, names: list[str] = names) -> Tensor:
            pieces = x.split([wide[name].numel() for name in names])
            new = {name: piece.view(wide[name].shape) for name, piece in zip(names, pieces)}
            parts = [functional_call(model, {**wide, **new}, (batch(rank).double(),)) for rank in range(ranks)]
            return torch.stack(parts).mean()

        eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
        values.append(float(eigenvalues[eigenvalues.abs().argmax()]))
    return values


@on_ranks(2)
def test_eigenvalues_are_those_of_the_dense_second_derivative(rank: int, world: int) -> None:
    for stage, accumulation in ((0, 1), (1, 2), (2, 1), (3, 2)):
        engine = made(stage, accumulation=accumulation)
        seen = looked_for(engine)
        step(engine, accumulation)
        # fp32 gradients, moved weights of 16 bits, and an iteration that ends at a change of 1e-4
        assert seen == [pytest.approx(dense(weights_of(engine), 2), rel=0.02)]


ONE_BIT = [{"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}},
           {"type": "OneBitLamb", "params": {"lr": 1e-3, "freeze_step": 2}}]


@pytest.mark.parametrize("optimizer", ONE_BIT, ids=["adam", "lamb"])
@on_ranks(2)
def test_they_are_of_sums_also_while_signs_travel(rank: int, world: int, optimizer: dict[str, Any]) -> None:
    """And of what ranks owe each other nothing is lost: later weights are those of a run that does not look."""
    engine = made(1, period=4, optimizer=optimizer)
    seen = looked_for(engine)
    step(engine, 3)
    assert engine.core.compressed_exchanges
    assert seen == [pytest.approx(dense(weights_of(engine), 2), rel=0.02)]
    step(engine, 3)
    blind = made(1, period=4, optimizer=optimizer, eigenvalue={"enabled": False})
    step(blind, 6)
    expected = weights_of(blind)
    assert all(value.equal(expected[name]) for name, value in weights_of(engine).items())


def test_steep_blocks_keep_their_bits_longer_and_the_line_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """All fall at counter 2; the period is then 2 * 2 * factor."""
    engine = made()
    step(engine, 9)
    said = capsys.readouterr().out
    factors = [int(found) for found in re.findall(r"\(x (\d)\)", said)]
    first = factors[:BLOCKS]
    assert max(first) == 5 and min(first) < 5
    numbers = engine.core.state.moq.state_dict()  # type: ignore[union-attr]
    assert numbers["blocks"] == ["", "layers.0", "layers.1", "layers.2"]
    assert f"current bit-precision = 15, step = 2, quantization period = {4 * first[0]}, index = 1" in said
    flattest, steepest = first.index(min(first)) + 1, first.index(5) + 1
    assert numbers["bits"][steepest] == 15 and numbers["periods"][steepest] == 20
    assert numbers["bits"][0] == 13 and numbers["bits"][flattest] <= 15


class Counting(Model):
    """Has buffers that a forward writes to, or puts other tensors in, and that its loss depends on."""

    mean: Tensor
    calls: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.calls.add_(1)
        self.last = x.clone()
        return super().forward(self.norm(x) + self.mean / (1 + self.calls))


def test_weights_buffers_and_random_streams_are_those_of_a_run_that_does_not_look() -> None:
    runs = []
    for enabled in (True, False):
        torch.manual_seed(3)
        model = Counting()
        model.dropout.p = 0.3
        engine = made(model=model, eigenvalue={"enabled": enabled})
        step(engine, 2)
        runs.append({**dict(model.named_buffers()), **dict(model.named_parameters()), "next": torch.rand(3)})
    assert runs[0].keys() == runs[1].keys() and "last" in runs[0]
    assert all(mine.equal(runs[1][name]) for name, mine in runs[0].items())


def test_a_resumed_run_knows_its_factors(tmp_path: Path) -> None:
    whole = made()
    step(whole, 5)
    part = made()
    step(part, 1)
    part.save_checkpoint(tmp_path)
    again = made()
    again.load_checkpoint(tmp_path)
    step(again, 4)
    assert again.core.state.moq.state_dict() == whole.core.state.moq.state_dict()  # type: ignore
    for mine, theirs in zip(again.module.parameters(), whole.module.parameters(), strict=True):
        assert mine.equal(theirs)


class Outputs(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


REFUSED = [({"layer_name": "bert.encoder.layer"}, "the model has no such list of blocks; its lists are layers"),
           ({"layer_num": 12}, "is 12, and layers has 3"), ({"tol": 0}, "tol is 0"),
           ({"max_iter": 0}, "max_iter is 0: expected a number >= 1")]


def test_what_cannot_be_looked_for_is_one_line_in_keys() -> None:
    for eigenvalue, says in REFUSED:
        with pytest.raises(ConfigError) as caught:
            made(eigenvalue=eigenvalue)
        assert says in str(caught.value) and "\n" not in str(caught.value)
        assert f"eigenvalue.{next(iter(eigenvalue))} " in str(caught.value) and "--" not in str(caught.value)
    with pytest.raises(ConfigError, match="eigenvalue.enabled needs a list of modules in the model") as caught:
        made(model=nn.Linear(4, 4))
    assert "None" not in str(caught.value) and "--" not in str(caught.value)
    engine = made(model=Outputs())
    with pytest.raises(ConfigError, match="returns something else than its loss"):
        engine.backward(engine(batch(0)).mean())
        engine.step()


# ---- what scripts do to rounded weights ------------------------------------------------------------------------------


def rounding_engine(stage: int = 0, precision: str = "fp32", **block: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return engine_around(model, stage, {"quantize_groups": 2, "quantize_bits": {"start_bits": 3, "target_bits": 3},
                                        **block}, {}, precision=precision)


def step_rounding(engine: Engine, count: int = 1) -> None:
    dtype = next(iter(engine.module.parameters())).dtype
    for index in range(count):
        x = torch.linspace(-1, 1, 16, dtype=dtype).view(2, 8) * (1 + index + engine.groups.dp.rank)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def values(x: Tensor) -> list[int]:
    """How many different numbers each of the two groups has."""
    return [len(half.unique()) for half in x.detach().float().chunk(2)]


def scripted(rank: int, stage: int) -> list[dict[str, Tensor]]:
    """What a script may do between steps: each time the weights that it sees then, and the masters."""
    found = []

    def look() -> None:
        found.append(weights_of(engine))
        found.append({name: safe_get_full_fp32_param(parameter)  # type: ignore[misc]
                      for name, parameter in engine.module.named_parameters()})

    engine = rounding_engine(stage)
    step_rounding(engine, 2)
    look()
    with zero.GatheredParameters([engine.module[0].weight], modifier_rank=0):
        if rank == 0:
            engine.module[0].weight[:3] = torch.linspace(-0.3, 0.2, 24).view(3, 8)
    look()
    safe_set_full_fp32_param(engine.module[2].weight, torch.linspace(-1, 1, 128).view(8, 16))
    look()
    with zero.GatheredParameters(list(engine.module.parameters())):
        state = {name: value + 0.01 for name, value in engine.module.state_dict().items()}
    engine.load_module_state_dict(state)
    look()
    step_rounding(engine)
    look()
    return found


@on_ranks(2)
def test_edits_are_masters_and_are_rounded_at_once(rank: int, world: int) -> None:
    """At every stage the same; what was not edited keeps its exact master."""
    first, *others = (scripted(rank, stage) for stage in range(4))
    for found in others:
        assert all(mine[name].equal(value) for mine, theirs in zip(found, first, strict=True)
                   for name, value in theirs.items())
    weights, masters = first[0::2], first[1::2]
    for seen in weights:
        assert max(values(seen["0.weight"])) <= 8 and max(values(seen["2.weight"])) <= 8
    edited, exact = masters[1]["0.weight"], masters[0]["0.weight"]
    assert edited[:3].equal(torch.linspace(-0.3, 0.2, 24).view(3, 8)) and edited[3:].equal(exact[3:])
    assert masters[2]["2.weight"].equal(torch.linspace(-1, 1, 128).view(8, 16))
    assert masters[3]["0.weight"].equal(weights[2]["0.weight"] + 0.01)


def test_a_write_that_would_not_last_is_still_found(tmp_path: Path) -> None:
    engine = rounding_engine(0, quantize_algo={"rounding": "stochastic"})
    step_rounding(engine, 2)
    engine.save_checkpoint(tmp_path)  # rounded weights are no edit
    engine.module[0].weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match="0.weight was written to in place"):
        engine.save_checkpoint(tmp_path)


def test_the_weights_that_are_saved_for_others_are_the_rounded_ones(tmp_path: Path) -> None:
    engine = rounding_engine(0, "bf16", quantize_bits={"start_bits": 4, "target_bits": 4})
    step_rounding(engine)
    engine.save_16bit_model(tmp_path, "weights.bin")
    saved = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert max(values(saved["0.weight"])) <= 16 and saved["0.weight"].equal(engine.module[0].weight)
