"""Text from an engine is that of its checkpoint, and training does not notice."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron import zero
from megatron.errors import ConfigError
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator, texts_of
from megatron.inference.live import EngineDecoder, engine_decoder, from_engine, has_unsharded_params
from megatron.inference.request import Sampling
from megatron.train import evaluation
from megatron.train.loop import Trainer
from mpu.random import capture_rng
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, lines, total_digest, train, train_all, write_corpus
from tests.megatron.inference.test_command import said
from tests.megatron.recompute.test_recompute import same

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


def test_only_our_models_are_read() -> None:
    engine, *_ = zero.initialize(model=torch.nn.Linear(4, 4), config={"train_batch_size": 1,
                                                                      "optimizer": {"type": "Adam"}})
    with pytest.raises(ConfigError, match="GPT2 models, and this engine has a Linear"), from_engine(engine):
        pass
