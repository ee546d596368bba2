"""A module that is cut by a policy computes what it did whole, and a wrong policy is refused: garbage is no answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import TrainerError
from megatron.inference import Cut, init_inference
from megatron.inference.api.policy import KNOWN_POLICIES
from megatron.zero.hooks import iter_tensors
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


class FusedModel(Model):
    def __init__(self) -> None:
        super().__init__(fused=True)


class Scaled(SelfAttention):
    """Its scale is of a width that DeepSpeed's form does not know: nothing fails, and the numbers are others."""

    def __init__(self) -> None:
        super().__init__(fused=False)
        self.whole_width = WIDTH
        torch.manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, self.num_heads, -1).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, scale=(self.whole_width / self.num_heads) ** -0.5)
        return self.out(y.transpose(1, 2).flatten(2))


class OddInputs(nn.Module):
    """Takes what cannot be made up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = Layer(fused=False)

    def forward(self, numbers: Tensor, factor: float) -> Tensor:
        return self.layer(numbers * factor)


class Shared(Model):
    """One layer in two places, and its attention under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.layers[0]
        self.layers[0].also = self.layers[0].attention


COLUMNS = ("query", "key", "value", "wide", "gate")
NUMBERS = ("attention.num_heads", "attention.inner_dim")
ROWS = ("attention.out", "mlp.out")
TOKENS = torch.arange(12).view(2, 6)
X = torch.ones(1, 3, WIDTH)
GOOD: dict[str, tuple[Callable[[], nn.Module], Mapping[Any, Any], Any, tuple[Any, ...]]] = {
    "DeepSpeed's form": (Model, {Layer: ROWS}, None, (TOKENS,)),
    "a class by its name": (Model, {"Layer": list(ROWS)}, None, (TOKENS,)),
    "two classes": (Model, {SelfAttention: "out", Layer: Cut(column=("wide", "gate"), row=("mlp.out",))}, None,
                    (TOKENS,)),
    "ours": (Model, {Layer: Cut(column=COLUMNS, row=ROWS, divide=NUMBERS)}, None, (TOKENS,)),
    "fused": (FusedModel, {Layer: Cut(column=COLUMNS[3:], row=ROWS, fused={"attention.qkv": 3}, divide=NUMBERS)}, None,
              (TOKENS,)),
    "another width": (Scaled, {Scaled: Cut(column=COLUMNS[:3], row=("out",), divide=("num_heads", "whole_width"))},
                      None, (X,)),
    "an example": (OddInputs, {Layer: ROWS}, (X, 2.0), (X, 3.0)),
    "an example by name": (OddInputs, {Layer: ROWS}, {"numbers": X, "factor": 1.0}, (X, 3.0)),

    "a layer in two places": (Shared, {Layer: ROWS}, None, (TOKENS,)),
}
"""(model, policy, example_inputs, inputs)"""


def cut_outputs(rank: int, world: int) -> list[tuple[Tensor, int]]:
    found = []
    for make, policy, example, inputs in GOOD.values():
        engine = init_inference(make(), mp_size=world, dtype=torch.float32, injection_policy=policy,
                                example_inputs=example)
        (output,) = iter_tensors(engine(*inputs))
        found.append((output, sum(parameter.numel() for parameter in engine.parameters())))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_module_computes_what_it_did(world: int) -> None:
    for found in run_ranks(cut_outputs, world):
        for (output, held), (name, (make, _, _, inputs)) in zip(found, GOOD.items(), strict=True):
            whole = make().eval()
            (expected,) = iter_tensors(whole(*inputs))
            torch.testing.assert_close(output, expected.detach(), **CLOSE, msg=name)
            assert held <= sum(parameter.numel() for parameter in whole.parameters()) / 1.5, name


