"""`init_inference` gives the model it was given, at any tensor parallel size and in any precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.errors import TrainerError
from megatron.inference import init_inference
from megatron.inference.int8 import Int8
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.helpers import train
from tests.megatron.inference.gpt2s import CLOSE, PROMPTS, greedy, ours, theirs, tokens

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
