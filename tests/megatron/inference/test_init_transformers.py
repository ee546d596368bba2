"""`init_inference` gives transformers' GPT-2 as it was, at any tensor parallel size, by its own code or by our decoder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import TrainerError
from megatron.inference import init_inference
from tests.distributed import run_ranks
from tests.megatron.inference.gpt2s import CLOSE, PROMPTS, greedy, theirs, tokens

PADDED = torch.tensor([[0, 0, 5, 7], [1, 2, 3, 4], [0, 9, 8, 7]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


def answers(model: Any) -> list[torch.Tensor]:
    """Greedy; of unequal prompts; ended by two kinds of tokens."""
    free = greedy(model)
    uneven = model.generate(PADDED, attention_mask=MASK, max_new_tokens=7, pad_token_id=0)
    return [free, uneven, greedy(model, eos_token_id=[int(free[0, 8]), int(free[1, 6])]),
            greedy(model, repetition_penalty=1.7)]


def their_answers(rank: int, world: int) -> list[tuple[torch.Tensor, ...]]:
    found = []
    for fast in (False, True):
        engine = init_inference(theirs(), tensor_parallel={"tp_size": world}, dtype=torch.float32,
                                replace_with_kernel_inject=fast)
        assert engine.transformer.h[0].attn.c_attn.weight.shape == (144 // world, 48)
        found.append((engine(tokens()).logits, *answers(engine), *answers(engine.module)))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gpt2_of_transformers_is_itself_when_it_is_cut(world: int) -> None:
    whole = theirs()
    with torch.no_grad():
        logits = whole(tokens()).logits
    expected = answers(whole)
    assert expected[2].shape[1] < 13 and not torch.equal(expected[3], expected[0])
    for found in run_ranks(their_answers, world):
        for one, *texts in found:
            torch.testing.assert_close(one, logits, **CLOSE)
            assert all(map(torch.equal, texts, [*expected, *expected]))


def drawn(rank: int, world: int) -> list[list[torch.Tensor]]:
    found = []
    for fast in (False, True):
        engine = init_inference(theirs(), mp_size=world, replace_with_kernel_inject=fast)
        torch.manual_seed(5 + 7 * rank)  # only rank 0's counts
        wanted = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 4}
        found.append([greedy(engine, **wanted), greedy(engine, **wanted)])
    return found


def test_every_rank_draws_the_same_and_rank_0_says_from_which_numbers() -> None:
    (alone,) = run_ranks(drawn, 1)
    for found in run_ranks(drawn, 2):
        for texts, expected in zip(found, alone, strict=True):
            assert all(map(torch.equal, texts, expected)) and not torch.equal(*texts)
            assert texts[0].shape == (12, 13) and len(texts[0].unique(dim=0)) == 12


def test_the_fast_decoder_has_the_weights_of_the_module_and_no_others() -> None:
    engine = init_inference(theirs(), replace_with_kernel_inject=True)
    gpt2 = engine._decoder_cache.model
    held = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
    assert {parameter.untyped_storage().data_ptr() for parameter in gpt2.parameters()} == held


def test_what_the_fast_decoder_would_compute_differently_stays_with_transformers(capsys: Any) -> None:
    engine = init_inference(theirs(activation_function="relu"), replace_with_kernel_inject=True)
    assert "replace_with_kernel_inject has no effect: the given model: activation_function is 'relu'" in \
        capsys.readouterr().err
    assert torch.equal(greedy(engine), greedy(theirs(activation_function="relu")))


def test_what_the_model_says_of_its_answers_is_done_or_refused() -> None:
    model = theirs()
    model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 5, 1.7
    engine = init_inference(model, replace_with_kernel_inject=True)
    assert torch.equal(engine.generate(PROMPTS), greedy(theirs(), repetition_penalty=1.7)[:, :9])
    model.generation_config.num_beams = 2
    with pytest.raises(TrainerError, match="num_beams is 2, which our decoder does not do"):
        engine.generate(PROMPTS)


def other_weights(rank: int, world: int) -> str:
    with pytest.raises(TrainerError) as error:
        init_inference(theirs(seed=rank), mp_size=world)
    return str(error.value)


def test_models_that_differ_between_ranks_are_no_one_model() -> None:
    for said in run_ranks(other_weights, 2):
        assert "rank 1 of the tensor parallel group has other weights" in said


def other_prompts(rank: int, world: int) -> list[str]:
    found = []
    for fast in (False, True):
        with pytest.raises(TrainerError) as error:
            greedy(init_inference(theirs(), mp_size=world, replace_with_kernel_inject=fast), PROMPTS + rank)
        found.append(str(error.value))
    return found


def test_prompts_that_differ_between_ranks_are_refused() -> None:
    for said in run_ranks(other_prompts, 2):
        assert all("has other input_ids" in one for one in said)
