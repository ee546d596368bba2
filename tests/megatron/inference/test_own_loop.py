"""A GPT2 in a loop of a user's own leads to text, scores and the files of other programs; text from an engine."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from data.tokenizer import ByteLevelTokenizer
from megatron import zero
from megatron.checkpoint.cli import main as checkpoint
from megatron.checkpoint.convert.importers import open_huggingface
from megatron.errors import CheckpointError
from megatron.inference import init_inference
from megatron.inference.cli import main as generate
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator, texts_of
from megatron.inference.live import EngineDecoder, engine_decoder, from_engine, has_unsharded_params
from megatron.inference.request import Sampling
from megatron.model import GPT2, ModelConfig
from megatron.train import evaluation
from megatron.train.loop import Trainer
from mpu import groups as mpu_groups
from mpu.groups import SOLO
from mpu.random import capture_rng
from tests.distributed import run_ranks
from tests.megatron.evaluate.test_command import values
from tests.megatron.helpers import TINY, lines, total_digest, train, train_all, write_corpus
from tests.megatron.inference.test_command import objects, said
from tests.megatron.recompute.test_recompute import same

TOKENIZER = ByteLevelTokenizer()
SHAPE = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, max_position_embeddings=32,
                    vocab_size=TOKENIZER.vocab_size, layernorm_epsilon=1e-6, attention_dropout=0.0, hidden_dropout=0.0)
LINE = "abcdef"
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
AS_FLAGS = ["--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--max-position-embeddings", 32,
            "--layernorm-epsilon", 1e-6, *BYTES, "--mock-data", "--eval-interval", 0, "--batch-size", 2]


def trained(rank: int, world: int, folder: Path, stage: int = 0, precision: str = "fp32", tp: int = 1,
            model: Callable[[], nn.Module] | None = None) -> None:
    """A GPT2 that has learned one line by heart."""
    groups = mpu_groups.build(tp) if tp > 1 else None
    ids = torch.tensor(TOKENIZER.encode(LINE * 8))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": stage}, **({} if precision == "fp32" else {precision: {"enabled": True}})}
    with zero.Init(mpu=groups, config_dict_or_path=config) if stage == 3 else nullcontext():
        gpt2 = model() if model is not None else GPT2(SHAPE, groups.tp if groups else SOLO)
    engine, *_ = zero.initialize(model=gpt2, config=config, mpu=groups)
    for step in range(40):
        rows = torch.stack([ids[start:start + 17] for start in range(step % 4, 16, 4)])
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        engine.step()
    engine.save_checkpoint(folder, client_state={"tokenizer": asdict(TOKENIZER.facts)})
    engine.destroy()


@pytest.mark.parametrize(("stage", "precision", "tp"), [
    (0, "fp32", 1), (1, "bf16", 1), (2, "fp32", 1), (3, "bf16", 1),
    *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (
        (0, "bf16", 1), (1, "fp32", 1), (2, "bf16", 1), (3, "fp32", 1), (0, "fp32", 2), (2, "bf16", 2),
        (3, "fp32", 2)))])
def test_it_leads_to_text_scores_and_other_files(stage: int, precision: str, tp: int, tmp_path: Path) -> None:
    run, hf, int8 = (tmp_path / name for name in ("run", "hf", "int8"))
    run_ranks(trained, tp, run, stage, precision, tp)
    asked = ["abcd", "--greedy", "--max-new-tokens", 12]
    found = objects("--load", run, *asked)
    assert found[0]["text"] == "efabcdefabcd" and found == objects("--load", run, *asked, *BYTES)
    (tmp_path / "line.txt").write_text(LINE)
    scores = values("--load", run, "--task", "perplexity", "--data", tmp_path / "line.txt")
    assert scores["tokenizer"]["name"] == TOKENIZER.name and scores["loss"] < 1 and scores["dtype"] == precision

    assert checkpoint(["convert", str(run), "--output", str(hf)]) == 0
    assert checkpoint(["convert", str(run), "--output", str(int8), "--dtype", "int8"]) == 0
    shape = open_huggingface(hf).model
    assert (shape.num_attention_heads, shape.layernorm_epsilon) == (2, 1e-6)
    assert objects("--load-hf", hf, *asked)[0]["text"] == objects("--load", int8, *asked)[0]["text"] == found[0]["text"]
    ids = torch.tensor([TOKENIZER.encode("abcd")])
    answer = init_inference(checkpoint=str(run)).generate(ids, max_new_tokens=12, do_sample=False)
    assert TOKENIZER.decode(answer[0].tolist()) == "abcdefabcdefabcd"


def test_it_is_where_the_trainer_starts_and_a_run_of_the_trainer_is_where_it_starts(tmp_path: Path) -> None:
    run_ranks(trained, 1, tmp_path / "run")
    assert "loaded weights of global_step40" in train([*AS_FLAGS, "--train-iters", 1, "--load", tmp_path / "run",
                                                       "--finetune", "--save", tmp_path / "next"])
    with pytest.raises(CheckpointError, match="--num-layers 2 in the checkpoint, 3 here"):
        train([*AS_FLAGS, "--num-layers", 3, "--train-iters", 1, "--load", tmp_path / "run", "--finetune"])
    run_ranks(goes_on, 1, tmp_path / "next")
    assert objects("--load", tmp_path / "next" / "own", "x", *BYTES, "--max-new-tokens", 1)


def goes_on(rank: int, world: int, folder: Path) -> None:
    """From the weights of a run of the trainer."""
    engine, *_ = zero.initialize(model=GPT2(SHAPE), config={"train_batch_size": 4, "optimizer": {"type": "AdamW"}})
    assert engine.load_checkpoint(folder, load_module_only=True)[0] is not None
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    engine.backward(engine(tokens, tokens))
    engine.step()
    engine.save_checkpoint(folder, tag="own")


class Other(nn.Module):
    """Of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENIZER.vocab_size, TOKENIZER.vocab_size)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.table(tokens).flatten(0, 1), targets.flatten())


