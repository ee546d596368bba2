"""`init_inference` fills a model from a checkpoint of its own shape, and from no other: nothing is written before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron.errors import TrainerError
from megatron.inference import init_inference
from tests.distributed import run_ranks
from tests.megatron.inference.gpt2s import ours, theirs

OTHERS: Mapping[str, tuple[Any, Any]] = {
    "n_layer": (2, 3), "n_embd": (32, 48), "n_head": (2, 4), "n_inner": (64, 192), "n_positions": (32, 24),
    "vocab_size": (100, 211), "layer_norm_epsilon": (1e-3, 1e-5), "activation_function": ("relu", "gelu_new"),
    "scale_attn_weights": (False, True), "scale_attn_by_inverse_layer_idx": (True, False),
    "tie_word_embeddings": (False, True),
}
"""Of transformers' configuration: of the model, of the checkpoint."""
OURS: Mapping[str, tuple[Any, Any]] = {
    "num_layers": (2, 3), "num_attention_heads": (2, 4), "intermediate_size": (64, 192),
    "max_position_embeddings": (32, 24), "vocab_size": (100, 211), "layernorm_epsilon": (1e-3, 1e-5)}


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


@pytest.mark.parametrize("name", [*OTHERS, "more layers"])
def test_a_model_of_transformers_of_another_shape_is_refused(name: str, folder: str) -> None:
    key, (its, saved) = ("n_layer", (4, 3)) if name == "more layers" else (name, OTHERS[name])
    also = "its n_inner is 192, and the given model's is 128; " if key == "n_embd" else ""
    assert refusal(theirs(seed=9, **{key: its}), folder) == (
        f"checkpoint {folder} is another model: its {key} is {saved}, and the given model's is {its}; {also}leave the "
        "model out, and it is made as the checkpoint says")


@pytest.mark.parametrize("name", OURS)
def test_a_model_of_ours_of_another_shape_is_refused(name: str, folder: str) -> None:
    its, saved = OURS[name]
    said = refusal(ours(**{name: its}), folder)
    assert f"another model: its {name} is {saved}, and the given model's is {its}; leave" in said


def test_every_difference_is_named_at_once(folder: str) -> None:
    said = refusal(theirs(n_layer=2, n_head=2, activation_function="relu"), folder)
    assert all(f"its {name} is {OTHERS[name][1]}" in said for name in ("n_layer", "n_head", "activation_function"))
    assert "\n" not in said and said.count("its ") == 3


def test_what_says_the_same_in_another_way_is_the_same(folder: str) -> None:
    model = theirs(seed=9, n_inner=192, activation_function="gelu_pytorch_tanh", attn_pdrop=0.3)
    init_inference(model, checkpoint=folder)
    assert torch.equal(model.transformer.h[2].mlp.c_fc.weight.t(), theirs().transformer.h[2].mlp.c_fc.weight)


def on_one_rank(rank: int, world: int, folder: str) -> str:
    return refusal(theirs(seed=9, n_head=4 - 2 * rank), folder)


def test_a_model_that_is_another_on_one_rank_is_refused_on_all(folder: str) -> None:
    for said in run_ranks(on_one_rank, 2, folder):
        assert "its n_head is 4, and the given model's is 2" in said
