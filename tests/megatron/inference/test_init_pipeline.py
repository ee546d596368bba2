"""The call of DeepSpeed's text generation tutorial, and what it asks of the decoder: no end before so many tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.errors import TrainerError
from megatron.inference import init_inference
from tests.megatron.inference.gpt2s import PROMPTS, greedy, theirs, transformers

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
    with pytest.raises(TrainerError, match="generation_config is a int: expected a GenerationConfig"):
        engine.generate(PROMPTS, generation_config=5)
    with pytest.raises(TrainerError, match="a prompt of 24 tokens and 50 new ones"):
        engine.generate(torch.ones(1, 24, dtype=torch.long), generation_config=many)


@pytest.mark.parametrize("given", [{"min_new_tokens": 5}, {"min_length": 9}, {"min_length": 12, "min_new_tokens": 5},
                                   {"min_new_tokens": 5, "repetition_penalty": 1.7}])
def test_greedy_text_does_not_end_before_it_has_so_many_tokens(given: dict[str, Any]) -> None:
    free = greedy(theirs())
    ends = [*{int(free[0, 5]), int(free[1, 4]), int(free[2, 7]), 9999}]  # the last one is no token of the model
    engine = init_inference(theirs(), replace_with_kernel_inject=True)
    if given != {"min_length": 12, "min_new_tokens": 5}:  # transformers does both
        expected = greedy(theirs(), eos_token_id=ends, **given)
        assert torch.equal(greedy(engine, eos_token_id=ends, **given), expected)
    found = greedy(engine, eos_token_id=ends, **given)
    assert not torch.isin(found[:, 4:9], torch.tensor(ends)).any()
    assert torch.isin(greedy(engine, eos_token_id=ends)[:, 4:9], torch.tensor(ends)).any()


def test_drawn_text_does_not_end_before_either() -> None:
    engine = init_inference(theirs(), replace_with_kernel_inject=True)
    ends = [*range(100)]
    wanted = {"do_sample": True, "num_return_sequences": 8, "eos_token_id": ends, "top_k": 0, "seed": 1}
    found = greedy(engine, min_new_tokens=4, **wanted)[:, 4:]
    assert (found[:, :4] >= 100).all() and (found[:, 4] < 100).any()
    assert (greedy(engine, **wanted)[:, 4:8] < 100).any()


@pytest.mark.parametrize("given, said", [
    ({"min_length": 50}, "min_length is 50, and after a prompt of 4 tokens an answer has 20 at most"),
    ({"min_new_tokens": 6, "max_new_tokens": 5}, "min_new_tokens is 6, and after a prompt of 4 tokens an answer has 5"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1: expected a whole number, 0 or more"),
    ({"min_length": 2.5}, "min_length is 2.5: expected a whole number"),
])
def test_a_least_length_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerError, match=said):
        init_inference(theirs(), replace_with_kernel_inject=True).generate(PROMPTS, **given)
