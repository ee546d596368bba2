"""`init_inference` gives the model it was given, at any tensor parallel size and in any precision."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from megatron.errors import TrainerError
from megatron.inference import init_inference
from megatron.inference.decoder import Decoder
from megatron.inference.int8 import Int8
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.helpers import train
from tests.megatron.inference.gpt2s import CLOSE, PROMPTS, greedy, ours, theirs, tokens, transformers

FLAGS = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 24 --vocab-size 300 "
         "--tokenizer-type ByteLevelTokenizer --mock-data --train-iters 3 --eval-interval 0 --lr 0.02 "
         "--lr-warmup-fraction 0 --global-batch-size 4 --batch-size 1")


def trained(rank: int, world: int, folder: Path) -> None:
    train([*FLAGS.split(), "--model-parallel-size", world, "--save", folder])


def our_logits(rank: int, world: int, folders: Sequence[Path]) -> list[torch.Tensor]:
    found = []
    for folder in folders:
        engine = init_inference(checkpoint=str(folder), tensor_parallel={"tp_size": world}, dtype="fp32")
        found += [engine(tokens()), engine.generate(PROMPTS, max_new_tokens=6)]
    engine = init_inference(ours(), mp_size=world)
    return [*found, engine(tokens()), engine.generate(PROMPTS, max_new_tokens=6)]


def test_our_gpt2_is_itself_whatever_it_was_trained_at_and_runs_at(tmp_path: Path) -> None:
    folders = [tmp_path / f"tp{tp}" for tp in (1, 2)]
    for tp, folder in zip((1, 2), folders):
        run_ranks(trained, tp, folder)
    alone = our_logits(0, 1, folders)
    with torch.no_grad():
        torch.testing.assert_close(alone[4], ours()(tokens()), **CLOSE)
    for found in run_ranks(our_logits, 2, folders):
        for one, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(one, expected, **CLOSE)


def from_their_folder(rank: int, world: int, folder: Path) -> list[torch.Tensor]:
    own = init_inference(checkpoint=str(folder), mp_size=world)
    filled = init_inference(theirs(seed=9), mp_size=world, checkpoint={"type": "ds_model", "checkpoints": str(folder)})
    return [own(tokens()), own.generate(PROMPTS, max_new_tokens=9), filled(tokens()).logits[:, -1], greedy(filled)]


def test_a_folder_of_transformers_fills_our_model_or_theirs(tmp_path: Path) -> None:
    whole = theirs()
    whole.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = whole(tokens()).logits[:, -1]
    for world in (1, 2):
        for logits_of_ours, text, filled, their_text in run_ranks(from_their_folder, world, tmp_path):
            torch.testing.assert_close(logits_of_ours, logits, **CLOSE)
            torch.testing.assert_close(filled, logits, **CLOSE)
            assert torch.equal(text, greedy(whole)) and torch.equal(their_text, greedy(whole))


def in_given_groups(rank: int, world: int) -> tuple[list[torch.Tensor], str]:
    given: list[dict[str, Any]] = [{"mpu": groups.build(world)}, {"tensor_parallel": {"tp_group": dist.group.WORLD}}]
    with pytest.raises(TrainerError) as error:
        init_inference(ours(), mp_size=1, **given[0])
    return [init_inference(ours(), **one)(tokens()) for one in given], str(error.value)


def test_groups_that_exist_are_used() -> None:
    expected = ours()(tokens()).detach()
    for found, said in run_ranks(in_given_groups, 2):
        for one in found:
            torch.testing.assert_close(one, expected, **CLOSE)
        assert "tensor_parallel.tp_size is 1, and the given group has 2 ranks" in said
    with pytest.raises(TrainerError, match="without get_model_parallel_rank"):
        init_inference(ours(), mpu=3)


# ---- the engine ---------------------------------------------------------------------------------------------------

def test_the_engine_is_the_module_to_who_asks() -> None:
    engine = init_inference(theirs())
    assert engine.config.n_embd == 48 and engine.can_generate() and not engine.training
    with pytest.raises(AttributeError, match="nothing"):
        engine.nothing
    with pytest.raises(TrainerError, match="does not train"):
        engine.train()
    assert not engine(tokens()).logits.requires_grad


def test_room_for_tokens_is_a_promise_and_a_limit() -> None:
    for fast in (False, True):
        engine = init_inference(theirs(), max_out_tokens=10, replace_with_kernel_inject=fast)
        assert greedy(engine, PROMPTS[:, :1]).shape == (3, 10)
        with pytest.raises(TrainerError, match="more than"):
            greedy(engine)
    with pytest.raises(TrainerError, match="min_out_tokens is 30, and there is room for 24"):
        init_inference(ours(), min_out_tokens=30)


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


def other_weights_and_prompts(rank: int, world: int) -> list[str]:
    found = []
    with pytest.raises(TrainerError) as error:
        init_inference(theirs(seed=rank), mp_size=world)
    found.append(str(error.value))
    for fast in (False, True):
        with pytest.raises(TrainerError) as error:
            greedy(init_inference(theirs(), mp_size=world, replace_with_kernel_inject=fast), PROMPTS + rank)
        found.append(str(error.value))
    return found


def test_models_and_prompts_that_differ_between_ranks_are_refused() -> None:
    for said in run_ranks(other_weights_and_prompts, 2):
        for one, what in zip(said, ("weights", "input_ids", "input_ids"), strict=True):
            assert f"rank 1 of the tensor parallel group has other {what} than rank 0" in one


def levels(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (weight.data.levels, weight.data.scale) for name, weight in module.named_parameters()
            if isinstance(weight.data, Int8)}


@contextmanager
def in_fp32() -> Iterator[None]:
    """Activations, on any processor: so that sums of parts are nearly those of the whole."""
    with ExitStack() as stack:
        for module in ("inference.api.init_inference", "inference.load"):
            stack.enter_context(patch(f"megatron.{module}.activation_dtype", lambda device: torch.float32))
        yield


def in_int8(rank: int, world: int) -> tuple[Mapping[str, tuple[Tensor, Tensor]], list[Tensor], Tensor]:
    """Levels and scales; logits of their model and ours; text of our decoder over their layers."""
    with in_fp32():
        engine = init_inference(theirs(), mp_size=world, dtype=torch.int8, replace_with_kernel_inject=True)
        own = init_inference(ours(), mp_size=world, dtype="int8")
    assert torch.equal(greedy(engine), greedy(engine.module))
    return levels(engine.module), [engine(tokens()).logits, own(tokens())], greedy(engine)


def test_levels_and_scales_are_the_same_at_any_tensor_parallel_size() -> None:
    ((alone, logits, text),) = run_ranks(in_int8, 1)
    assert len(alone) == 12
    ranks = run_ranks(in_int8, 2)
    for name, (whole, scale) in alone.items():
        parts, scales = zip(*(found[name] for found, _, _ in ranks))
        if name.endswith("c_proj.weight"):  # a row layer
            assert torch.equal(torch.cat(parts, 1), whole) and all(torch.equal(part, scale) for part in scales), name
        else:
            count = 3 if name.endswith("c_attn.weight") else 1
            for cut, expected in ((parts, whole), (scales, scale)):
                joined = torch.cat([part.unflatten(0, (count, -1)) for part in cut], 1).flatten(0, 1)
                assert torch.equal(joined, expected), name
    for _, logits_of_rank, text_of_rank in ranks:
        torch.testing.assert_close(logits_of_rank, logits, **CLOSE)
        assert torch.equal(text_of_rank, text)


# ---- its cache and its generate ------------------------------------------------------------------------------------

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