BAD: dict[str, tuple[Callable[[], nn.Module], Mapping[Any, Any] | None, str]] = {
    "a row layer is left out": (Model, {Layer: "attention.out"}, "the model fails"),
    "a square column layer is called a row": (Model, {Layer: (*ROWS, "key")}, "the model fails"),
    "fused, and not said so": (FusedModel, {Layer: Cut(column=("qkv", "wide", "gate"), row=ROWS, divide=NUMBERS)},
                               "the output of layers.0.attention.out differs"),
    "fused otherwise": (FusedModel, {Layer: Cut(column=COLUMNS[3:], row=ROWS, fused={"attention.qkv": 2},
                                                divide=NUMBERS)},
                        "layers.0.attention.out differs from the whole model's by"),
    "heads are not divided": (Model, {Layer: Cut(column=COLUMNS, row=ROWS, divide=NUMBERS[1:])},
                              "the output of layers.0.attention.out differs"),
    "an output layer": (Model, {Model: Cut(column=("head",))}, "its outputs have other shapes"),
    "a misspelt name": (Model, {Layer: ("attention.oot", "mlp.out")}, "no attention.oot: did you mean attention.out"),
    "a misspelt class": (Model, {"Leyer": ROWS}, "the model has no Leyer; did you mean Layer?"),
    "a norm": (Model, {Layer: (*ROWS, "norm")}, "norm of Layer is a LayerNorm, which cannot be cut as a row layer"),
    "a number that is none": (Model, {Layer: Cut(column=COLUMNS, row=ROWS, divide=("attention.heads",))},
                              "has no number attention.heads to divide"),
    "no names": (Model, {Layer: ()}, "Layer: () is not supported; give the names of its row-parallel layers"),
    "no class": (Model, {3: ROWS}, "3 is no class of layers"),
    "odd parts": (Model, {Layer: Cut(fused={"attention.query": 5}, row=ROWS)}, "are not 5 equal parts"),
    "no policy": (Model, None, "how a Model is cut over 2 ranks is not known: give injection_policy"),
    "a scale that hardly matters": (Scaled, {Scaled: "out"}, "cut by the policy for Scaled, the model computes "
                                    "something else: the output of out differs"),
    "inputs that cannot be made up": (OddInputs, {Layer: ROWS}, "it fails on made-up inputs (TypeError"),

    "an odd number": (Model, {Layer: Cut(column=COLUMNS, row=ROWS, divide=("attention.unused",))},
                      "layers.0.attention.unused is 5, which 2 ranks cannot share evenly"),
    "an odd width": (lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)), {nn.Sequential: "1"},
                     "0 has 7 output features, which 2 ranks cannot share evenly"),
}


def refusals(rank: int, world: int) -> list[str]:
    found = []
    for make, policy, _ in BAD.values():
        with pytest.raises(TrainerError) as error:
            init_inference(make(), mp_size=world, **({} if policy is None else {"injection_policy": policy}))
        found.append(str(error.value))
    return found


def test_a_wrong_policy_is_refused_and_says_where() -> None:
    for said in run_ranks(refusals, 2):
        for one, (name, (*_, expected)) in zip(said, BAD.items(), strict=True):
            assert expected in one and "\n" not in one, (name, one)
    whole = init_inference(Model(), dtype=torch.bfloat16)  # on one rank none is needed
    assert whole(TOKENS)["scores"][0].dtype is torch.bfloat16


# ---- models of transformers that are cut without a policy ---------------------------------------------------------


os.environ["HF_HUB_OFFLINE"] = "1"
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, dict[str, Any]] = {
    "Bert/ForMaskedLM": dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64),
    "T5/ForConditionalGeneration": dict(d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4,
                                        decoder_start_token_id=0),
    "Llama/ForCausalLM": dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                              num_key_value_heads=2),
    "GPTNeo/ForCausalLM": dict(hidden_size=48, num_layers=2, num_heads=4, max_position_embeddings=64,
                               attention_types=[[["global", "local"], 1]]),
    "GPTNeoX/ForCausalLM": dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64),
    "GPTJ/ForCausalLM": dict(n_embd=48, n_layer=2, n_head=4, rotary_dim=8),
    "OPT/ForCausalLM": dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
                            word_embed_proj_dim=48),
    "GPT2/ForSequenceClassification": dict(n_embd=48, n_layer=2, n_head=4, num_labels=3),
    "GPT2/LMHeadModel": dict(n_embd=48, n_layer=2, n_head=4),
}


def made(name: str) -> Any:
    family, _, task = name.partition("/")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=100, **SPECIAL_TOKENS, **SIZES[name])
    model = getattr(transformers, family + task)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


def answers(model: Any) -> list[torch.Tensor]:
    tokens = torch.tensor([[5, 6, 7, 8], [9, 3, 4, 5]])
    more = {"decoder_input_ids": tokens[:, :3]} if model.config.is_encoder_decoder else {}
    found = [model(input_ids=tokens[:1], **more).logits.detach()]
    return [*found, model.generate(tokens, max_new_tokens=6)] if model.can_generate() else found


def cut_answers(rank: int, world: int, names: list[str]) -> list[list[torch.Tensor]]:
    return [answers(init_inference(made(name), tensor_parallel={"tp_size": world})) for name in names]


def test_models_that_are_known_are_cut_without_a_policy() -> None:
    for found in run_ranks(cut_answers, 2, list(SIZES)):
        for (logits, *text), name in zip(found, SIZES, strict=True):
            expected, *expected_text = answers(made(name))
            torch.testing.assert_close(logits, expected, **CLOSE, msg=name)
            assert all(map(torch.equal, text, expected_text)), name


def test_every_known_class_is_one_of_these() -> None:
    modules = [module for name in SIZES for module in made(name).modules()]
    assert KNOWN_POLICIES.keys() <= {f"{type(module).__module__}.{type(module).__name__}" for module in modules}
