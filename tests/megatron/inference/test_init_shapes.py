"""`init_inference` fills a model from a checkpoint of its own shape, and from no other: nothing is written before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron.config.hf_config import HF_FIELDS
from megatron.errors import TrainerError
from megatron.inference import init_inference
from tests.distributed import run_ranks
from tests.megatron.inference.gpt2s import ours, theirs

OTHERS: Mapping[str, tuple[Any, Any]] = {
    "num_layers": (2, 3), "num_attention_heads": (2, 4), "ffn_size": (64, 192), "max_position_embeddings": (32, 24),
    "known_vocab_size": (100, 211), "layernorm_epsilon": (1e-3, 1e-5)}
"""Field -> its value in the model, and in the checkpoint."""
OTHERS_OF_THEIRS: Mapping[str, tuple[Any, Any]] = {
    "activation_function": ("relu", "gelu_new"), "scale_attn_weights": (False, True),
    "scale_attn_by_inverse_layer_idx": (True, False), "tie_word_embeddings": (False, True)}
KEYS = {"ffn_size": "intermediate_size", "known_vocab_size": "vocab_size"}
KEYS_OF_THEIRS = {ours: theirs for theirs, (ours, _) in HF_FIELDS.items()} | {
    "ffn_size": "n_inner", "known_vocab_size": "vocab_size"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    theirs().save_pretrained(path)
    return str(path)


def refusal(model: Any, folder: str) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TrainerError) as error:
        init_inference(model, checkpoint=folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error.value)


@pytest.mark.parametrize("name", [*OTHERS, *OTHERS_OF_THEIRS])
def test_a_model_of_another_shape_is_refused(name: str, folder: str) -> None:
    given, saved = {**OTHERS, **OTHERS_OF_THEIRS}[name]
    models = [theirs(seed=9, **{KEYS_OF_THEIRS.get(name, name): given})]
    models += [ours(**{KEYS.get(name, name): given})] if name in OTHERS else []
    for model in models:
        assert refusal(model, folder) == (
            f"checkpoint {folder} is another model: its {name} is {saved}, and the given model's is {given}; leave the "
            "model out, and it is made as the checkpoint says")


def test_every_difference_is_named_at_once(folder: str) -> None:
    said = refusal(theirs(n_layer=2, n_head=2, n_embd=32, activation_function="relu"), folder)
    assert said.count("its ") == 5 and "\n" not in said
    assert all(f"its {name} is {saved}, and the given model's is {given}; " in said for name, saved, given in (
        ("num_layers", 3, 2), ("hidden_size", 48, 32), ("num_attention_heads", 4, 2), ("ffn_size", 192, 128),
        ("activation_function", "gelu_new", "relu")))


def test_what_says_the_same_in_another_way_is_the_same(folder: str) -> None:
    model = theirs(seed=9, n_inner=192, activation_function="gelu_pytorch_tanh", attn_pdrop=0.3)
    init_inference(model, checkpoint=folder)
    assert torch.equal(model.transformer.h[2].mlp.c_fc.weight.t(), theirs().transformer.h[2].mlp.c_fc.weight)


def on_one_rank(rank: int, world: int, folder: str) -> str:
    return refusal(theirs(seed=9, n_head=4 - 2 * rank), folder)


def test_a_model_that_is_another_on_one_rank_is_refused_on_all(folder: str) -> None:
    for said in run_ranks(on_one_rank, 2, folder):
        assert "its num_attention_heads is 4, and the given model's is 2" in said
