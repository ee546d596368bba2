"""Rotary positions, RMSNorm, QK norm, grouped queries and other activations, against a slow reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.convert.export_huggingface import export_huggingface
from megatron.checkpoint.reader import open_checkpoint
from megatron.errors import ConfigError
from megatron.inference.decoder import Decoder
from megatron.model import GPT2, count_parameters
from mpu.groups import build
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, tiny_model, total_digest, train, write_corpus

AXES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope"), "normalization": ("LayerNorm", "RMSNorm"),
    "qk_norm": (False, True), "num_query_groups": (None, 2, 1), "activation": ("gelu", "squared_relu", "swiglu")}
SHAPES = [dict(zip(AXES, cell, strict=True)) for cell in (case.values for case in pairs(*AXES.values()))]


def reference_logits(model: GPT2, tokens: list[int]) -> Tensor:
    """[s, V]: one position, one head and one pair at a time where that is what the papers define."""
    config, weights = model.config, dict(model.named_parameters())
    n, g, d = config.num_attention_heads, config.kv_heads, config.head_size

    def norm(x: Tensor, name: str) -> Tensor:
        if config.normalization == "RMSNorm":
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def head(x: Tensor, number: int) -> Tensor:  # one head of queries or keys
        x = x[:, number * d : (number + 1) * d]
        if config.qk_norm:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        if config.position_embedding_type == "rope":
            x = torch.stack([row(x[at], at) for at in range(len(x))])
        return x

    def row(x: Tensor, at: int) -> Tensor:
        turned = x.clone()
        for i in range(d // 2):
            angle = at / config.rotary_base ** (2 * i / d)
            turned[i] = x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle)
            turned[i + d // 2] = x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle)
        return turned

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = model.wte.weight[tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + weights["wpe.weight"][: len(tokens)]
    later = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for block in (f"blocks.{number}" for number in range(config.num_layers)):
        y = norm(x, f"{block}.ln_1")
        if g == n:
            q, k, v = project(y, f"{block}.attn.qkv").split(n * d, 1)
        else:
            q, (k, v) = project(y, f"{block}.attn.q"), project(y, f"{block}.attn.kv").split(g * d, 1)
        heads = []
        for number in range(n):
            group = number // (n // g)
            scores = head(q, number) @ head(k, group).T / math.sqrt(d)
            heads.append(scores.masked_fill(later, -math.inf).softmax(1) @ v[:, group * d : (group + 1) * d])
        x = x + project(torch.cat(heads, 1), f"{block}.attn.proj")
        y = project(norm(x, f"{block}.ln_2"), f"{block}.mlp.fc")
        if config.activation == "swiglu":
            gate, y = y.split(config.ffn_size, 1)
            y = gate * gate.sigmoid() * y
        else:
            y = y.clamp(min=0) ** 2 if config.activation == "squared_relu" else F.gelu(y, approximate="tanh")
        x = x + project(y, f"{block}.mlp.proj")
    return (norm(x, "ln_f") @ model.wte.weight.T)[:, : config.known_vocab_size]


TOKENS = [(7 * number) ** 2 % 257 for number in range(12)]


def found_logits(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each shape: logits of one forward, of decoding with a cache, and the slow ones (one rank)."""
    tp, found = build(world).tp, []
    for shape in SHAPES:
        if world > 1 and shape["num_query_groups"] == 1:
            continue  # one head of keys cannot be shared out
        model = GPT2(tiny_model(init_method_std=0.2, **shape), tp).eval()
        with torch.no_grad():
            whole = model.logits(model.hidden_states(torch.tensor([TOKENS])))[0]
            decoder = Decoder(model, rows=2)  # beside a shorter text, whose cache is masked
            cached = [decoder.prefill([0, 1], [TOKENS[:5], TOKENS[:2]])[0]]
            cached += [decoder.decode_step([token, 3])[0] for token in TOKENS[5:]]
            found.append((whole, torch.stack(cached), reference_logits(model, TOKENS) if world == 1 else whole))
    return found


def test_forward_and_cached_decoding_equal_the_reference_on_one_and_two_ranks() -> None:
    (expected,) = run_ranks(found_logits, 1)
    for whole, cached, reference in expected:
        torch.testing.assert_close(whole, reference, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(cached, reference[4:], atol=2e-5, rtol=1e-5)
    divisible = [each for each, shape in zip(expected, SHAPES, strict=True) if shape["num_query_groups"] != 1]
    for found in run_ranks(found_logits, 2):
        for (whole, cached, _), (_, _, reference) in zip(found, divisible, strict=True):
            torch.testing.assert_close(whole, reference, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(cached, reference[4:], atol=2e-5, rtol=1e-5)


def test_counted_parameters_are_those_of_the_model() -> None:
    for shape in SHAPES:
        config = tiny_model(make_vocab_size_divisible_by=1, **shape)
        assert count_parameters(config)[0] == sum(parameter.numel() for parameter in GPT2(config).parameters())


def test_positions_start_again_at_each_document() -> None:
    model = GPT2(tiny_model(init_method_std=0.2, position_embedding_type="rope", normalization="RMSNorm")).eval()
    positions, segments = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]), torch.tensor([[0] * 5 + [1] * 3])
    with torch.no_grad():
        packed = model.hidden_states(torch.tensor([TOKENS[:8]]), positions, segments)
        alone = model.hidden_states(torch.tensor([TOKENS[5:8]]))
    torch.testing.assert_close(packed[:, 5:], alone, atol=1e-5, rtol=1e-5)


LLAMA_LIKE = ("--position-embedding-type rope --normalization RMSNorm --qk-norm --num-query-groups 2 "
              "--activation swiglu").split()


@pytest.mark.parametrize("flags", ["", "--zero-stage 3 --checkpoint-activations"], ids=["stage 0", "stage 3"])
def test_a_run_resumes_bit_for_bit_and_export_names_what_gpt2_lacks(tmp_path: Path, flags: str) -> None:
    run = [*TINY, *NO_DROPOUT, *LLAMA_LIKE, *flags.split(), "--train-data", write_corpus(tmp_path / "corpus"),
           "--lr", "1e-2", "--save-interval", "2"]
    train([*run, "--train-iters", "4", "--save", tmp_path / "once"])
    train([*run, "--train-iters", "4", "--exit-interval", "2", "--save", tmp_path / "twice"])
    train([*run, "--train-iters", "4", "--save", tmp_path / "twice", "--load", tmp_path / "twice"])
    assert total_digest(tmp_path / "once") == total_digest(tmp_path / "twice")
    with pytest.raises(ConfigError, match="no --position-embedding-type, --normalization, --qk-norm, --activation, "
                                          "--num-query-groups"):
        export_huggingface(open_checkpoint(str(tmp_path / "once")), tmp_path / "hf")


@pytest.mark.parametrize("flags, words", [
    ("--num-query-groups 3", "--num-attention-heads 4 is not divisible by --num-query-groups 3"),
    ("--position-embedding-type rope --hidden-size 20", "needs an even head size, found 5"),
    ("--num-query-groups 1 --model-parallel-size 2", "--num-query-groups 1 is not divisible by"),
])
def test_impossible_shapes_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train([*TINY, *flags.split(), "--mock-data", "--train-iters", "1"])
