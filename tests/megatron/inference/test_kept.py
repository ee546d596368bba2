"""An engine keeps one cache from answer to answer, and no answer can be told from that of a new engine."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.errors import TrainerError
from megatron.inference import init_inference
from megatron.inference.api import engine
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator
from tests.megatron.inference.gpt2s import PROMPTS, ours, theirs

LONG = 300
"""Positions: more than any decoder begins with."""


@contextmanager
def caches() -> Iterator[list[weakref.ref[Decoder]]]:
    """Those that are made meanwhile."""
    made: list[weakref.ref[Decoder]] = []
    real = Decoder.__init__

    def noted(self: Decoder, *args: Any, **kwargs: Any) -> None:
        assert not any(one() is not None for one in made), "there is another one"
        made.append(weakref.ref(self))
        real(self, *args, **kwargs)

    with patch.object(Decoder, "__init__", noted):
        yield made


def test_calls_share_one_cache_and_a_larger_one_takes_its_place() -> None:
    engine = init_inference(ours(max_position_embeddings=LONG))
    with caches() as made:
        for _ in range(3):
            for rows in (3, 1):
                engine.generate(PROMPTS[:rows], max_new_tokens=5)
        assert len(made) == 1
        engine.generate(PROMPTS, max_new_tokens=200)
        engine.generate(PROMPTS, max_new_tokens=5, num_return_sequences=5)
        assert len(made) == 3 and [one() is not None for one in made] == [False, False, True]
        engine.generate(PROMPTS, max_new_tokens=200, num_return_sequences=5)
        assert len(made) == 3
        del engine
        assert made[2]() is None


def test_a_cache_has_room_for_what_is_asked_and_no_more_than_is_allowed() -> None:
    sizes = []
    real = engine.Decoder

    def noted(model: Any, rows: int, positions: int) -> Any:
        sizes.append((rows, positions))
        return real(model, rows, positions)

    with patch.object(engine, "Decoder", noted):
        made = init_inference(ours(max_position_embeddings=LONG), max_out_tokens=150)
        for given in ({"max_new_tokens": 2}, {"max_new_tokens": 140}, {"num_return_sequences": 30}):
            made.generate(PROMPTS, **given)
    assert sizes == [(4, 128), (4, 150), (32, 150)]


def test_more_texts_than_rows_take_turns() -> None:
    model, drawn = ours(), {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 5, "seed": 3}
    expected = init_inference(model).generate(PROMPTS, **drawn)
    with patch.object(engine, "MAX_ROWS", 4):
        assert torch.equal(init_inference(model).generate(PROMPTS, **drawn), expected)


def test_what_was_in_the_cache_does_not_matter() -> None:
    engine, prompts = init_inference(ours()), [PROMPTS, PROMPTS[:1, :2], PROMPTS[1:].flip(1), PROMPTS[:, 1:]]
    for prompt in prompts * 2:
        assert torch.equal(engine.generate(prompt), init_inference(ours()).generate(prompt))


def test_a_mode_of_torch_at_one_call_is_none_of_the_next() -> None:
    engine = init_inference(ours())
    with torch.inference_mode():
        found = engine.generate(PROMPTS)
    ended = engine.generate(PROMPTS, eos_token_id=int(found[0, 6]))  # the last row takes the place of the first
    assert torch.equal(ended[1, :7], found[1, :7])
    with torch.inference_mode():
        assert torch.equal(engine.generate(PROMPTS), found)


def test_weights_that_went_elsewhere_are_read_there() -> None:
    engine = init_inference(ours())
    engine.generate(PROMPTS)
    with caches() as made:
        for dtype in (torch.float64, torch.float64, torch.float32):
            engine.module.to(dtype)
            engine.generate(PROMPTS)
    assert len(made) == 2


def test_threads_do_not_write_into_one_cache() -> None:
    engine = init_inference(ours())
    engine.generate(PROMPTS)
    both, found = threading.Barrier(2), dict[int, torch.Tensor]()

    def work(row: int) -> None:
        both.wait()
        found[row] = torch.cat([engine.generate(PROMPTS[row : row + 1], max_new_tokens=19) for _ in range(4)])

    threads = [threading.Thread(target=work, args=(row,)) for row in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row, texts in found.items():
        alone = init_inference(ours()).generate(PROMPTS[row : row + 1], max_new_tokens=19)
        assert torch.equal(texts, alone.expand(4, -1))


def test_an_answer_that_breaks_off_leaves_no_cache() -> None:
    engine = init_inference(ours())
    with caches() as made, patch.object(Generator, "step", lambda self: 1 // 0), \
            pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS)
    assert len(made) == 1 and engine._decoder_cache._cached is None
    assert torch.equal(engine.generate(PROMPTS), init_inference(ours()).generate(PROMPTS))


@pytest.mark.parametrize("model", [ours, theirs])
@pytest.mark.parametrize("wrong", [-1, 211, 255, 1 << 40])
def test_a_token_that_the_model_does_not_have_is_refused_by_name(model: Any, wrong: int) -> None:
    engine = init_inference(model(), replace_with_kernel_inject=True)
    prompts = PROMPTS.clone()
    prompts[1, 0] = wrong
    with pytest.raises(TrainerError, match=rf"row 1 has the token id {wrong}, and the model has 0 .. 210: give ids of"):
        engine.generate(prompts)
    mask = torch.ones_like(prompts)
    mask[1, 0] = 0
    assert engine.generate(prompts, attention_mask=mask, max_new_tokens=2).shape == (3, 6)


def test_logits_that_are_no_numbers_are_an_error_and_nothing_of_them_stays() -> None:
    model = ours()
    engine = init_inference(model)
    table = model.wte.weight.data
    row = table[PROMPTS[0, 0]].clone()
    table[PROMPTS[0, 0]] = torch.inf
    with pytest.raises(TrainerError, match="produced non-finite logits"):
        engine.generate(PROMPTS[:1])
    table[PROMPTS[0, 0]] = row
    assert torch.equal(engine.generate(PROMPTS), init_inference(ours()).generate(PROMPTS))