def test_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "does not record the shape of its model: expected a GPT2"
    run_ranks(trained, 1, tmp_path, 0, "fp32", 1, Other)
    with pytest.raises(CheckpointError, match=words):
        generate(["--load", str(tmp_path), "x"])
    assert checkpoint(["convert", str(tmp_path), "--output", str(tmp_path / "out"), "--dtype", "int8"]) == 4
    assert re.search(f"error: .*({words})", capsys.readouterr().err)


# ---- text from an engine is that of its checkpoint, and training does not notice ----------------------------------


PROMPTS = [[1, 2, 3], [7]]
CELLS = [(0, 1, []), (1, 1, ["--bf16"]), (2, 2, ["--fp16"]), (3, 1, []), (3, 2, ["--bf16"]),
         (3, 1, ["--offload-param-device", "cpu", "--offload-optimizer-device", "cpu"]),
         (3, 1, ["--memory-centric-tiled-linear", "--tile-factor", 2])]


def flags_of(stage: int, tp: int, more: list[str]) -> list[object]:
    return [*TINY, *more, "--zero-stage", stage, "--model-parallel-size", tp, "--lr", 1e-2, "--train-iters", 4]


def looks(rank: int, world: int, flags: list[object], folder: Path, corpus: str) -> list[list[int]]:
    """Texts of both readers after each step, of a run that is saved in `folder`, and of another that was not read."""
    taken, found = Trainer.train_step, []

    def looking(trainer: Trainer, *args: Any) -> Any:
        report = taken(trainer, *args)
        streams, engine = capture_rng(), trainer.engine
        with from_engine(engine) as model:
            assert not model.training and (model is engine.module) == has_unsharded_params(engine)
            copied = texts(Decoder(model, 2))
        with engine_decoder(engine, 2) as reader:
            assert texts(reader) == copied
        assert engine.training and same(streams, capture_rng())
        found.extend(copied)
        return report

    common = [*flags, "--train-data", corpus, "--metrics-file"]
    train([*common, folder / "alone.jsonl", "--save", folder / "alone"])
    with patch.object(Trainer, "train_step", looking):
        train([*common, folder / "read.jsonl", "--save", folder / "read"])
    return found


def texts(reader: Decoder | EngineDecoder) -> list[list[int]]:
    generator = Generator(reader, vocabulary=257, eod=None, sliding_window=True)
    return [text.tokens for text in texts_of(generator, PROMPTS, 20, Sampling(top_k=5), 3)]


@pytest.mark.few(3)
@pytest.mark.parametrize(("stage", "tp", "more"), CELLS)
def test_training_goes_on_as_if_nobody_had_looked(stage: int, tp: int, more: list[str], tmp_path: Path) -> None:
    ranks = run_ranks(looks, 2, flags_of(stage, tp, more), tmp_path, write_corpus(tmp_path / "corpus"), timeout=120)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 4 * len(PROMPTS)
    assert ranks[0][:2] != ranks[0][-2:], "of the weights of that step"
    assert lines(tmp_path / "read.jsonl") == lines(tmp_path / "alone.jsonl")
    assert total_digest(tmp_path / "read") == total_digest(tmp_path / "alone")


@pytest.mark.parametrize(("stage", "tp"), [(0, 1), (2, 2), (3, 1)])
def test_the_sample_of_a_run_is_what_its_checkpoint_says(stage: int, tp: int, tmp_path: Path) -> None:
    flags = [*flags_of(stage, tp, []), "--train-data", write_corpus(tmp_path / "corpus"), "--train-iters", 20,
             "--sample-tokens", 30, "--sample-prompt", "one", "--save", tmp_path / "s"]
    printed = run_ranks(train_all, 2, [flags])[0][0].partition(" sample: ")[2].splitlines()[0]
    text = said("--load", tmp_path / "s", "one", "--max-new-tokens", 30, "--past-the-end", "slide")[0]
    assert ast.literal_eval(printed.partition(" (\\ufffd")[0]) == text.removesuffix("\n") and len(text) > 10
    assert evaluation.printable(text.removesuffix("\n")) == printed
