"""Runs with 8-bit factors: the same bits for every stage, recomputation and resume; and nearly the loss of bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, train, write_corpus

COMMON = [*TINY, *NO_DROPOUT, "--bf16", "--batch-size", 2, "--global-batch-size", 4, "--lr", 3e-3]
FP8 = ["--fp8", "--fp8-head"]
LAYOUTS = {"stage 0": ["--zero-stage", 0], "stage 3": ["--zero-stage", 3],
           "recomputed": ["--zero-stage", 2, "--checkpoint-activations"],
           "selective": ["--zero-stage", 3, "--checkpoint-activations", "--recompute-granularity", "selective"]}


def run_all(rank: int, world: int, corpus: Path, folder: Path) -> None:
    for name, flags in LAYOUTS.items():
        train([*COMMON, *FP8, "--train-data", corpus, "--train-iters", 4, "--metrics-file", folder / name, *flags])


def test_stages_and_recomputation_compute_the_same_bits(tmp_path: Path) -> None:
    run_ranks(run_all, 2, write_corpus(tmp_path / "corpus"), tmp_path)
    losses = {name: [step["lm_loss"] for step in steps(tmp_path / name)] for name in LAYOUTS}
    assert len(losses["stage 0"]) == 4 and all(found == losses["stage 0"] for found in losses.values()), losses


def test_the_loss_follows_that_of_bf16_and_is_not_the_same(tmp_path: Path) -> None:
    corpus, found = write_corpus(tmp_path / "corpus"), {}
    for name, flags in (("bf16", []), ("fp8", FP8[:1]), ("head", FP8)):
        train([*COMMON, "--train-data", corpus, "--train-iters", 60, "--metrics-file", tmp_path / name, *flags])
        found[name] = [step["lm_loss"] for step in steps(tmp_path / name)]
    assert found["bf16"][0] - found["bf16"][-1] > 1, "it has learnt something"
    assert found["fp8"] != found["bf16"] and found["head"] != found["fp8"]
    for name in ("fp8", "head"):
        assert found[name][-1] == pytest.approx(found["bf16"][-1], rel=0.02)


def test_what_cannot_be_computed_is_refused() -> None:
    for flags, said in ((["--no-bf16", "--fp8"], "--fp8 needs --bf16"),
                        (["--fp8", "--ffn-hidden-size", 72], "multiples of 16 on each rank: --intermediate-size"),
                        (["--fp8", "--seq-length", 15, "--batch-size", 1], "--batch-size x --seq-length"),
                        (["--fp8", "--memory-centric-tiled-linear"], "exclude each other")):
        with pytest.raises(ConfigError, match=said):
            train([*COMMON, "--mock-data", "--train-iters", 1, *flags])
