"""Models of transformers that are cut without a policy, and its pipelines over an engine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megatron.errors import TrainerError
from megatron.inference import init_inference
from megatron.inference.api.policy import KNOWN_POLICIES
from tests.distributed import run_ranks
from tests.megatron.inference.gpt2s import CLOSE

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

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


def bloom(rank: int, world: int) -> str:
    config = transformers.BloomConfig(vocab_size=100, hidden_size=48, n_layer=2, n_head=4)
    with pytest.raises(TrainerError) as error:
        init_inference(transformers.BloomForCausalLM(config), mp_size=world,
                       injection_policy={"BloomBlock": ("self_attention.dense", "mlp.dense_4h_to_h")})
    return str(error.value)


def test_one_that_counts_heads_outside_of_its_layers_is_refused() -> None:
    for said in run_ranks(bloom, 2):
        assert "cut by the policy for BloomBlock, the model fails" in said
