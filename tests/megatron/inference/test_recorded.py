"""A step of fixed sizes, recorded once, is the step that was asked for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.config.tree import ModelConfig
from megatron.inference import decoder as decoders
from megatron.inference.decoder import CudaGraphRunner, Decoder
from megatron.inference.generation import Generator, texts_of
from megatron.inference.request import Sampling
from megatron.model.gpt2 import GPT2

SHAPE = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=40, vocab_size=61,
                    init_method_std=0.3)
PROMPTS = [[5], [1, 2, 3, 4, 5, 6], [9, 8, 7], [60] * 11, [0, 1], [30, 31, 32, 33]]


def record(runner: CudaGraphRunner, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What a graph does: the operations once before, none while recording, and the results always in one place."""
    run()
    place: list[Tensor] = []

    def again() -> Tensor:
        found = run()
        if not place:
            place.append(found.clone())
        return place[0].copy_(found)
    return again


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_text_from_recordings_is_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT2(SHAPE)

    def texts() -> list[list[int]]:
        found = texts_of(Generator(Decoder(model, rows), vocabulary=61, eod=None), PROMPTS, 25, Sampling(top_k=9), 1)
        return [text.tokens for text in found]
    expected = texts()
    monkeypatch.setattr(decoders, "on_accelerator", lambda where: True)
    monkeypatch.setattr(decoders, "MIN_GRAPH_POSITIONS", 8)
    with patch.object(CudaGraphRunner, "_capture", autospec=True, side_effect=record) as made:
        assert texts() == expected and made.called


def test_there_is_one_recording_for_each_size_of_rows_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, int]]()

    def step(tokens: Tensor, places: Tensor, positions: int) -> Tensor:
        made.append((len(tokens), positions))
        return tokens[:, None] + places[:, None]
    monkeypatch.setattr(CudaGraphRunner, "_capture", lambda self, run: (run(), run)[1])
    steps = CudaGraphRunner(6, 1000, torch.device("cpu"))
    for count in (1, 2, 3, 4, 5, 6):
        for place in (0, 127, 128, 600, 999):
            tokens, places = [*range(count)], [place] * count
            assert steps(step, tokens, places).flatten().tolist() == [token + place for token in tokens]
    assert set(made) == {(rows, positions) for rows in (1, 2, 4, 6) for positions in (128, 256, 1000)}
    assert len(made) == 6 * 5 + len(set(made))


def test_a_decoder_is_gone_with_its_cache_when_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when garbage is looked for: on a GPU it is gigabytes."""
    def capture(runner: CudaGraphRunner, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        made = run()
        return lambda: made

    monkeypatch.setattr(decoders, "on_accelerator", lambda where: True)
    monkeypatch.setattr(CudaGraphRunner, "_capture", capture)
    decoder = Decoder(GPT2(SHAPE), 2)
    decoder.prefill([0, 1], [[1, 2], [3]])
    decoder.decode_step([4, 5])
    reference = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert reference() is None
    finally:
        gc.enable()
