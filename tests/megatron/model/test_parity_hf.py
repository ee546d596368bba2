"""The same weights in HF transformers' GPT-2: the same logits, loss and gradients."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.convert.importers import HUGGING_FACE
from megatron.model import GPT2
from mpu.groups import build
from tests.megatron.helpers import engine_of, tiny_model
from tests.megatron.zero.run import gradient_runs

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

VOCAB, LAYERS, HIDDEN, HEADS, LENGTH = 211, 3, 48, 4, 24
"""211 is not a multiple of 128: the padded vocabulary has 256 rows at tp 1 and at tp 2."""


def our_model() -> GPT2:
    """With weights as large as those of a trained model: at N(0, 0.02) all after the embeddings hardly matters."""
    model = GPT2(tiny_model(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, vocab_size=VOCAB,
                            max_position_embeddings=LENGTH))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.05
        model.wte.weight[VOCAB:] = 0
    return model


def hf_name(name: str) -> str:
    return HUGGING_FACE.to_their_name(name, "transformer.")


def as_in_hf(name: str, x: torch.Tensor) -> torch.Tensor:
    x = x.T if HUGGING_FACE.is_transposed(name) else x
    return x[:VOCAB] if name == "wte.weight" else x


def hf_twin(model: GPT2) -> torch.nn.Module:
    """HF's GPT-2 with copies of these weights."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
                                     resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", use_cache=False)
    twin = transformers.GPT2LMHeadModel(config).float().train()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        theirs.pop(hf_name(name)).data.copy_(as_in_hf(name, parameter.detach()))
    assert not theirs, f"weights without a twin: {sorted(theirs)}"
    return twin


def rows(count: int, seed: int) -> torch.Tensor:
    """[count, LENGTH + 1] tokens with something to learn."""
    start, stride = torch.randint(VOCAB, (2, count, 1), generator=torch.Generator().manual_seed(seed))
    return (start + (1 + stride % 5) * torch.arange(LENGTH + 1)) % VOCAB


def test_logits_at_every_position_equal_hf() -> None:
    model = our_model()
    twin, tokens = hf_twin(model), rows(4, seed=1)[:, :-1]
    with torch.no_grad():
        ours, theirs = model.logits(model.hidden_states(tokens)), twin(tokens).logits
    assert ours.shape == theirs.shape == (4, LENGTH, VOCAB)
    assert theirs.std() > 0.1, "logits too small to tell anything"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(tokens), theirs[:, -1], atol=1e-5, rtol=0)


def test_loss_and_every_gradient_equal_hf() -> None:
    model = our_model()
    twin, batch = hf_twin(model), rows(4, seed=2)
    engine = engine_of(model, build(), accumulation=1)
    ours = engine(batch[:, :-1], batch[:, 1:], grad_scale=engine.backward_scale)
    theirs = F.cross_entropy(twin(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    engine.backward(ours)
    theirs.backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    seen = 0
    for segment, grad in gradient_runs(engine):
        name = segment.slot.name
        grad = grad.view(segment.slot.shape)
        assert name != "wte.weight" or not grad[VOCAB:].any()
        # Sums of 96 fp32 terms in another order; gradients are up to 0.1.
        torch.testing.assert_close(as_in_hf(name, grad), expected[hf_name(name)], atol=2e-6, rtol=1e-4,
                                   msg=lambda m: f"{name}: {m}")
        seen += 1
    assert seen == len(expected)
