"""A module that is cut by a policy computes what it did whole, and a wrong policy is refused: garbage is no answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import TrainerError
from megatron.inference import Cut, init_inference
from tests.distributed import run_ranks

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
WIDTH, HEADS = 24, 4


class SelfAttention(nn.Module):
    """q, k and v apart, or in one layer."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.inner_dim, self.unused = HEADS, WIDTH, 5
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        parts = self.qkv(x).chunk(3, -1) if "qkv" in self._modules else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(b, s, self.num_heads, self.inner_dim // self.num_heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, s, self.inner_dim))


class Layer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(fused)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"wide": nn.Linear(WIDTH, 2 * WIDTH), "gate": nn.Linear(WIDTH, 2 * WIDTH),
                                  "out": nn.Linear(2 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp["out"](self.mlp["wide"](x).sigmoid() * self.mlp["gate"](x))


class Model(nn.Module):
    def __init__(self, fused: bool = False, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return {"scores": [self.head(x)]}


COLUMNS = ("query", "key", "value", "wide", "gate")
NUMBERS = ("attention.num_heads", "attention.inner_dim")
ROWS = ("attention.out", "mlp.out")
GOOD: dict[str, tuple[bool, Any]] = {
    "DeepSpeed's form": (False, {Layer: ROWS}),
    "one name for both": (False, {Layer: "out"}),
    "a class by its name": (False, {"Layer": list(ROWS)}),
    "two classes": (False, {SelfAttention: "out", Layer: Cut(column=("wide", "gate"), row=("mlp.out",))}),
    "ours": (False, {Layer: Cut(column=COLUMNS, row=ROWS, divide=NUMBERS)}),
    "attention alone": (False, {Layer: Cut(column=COLUMNS[:3], row=ROWS[:1], divide=NUMBERS)}),
    "fused": (True, {Layer: Cut(column=COLUMNS[3:], row=ROWS, fused={"attention.qkv": 3}, divide=NUMBERS)}),
}
TOKENS = torch.arange(12).view(2, 6)


def cut_output(rank: int, world: int, names: list[str]) -> list[tuple[Tensor, int]]:
    found = []
    for name in names:
        fused, policy = GOOD[name]
        engine = init_inference(Model(fused), mp_size=world, dtype=torch.float32, injection_policy=policy)
        held = sum(parameter.numel() for layer in engine.layers for parameter in layer.parameters())
        found.append((engine(TOKENS)["scores"][0], held))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_module_computes_what_it_did(world: int) -> None:
    for found in run_ranks(cut_output, world, list(GOOD)):
        for (output, held), (name, (fused, _)) in zip(found, GOOD.items(), strict=True):
            whole = Model(fused).eval()
            torch.testing.assert_close(output, whole(TOKENS)["scores"][0].detach(), **CLOSE, msg=name)
            all_of_it = sum(parameter.numel() for layer in whole.layers for parameter in layer.parameters())
            assert held <= all_of_it / (1 if world == 1 else 1.2 if name == "attention alone" else 1.7), name


BAD: dict[str, tuple[bool, Mapping[Any, Any], str]] = {
    "a row layer is left out": (False, {Layer: "attention.out"}, "the model fails"),
    "the other one": (False, {Layer: "mlp.out"}, "the model fails"),
    "a column layer is called a row": (False, {Layer: (*ROWS, "wide")}, "the model fails"),
    "a square column layer is called a row": (False, {Layer: (*ROWS, "key")}, "the model fails"),
    "fused, in DeepSpeed's form": (True, {Layer: ROWS}, "the model fails"),
    "fused, and not said so": (True, {Layer: Cut(column=("qkv", "wide", "gate"), row=ROWS, divide=NUMBERS)},
                               "the output of layers.0.attention.out differs"),
    "fused otherwise": (True, {Layer: Cut(column=COLUMNS[3:], row=ROWS, fused={"attention.qkv": 2}, divide=NUMBERS)},
                        "layers.0.attention.out differs from the whole model's by"),
    "heads are not divided": (False, {Layer: Cut(column=COLUMNS, row=ROWS, divide=NUMBERS[1:])},
                              "the output of layers.0.attention.out differs"),
    "no number is divided": (False, {Layer: Cut(column=COLUMNS, row=ROWS)}, "the model fails"),
    "an output layer": (False, {Model: Cut(column=("head",))}, "its outputs have other shapes"),
    "a gate that stays whole": (False, {Layer: Cut(column=("wide",), row=("mlp.out",))}, "the model fails"),
    "a misspelt name": (False, {Layer: ("attention.oot", "mlp.out")}, "no attention.oot: did you mean attention.out"),
    "a misspelt class": (False, {"Leyer": ROWS}, "the model has no Leyer; did you mean Layer?"),
    "a norm": (False, {Layer: (*ROWS, "norm")}, "norm of Layer is a LayerNorm, which cannot be cut as a row layer"),
    "a number that is none": (False, {Layer: Cut(column=COLUMNS, row=ROWS, divide=("attention.heads",))},
                              "has no number attention.heads to divide"),
    "no names": (False, {Layer: ()}, "Layer: () is not supported; give the names of its row-parallel layers"),
    "DeepSpeed's policy classes": (False, {Layer: nn.Module}, "is not supported; give the names"),
    "no class": (False, {3: ROWS}, "3 is no class of layers"),
    "odd parts": (False, {Layer: Cut(fused={"attention.query": 5}, row=ROWS)}, "are not 5 equal parts"),
}


def refusals(rank: int, world: int) -> list[str]:
    found = []
    for fused, policy, _ in BAD.values():
        with pytest.raises(TrainerError) as error:
            init_inference(Model(fused), mp_size=world, injection_policy=policy)
        found.append(str(error.value))
    return found


def test_a_wrong_policy_is_refused_and_says_where() -> None:
    for said in run_ranks(refusals, 2):
        for one, (name, (*_, expected)) in zip(said, BAD.items(), strict=True):
            assert expected in one and "\n" not in one, (name, one)


def refused(rank: int, world: int) -> list[str]:
    """Twice; and one that is refused before it is cut."""
    model, found = Model(), []
    policy = {Layer: Cut(column=COLUMNS, row=ROWS, divide=NUMBERS[1:])}
    for work in (lambda: init_inference(model, mp_size=world, injection_policy=policy), lambda: model(TOKENS),
                 lambda: init_inference(model, mp_size=world, injection_policy={Layer: ROWS})):
        with pytest.raises(TrainerError) as error:
            work()
        found.append(str(error.value))
    model = Model()
    with pytest.raises(TrainerError):
        init_inference(model, mp_size=world, injection_policy={Layer: "oot"})
    init_inference(model, mp_size=world, injection_policy={Layer: ROWS})
    return found


def test_a_model_that_was_refused_when_it_was_cut_is_of_no_use_and_says_so() -> None:
    for _, *said in run_ranks(refused, 2):
        assert all("refused by init_inference and is partly cut or cast: load it again" in one for one in said)


class Scaled(SelfAttention):
    """Its scale is of a width that DeepSpeed's form does not know: nothing fails, and the numbers are others."""

    def __init__(self) -> None:
        super().__init__(fused=False)
        self.whole_width = WIDTH
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, self.num_heads, -1).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, scale=(self.whole_width / self.num_heads) ** -0.5)
        return self.out(y.transpose(1, 2).flatten(2))


def subtle(rank: int, world: int) -> tuple[str, Tensor]:
    torch.manual_seed(1)
    with pytest.raises(TrainerError) as error:
        init_inference(Scaled(), mp_size=world, injection_policy={Scaled: "out"})
    torch.manual_seed(1)
    cut = Cut(column=COLUMNS[:3], row=("out",), divide=("num_heads", "whole_width"))
    engine = init_inference(Scaled(), mp_size=world, injection_policy={Scaled: cut})
    return str(error.value), engine(torch.ones(1, 2, 24))


def test_a_scale_that_hardly_matters_at_small_weights_is_seen() -> None:
    torch.manual_seed(1)
    expected = Scaled()(torch.ones(1, 2, 24)).detach()
    for said, output in run_ranks(subtle, 2):
        assert "cut by the policy for Scaled, the model computes something else: the output of out differs" in said
        torch.testing.assert_close(output, expected, **CLOSE)


def uneven(rank: int, world: int) -> list[str]:
    found = []
    model = Model()
    model.layers[1].attention.num_heads = 3
    for model, given in ((Model(), Cut(column=COLUMNS, row=ROWS, divide=("attention.unused",))), (model, ROWS)):
        with pytest.raises(TrainerError) as error:
            init_inference(model, mp_size=world, injection_policy={Layer: given})
        found.append(str(error.value))
    return found


def test_what_ranks_cannot_share_evenly_is_refused_by_name() -> None:
    for said in run_ranks(uneven, 5):
        assert all("layers.0.attention.query has 24 output features, which 5 ranks cannot share" in one for one in said)
    for said in run_ranks(uneven, 2):
        assert "layers.0.attention.unused is 5, which 2 ranks cannot share evenly" in said[0]
        assert "layers.1.attention.num_heads is 3, which 2 ranks cannot share evenly" in said[1]


class Odd(nn.Module):
    """Takes what nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = Layer(fused=False)

    def forward(self, numbers: Tensor, factor: float) -> Tensor:
        return self.layer(numbers * factor)


def with_example(rank: int, world: int) -> tuple[str, Tensor, Tensor]:
    with pytest.raises(TrainerError) as error:
        init_inference(Odd(), mp_size=world, injection_policy={Layer: ROWS})
    numbers = torch.ones(1, 3, 24)
    one, other = (init_inference(Odd(), mp_size=world, injection_policy={Layer: ROWS}, example_inputs=given)
                  for given in ((numbers, 2.0), {"numbers": numbers, "factor": 1.0}))
    return str(error.value), one(torch.ones(2, 4, 24), 3.0), other(torch.ones(2, 4, 24), factor=3.0)


def test_a_model_whose_inputs_cannot_be_made_up_is_checked_on_given_ones() -> None:
    expected = Odd().eval()(torch.ones(2, 4, 24), 3.0).detach()
    for said, *outputs in run_ranks(with_example, 2):
        assert "it fails on made-up inputs (TypeError" in said and "example_inputs=(tensor, ...)" in said
        for output in outputs:
            torch.testing.assert_close(output, expected, **CLOSE)


class Skipping(Model):
    """Its example does not come to the second layer."""

    def forward(self, tokens: Tensor, layers: int = 1) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers[:layers]:
            x = layer(x)
        return x


def skipped(rank: int, world: int) -> tuple[str, Tensor]:
    with pytest.raises(TrainerError) as error:
        init_inference(Skipping(), mp_size=world, injection_policy={Layer: ROWS})
    engine = init_inference(Skipping(), mp_size=world, injection_policy={Layer: ROWS}, example_inputs=(TOKENS, 2))
    return str(error.value), engine(TOKENS, 2)


def test_a_layer_that_the_example_does_not_use_is_not_checked_by_it() -> None:
    for said, output in run_ranks(skipped, 2):
        assert "cannot be checked: layers.1.attention.out is not used by made-up inputs" in said
        torch.testing.assert_close(output, Skipping()(TOKENS, 2).detach(), **CLOSE)


class Shared(Model):
    """One layer in two places, and its attention under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.layers[0]
        self.layers[0].also = self.layers[0].attention


def shared(rank: int, world: int) -> tuple[Tensor, bool]:
    engine = init_inference(Shared(), mp_size=world, injection_policy={Layer: ROWS})
    return engine(TOKENS)["scores"][0], engine.layers[0].attention.out is engine.layers[1].attention.out


def test_a_layer_in_two_places_is_cut_once() -> None:
    for output, is_one in run_ranks(shared, 2):
        torch.testing.assert_close(output, Shared()(TOKENS)["scores"][0].detach(), **CLOSE)
        assert is_one


def without_policy(rank: int, world: int) -> str:
    with pytest.raises(TrainerError) as error:
        init_inference(Model(), mp_size=world)
    return str(error.value)


def test_without_a_policy_a_module_is_not_cut() -> None:
    for said in run_ranks(without_policy, 2):
        assert "how a Model is cut over 2 ranks is not known: give injection_policy" in said
    whole = init_inference(Model(), dtype=torch.bfloat16)
    assert whole(TOKENS)["scores"][0].dtype is torch.bfloat16
