"""An engine keeps one cache, and answers as a new engine would; the call of DeepSpeed's text generation tutorial."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.errors import TrainerError
from megatron.inference import init_inference
from megatron.inference.decoder import Decoder
from tests.megatron.inference.gpt2s import PROMPTS, greedy, ours, theirs, transformers

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


def test_what_was_in_the_cache_does_not_matter() -> None:
    engine, prompts = init_inference(ours()), [PROMPTS, PROMPTS[:1, :2], PROMPTS[1:].flip(1), PROMPTS[:, 1:]]
    for prompt in prompts * 2:
        assert torch.equal(engine.generate(prompt), init_inference(ours()).generate(prompt))


@pytest.mark.parametrize(("model", "wrong"), [(ours, -1), (ours, 1 << 40), (theirs, 211)])
def test_a_token_that_the_model_does_not_have_is_refused_by_name(model: Any, wrong: int) -> None:
    engine = init_inference(model(), replace_with_kernel_inject=True)
    prompts = PROMPTS.clone()
    prompts[1, 0] = wrong
    with pytest.raises(TrainerError, match=rf"row 1 has the token id {wrong}, and the model has 0 .. 210: give ids of"):
        engine.generate(prompts)
    mask = torch.ones_like(prompts)
    mask[1, 0] = 0
    assert engine.generate(prompts, attention_mask=mask, max_new_tokens=2).shape == (3, 6)


PROMPT = "DeepSpeed is"
"""12 tokens."""


def generator(folder: Path, positions: int) -> Any:
    """A pipeline over bytes, whose model often ends."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = Tokenizer(models.BPE(vocab={**{one: place for place, one in enumerate(letters)}, "<end>": 256}, merges=[]))
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    table.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=table, eos_token="<end>").save_pretrained(folder)
    model = theirs(vocab_size=257, n_positions=positions, bos_token_id=256, eos_token_id=256)
    model.generation_config.eos_token_id = [*range(0, 257, 4), 256]
    model.save_pretrained(folder)
    made = transformers.pipeline("text-generation", model=str(folder))
    made.model = init_inference(made.model, tensor_parallel={"tp_size": 1}, dtype=torch.float,
                                replace_with_kernel_inject=True)
    return made


def ids(made: Any, *args: Any, **given: Any) -> list[int]:
    (found,) = made(*args, return_tensors=True, **given)
    return list(found["generated_token_ids"])


def test_the_call_of_the_tutorial(tmp_path: Path) -> None:
    made = generator(tmp_path, 400)
    torch.manual_seed(0)
    lengths = [len(ids(made, PROMPT, do_sample=True, min_length=50)) for _ in range(8)]
    free = [len(ids(made, PROMPT, do_sample=True)) for _ in range(8)]
    assert min(lengths) >= 50 and min(free) < 50
    assert made(PROMPT, do_sample=True, min_length=50)[0]["generated_text"].startswith(PROMPT)


def test_a_length_that_nobody_asked_for_ends_where_the_positions_do(tmp_path: Path, capfd: Any) -> None:
    made = generator(tmp_path, 64)
    note = "note: generate: after a prompt of 12 tokens there is room for 52 new ones, not for the default of 256\n"
    assert len(ids(made, PROMPT, eos_token_id=[])) == 64 and note in capfd.readouterr().err
    assert len(ids(made, PROMPT, min_length=50)) >= 50 and note in capfd.readouterr().err
    assert len(ids(made, PROMPT, max_new_tokens=52, min_new_tokens=52)) == 64
    assert "note: generate" not in capfd.readouterr().err
    for given in ({"max_new_tokens": 53}, {"max_length": 65}):
        with pytest.raises(TrainerError, match="53 new ones are more than the 64"):
            made(PROMPT, **given)


def test_a_configuration_in_the_call_wins_over_the_models(capfd: Any) -> None:
    model = theirs()
    model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 7, 1.7
    engine = init_inference(model, replace_with_kernel_inject=True)
    five = transformers.GenerationConfig(max_new_tokens=5)
    expected = greedy(theirs(), repetition_penalty=1.7)
    assert torch.equal(engine.generate(PROMPTS, generation_config=five), expected[:, :9])
    assert torch.equal(engine.generate(PROMPTS, generation_config=five, max_new_tokens=6), expected[:, :10])
    assert capfd.readouterr().err.count("note: generate") == 0
    many = transformers.GenerationConfig(max_new_tokens=50)
    assert engine.generate(PROMPTS, generation_config=many).shape == (3, 24)
    assert "room for 20 new ones, not for the default of 50" in capfd.readouterr().err
    model.generation_config.num_beams = 2
    with pytest.raises(TrainerError, match="num_beams is 2, which our decoder does not do"):
        engine.generate(PROMPTS)
    model.generation_config.num_beams = 1
    with pytest.raises(TrainerError, match="generation_config is a int: expected a GenerationConfig"):
        engine.generate(PROMPTS, generation_config=5)
    with pytest.raises(TrainerError, match="a prompt of 24 tokens and 50 new ones"):
        engine.generate(torch.ones(1, 24, dtype=torch.long), generation_config=many)


def test_greedy_text_does_not_end_before_it_has_so_many_tokens() -> None:
    free = greedy(theirs())
    ends = [*{int(free[0, 5]), int(free[1, 4]), int(free[2, 7]), 9999}]  # the last one is no token of the model
    engine = init_inference(theirs(), replace_with_kernel_inject=True)
    for given in ({"min_new_tokens": 5}, {"min_length": 9}, {"min_new_tokens": 5, "repetition_penalty": 1.7}):
        found = greedy(engine, eos_token_id=ends, **given)
        assert torch.equal(found, greedy(theirs(), eos_token_id=ends, **given))
        assert not torch.isin(found[:, 4:9], torch.tensor(ends)).any()
    assert torch.isin(greedy(engine, eos_token_id=ends)[:, 4:9], torch.tensor(ends)).any()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 30}, "a prompt of 4 tokens and 30 new ones are more than the 24"),
    ({"max_length": 4}, "max_length is 4, and the prompt has 4 tokens"),
    ({"num_beams": 3}, "num_beams is 3, which our decoder does not do: leave it out"),
    ({"temperature": 0}, "temperature is 0: expected more than 0; without do_sample"),
    ({"max_new_tokens": "3"}, "max_new_tokens is '3': expected a whole number, 1 or more"),
    ({"top_p": 1.5, "top_k": -1}, "2 errors:"),
    ({"max_newtokens": 3}, "max_newtokens is unknown; did you mean max_new_tokens?"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 0]] * 3)}, "pad prompts on the left"),
    ({"attention_mask": torch.ones(3, 5)}, r"attention_mask is \[3, 5\], and input_ids \[3, 4\]"),
    ({"min_length": 50}, "min_length is 50, and after a prompt of 4 tokens an answer has 20 at most"),
    ({"min_new_tokens": 6, "max_new_tokens": 5}, "min_new_tokens is 6, and after a prompt of 4 tokens an answer has 5"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1: expected a whole number, 0 or more"),
]


def test_what_generate_cannot_do_is_refused_by_name() -> None:
    engine = init_inference(ours())
    for given, said in REFUSED:
        with pytest.raises(TrainerError, match=said):
            engine.generate(PROMPTS, **given)
