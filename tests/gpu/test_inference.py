"""Text on a GPU: recorded steps are the steps, and the text is that of the whole model."""

from __future__ import annotations

import pytest
import torch

from megatron.config.tree import ModelConfig
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator, texts_of
from megatron.inference.request import Sampling
from megatron.model.gpt2 import GPT2

pytestmark = pytest.mark.gpu

SHAPE = ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, max_position_embeddings=300, vocab_size=997,
                    init_method_std=0.2)


def prompts() -> list[list[int]]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(997, (length,), generator=made).tolist() for length in (1, 7, 130, 40, 90, 3, 250)]


@torch.no_grad()
def test_logits_over_a_cache_are_those_of_the_whole_text(device: torch.device) -> None:
    model = GPT2(SHAPE).to(device)
    decoder, texts = Decoder(model, 7), prompts()
    decoder.prefill(range(len(texts)), texts)
    for step in range(40):
        if step % 6 == 5:
            texts.pop()
        for number, text in enumerate(texts):
            text.append((31 * step + 7 * number) % 997)
        found = decoder.decode_step([text[-1] for text in texts])
        for text, logits in zip(texts, found, strict=True):  # sums in another order
            expected = model(torch.tensor([text], device=device))[0]
            torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("settings", [Sampling(greedy=True), Sampling(top_k=40, top_p=0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_is_the_same_every_time(settings: Sampling, dtype: torch.dtype, device: torch.device) -> None:
    model = GPT2(SHAPE).to(device, dtype)
    generator = Generator(Decoder(model, 3), vocabulary=997, eod=None)
    first, again = ([text.tokens for text in texts_of(generator, prompts(), 40, settings, 5)] for _ in range(2))
    assert first == again and all(len(tokens) == 40 for tokens in first)
