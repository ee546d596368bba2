"""`init_inference` gives the model it was given, at any tensor parallel size, and an engine that is that model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron import zero
from megatron.errors import TrainerError
from megatron.inference import init_inference
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


def test_a_model_of_another_shape_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    with pytest.raises(TrainerError, match="its num_layers is 3, and the given model's is 2"):
        init_inference(ours(num_layers=2), checkpoint=str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_in_the_precision_that_is_asked_for(dtype: torch.dtype) -> None:
    for model in (ours(), theirs()):
        engine = init_inference(model, dtype=dtype)
        assert {parameter.dtype for parameter in engine.parameters()} == {dtype}
        assert engine.generate(PROMPTS, max_new_tokens=2).shape == (3, 6)
    large = theirs()
    large.transformer.h[0].mlp.c_fc.weight.data[0, 0] = 1e5
    with pytest.raises(TrainerError, match=r"c_fc.weight is not finite in float16"):
        init_inference(large, dtype="fp16")


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


def test_an_engine_that_trains_is_not_taken() -> None:
    model = torch.nn.Linear(4, 4)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    engine, *_ = zero.initialize(model=model, config=config)
    with pytest.raises(TrainerError, match="model is a Engine: expected a module .of an engine that trains, save a"):
        init_inference(engine)
    engine.destroy()


# ---- the engine -----------------------------------------------------------------------------------------------------

def test_the_engine_is_the_module_to_who_asks() -> None:
    engine = init_inference(theirs())
    assert engine.config.n_embd == 48 and engine.can_generate() and not engine.training
    with pytest.raises(AttributeError, match="nothing"):
        engine.nothing
    with pytest.raises(TrainerError, match="does not train"):
        engine.train()
    assert not engine(tokens()).logits.requires_grad


@pytest.mark.parametrize("given, said", [
    ({"max_new_tokens": 30}, "a prompt of 4 tokens and 30 new ones are more than the 24"),
    ({"max_length": 4}, "max_length is 4, and the prompt has 4 tokens"),
    ({"num_beams": 3}, "num_beams is 3, which our decoder does not do: leave it out"),
    ({"temperature": 0}, "temperature is 0: expected more than 0; without do_sample"),
    ({"max_new_tokens": "3"}, "max_new_tokens is '3': expected a whole number, 1 or more"),
    ({"top_p": 1.5, "top_k": -1}, "2 errors:"),
    ({"max_newtokens": 3}, "max_newtokens is unknown; did you mean max_new_tokens?"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 0]] * 3)}, "pad prompts on the left"),
    ({"attention_mask": torch.ones(3, 5)}, r"attention_mask is \[3, 5\], and input_ids \[3, 4\]"),
])
def test_what_generate_cannot_do_it_says(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerError, match=said):
        init_inference(ours()).generate(PROMPTS, **given)


def test_room_for_tokens_is_a_promise_and_a_limit() -> None:
    for fast in (False, True):
        engine = init_inference(theirs(), max_out_tokens=10, replace_with_kernel_inject=fast)
        assert greedy(engine, PROMPTS[:, :1]).shape == (3, 10)
        with pytest.raises(TrainerError, match="more than"):
            greedy(engine)
    with pytest.raises(TrainerError, match="min_out_tokens is 30, and there is room for 24"):
        init_inference(ours(), min_out_tokens=30)
