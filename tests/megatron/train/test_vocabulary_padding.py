"""The padding of the vocabulary, which depends on the layout, takes no part in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.cli import parse_args
from megatron.train.build import engine as make_engine, model as make_model, tokenizer, with_vocab_size
from mpu.groups import build
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, train


def test_the_vocabulary_padding_does_not_change_the_training(tmp_path: Path) -> None:
    """257 tokens in 257, 384 and 1,000 rows."""
    for multiple in (1, 128, 1000):
        train([*TINY, "--mock-data", "--train-iters", 20, "--lr", 1e-2, "--weight-decay", 0.1, "--metrics-file",
               tmp_path / str(multiple), "--make-vocab-size-divisible-by", multiple])
        for mine, theirs in zip(steps(tmp_path / str(multiple)), steps(tmp_path / "1"), strict=True):
            # Padding takes part in the products and sums as zeros, which changes the order of the others: 1e-7 a step.
            assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def padding_of_wte(rank: int, world: int) -> list[float]:
    """The largest absolute value of this rank's padding rows, after training in every precision."""
    found = []
    for precision in ([], ["--bf16"], ["--fp16"]):
        config = parse_args([*TINY, *NO_DROPOUT, *precision, "--mock-data", "--model-parallel-size", str(world),
                             "--lr", "1e-2", "--lr-warmup-iters", "0", "--weight-decay", "0.1"])
        groups = build(world)
        config = with_vocab_size(config, tokenizer(config))
        engine = make_engine(config, make_model(config, groups), groups, torch.device("cpu")).core
        rows = torch.randint(257, (4, 17), generator=torch.Generator().manual_seed(1))
        for _ in range(10):
            engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
            engine.step()
        weight = dict(engine.module.named_parameters())["wte.weight"]
        padding = weight[max(0, 257 - rank * len(weight)):]
        found.append(padding.abs().max().item() if len(padding) else -1.0)
    return found


def test_padding_rows_stay_zero_on_every_tensor_parallel_rank_and_precision() -> None:
    """257 rows in 2 x 256: the second rank holds one real token and 255 rows of padding."""
    assert run_ranks(padding_of_wte, 2) == [[-1.0] * 3, [0.0] * 3]
