"""Evaluation leaves no trace in training, and its figure is the plain mean over held-out samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from data.gpt2_dataset import MockDataset
from megatron.config.cli import parse_args
from megatron.train import build
from megatron.train.batches import MicroBatchSampler
from megatron.train.evaluation import evaluate
from megatron.zero.api.engine import Engine
from mpu.groups import build as build_groups
from mpu.random import capture_rng
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, records, steps, total_digest, train, write_corpus
from tests.megatron.recompute.test_recompute import same


def with_and_without(rank: int, world: int, tp: int, precision: list[str], folder: Path, corpus: str) -> None:
    common = [*TINY, *precision, "--model-parallel-size", tp, "--train-data", corpus, "--split", "6,2,2",
              "--train-iters", 7]
    for name, flags in (("without", []), ("often", ["--eval-interval", 2, "--eval-iters", 3]),
                        ("always", ["--eval-interval", 1, "--eval-iters", 1])):
        train([*common, *flags, "--save", folder / name, "--metrics-file", folder / f"{name}.jsonl"])


@pytest.mark.few(1)
@pytest.mark.parametrize(("tp", "world", "precision"),
                         [(1, 1, []), (2, 2, ["--fp16"]), (1, 2, ["--bf16", "--checkpoint-activations"])])
def test_evaluation_touches_neither_the_random_streams_nor_the_data_position(tp, world, precision, tmp_path):
    run_ranks(with_and_without, world, tp, precision, tmp_path, write_corpus(tmp_path / "corpus"))
    without, often, always = (steps(tmp_path / f"{name}.jsonl") for name in ("without", "often", "always"))
    assert without == often == always and len(without) == 7
    evaluated = [record["iteration"] for record in evaluations(tmp_path / "often.jsonl")]
    assert evaluated == [2, 4, 6, 7, 7], "every two steps, then validation and test at the end"
    assert not evaluations(tmp_path / "without.jsonl")
    assert len({total_digest(tmp_path / name) for name in ("without", "often", "always")}) == 1


def evaluations(file: Path) -> list[dict[str, Any]]:
    return [record for record in records(file) if record.get("eval")]


def only_evaluates(rank: int, world: int, folder: Path, corpus: str) -> None:
    common = [*TINY, "--train-data", corpus, "--split", "6,2,2", "--eval-interval", 4, "--eval-iters", 2,
              "--train-iters", 4, "--save", folder / "s"]
    train([*common, "--metrics-file", folder / "trained.jsonl"])
    train([*common, "--load", folder / "s", "--skip-train", "--lr", 1e-5, "--metrics-file", folder / "alone.jsonl"])


def test_a_run_that_only_evaluates_has_the_figures_of_the_run_and_saves_nothing(tmp_path: Path) -> None:
    run_ranks(only_evaluates, 2, tmp_path, write_corpus(tmp_path / "corpus"))
    assert evaluations(tmp_path / "alone.jsonl") == evaluations(tmp_path / "trained.jsonl") != []
    assert not steps(tmp_path / "alone.jsonl")
    assert [place.name for place in (tmp_path / "s").iterdir() if place.is_dir()] == ["global_step4"]


class Limited:
    """The first `distinct` samples of a dataset of `ids`; any other must not be read."""

    def __init__(self, distinct: int | None, ids: int = 257) -> None:
        self.distinct_samples, self._all, self.read = distinct, MockDataset(ids, 16, 5), set[int]()

    def __getitem__(self, index: int):
        assert self.distinct_samples is None or index < self.distinct_samples
        self.read.add(index)
        return self._all[index]


def tiny_engine() -> Engine:
    config = parse_args([*TINY, "--mock-data"])
    config = build.with_vocab_size(config, build.tokenizer(config))
    groups = build_groups(1)
    build.seed_everything(config.train, groups)
    return build.engine(config, build.model(config, groups), groups, torch.device("cpu"))


def all_mean_losses(rank: int, world: int) -> list[tuple[float, float, set[int]]]:
    engine = tiny_engine()
    return [mean_losses(engine, rank, world, *case) for case in MEANS[world]]


def mean_losses(engine: Engine, rank: int, world: int, micro: int, accumulation: int, global_batches: int,
                distinct: int | None) -> tuple[float, float, set[int]]:
    """(evaluate, the plain mean over the same samples, the samples this rank read)."""
    engine.train()
    samples = Limited(distinct)
    streams = capture_rng()
    found = evaluate(engine, samples, MicroBatchSampler(micro, accumulation, rank, world, 256), global_batches,
                     torch.device("cpu"))
    assert same(streams, capture_rng()) and engine.module.training
    read = samples.read.copy()
    count = global_batches * micro * accumulation * world
    if distinct is not None:
        count = min(count, distinct // (micro * world) * micro * world)
    rows = torch.stack([torch.from_numpy(Limited(None)[i]) for i in range(count)])
    engine.module.eval()
    with torch.no_grad():
        logits = engine.module.logits(engine.module.hidden_states(rows[:, :-1]))
        plain = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    return found.loss, plain, read


MEANS = {1: [(2, 1, 3, None), (2, 3, 2, None), (2, 1, 100, 7)], 2: [(2, 1, 3, None), (1, 2, 100, 9)]}
"""Ranks -> micro-batch, accumulation, batches, samples."""


@pytest.mark.parametrize("world", MEANS)
def test_the_figure_is_the_mean_over_the_first_samples_each_read_once(world: int) -> None:
    for ranks in zip(*run_ranks(all_mean_losses, world)):
        for found, plain, _ in ranks:
            assert found == pytest.approx(plain, abs=1e-5) and found == ranks[0][0]
        union = sorted(i for *_, read in ranks for i in read)
        assert union == list(range(len(union))), "a sample was read twice or left out"


def test_evaluations_of_one_run_read_the_same_samples_and_carry_the_perplexity(tmp_path: Path) -> None:
    train([*TINY, "--mock-data", "--lr", 0, "--train-iters", 3, "--eval-interval", 1, "--eval-iters", 2,
           "--metrics-file", tmp_path / "m"])
    found = evaluations(tmp_path / "m")
    assert [(e["split"], e["iteration"]) for e in found] == [("validation", 1), ("validation", 2), ("validation", 3),
                                                             ("test", 3)]
    assert len({e["lm_loss"] for e in found[:3]}) == 1, "the weights do not change, so neither must the figure"
    assert all(e["ppl"] == math.exp(e["lm_loss"]) for e in found)


def bits_of(rank: int, world: int, masks: bool) -> tuple[float | None, float]:
    """(bits per byte of the evaluation, by hand from each target by itself)."""
    engine = tiny_engine()
    lengths = torch.arange(257) % 4  # of made-up tokens; some stand for nothing
    rule = MicroBatchSampler(2, 1, rank, world, 7, eod_mask_loss=masks)
    score = evaluate(engine, Limited(12, ids=23), rule, 3, torch.device("cpu"), lengths)
    engine.module.eval()
    nats, text = 0.0, 0
    with torch.no_grad():
        for index in range(3 * 2 * world):
            row = torch.from_numpy(Limited(None, ids=23)[index])
            for place, target in enumerate(row[1:].tolist()):
                if not (masks and row[place] == 7):
                    logits = engine.module(row[None, : place + 1])[0]
                    nats -= logits.log_softmax(-1)[target].item()
                    text += target % 4
    return score.bits_per_byte, nats / math.log(2) / text


@pytest.mark.parametrize(("world", "masks"), [(1, False), (2, True)])
def test_bits_per_byte_are_those_of_each_target_by_itself(world: int, masks: bool) -> None:
    ranks = run_ranks(bits_of, world, masks)
    for found, by_hand in ranks:
        assert found == ranks[0][0] and found == pytest.approx(by_hand, rel=1e-5)  # sums of fp32 losses


def test_a_run_says_bits_per_byte_where_its_tokens_are_text(tmp_path: Path) -> None:
    common = [*TINY, "--train-iters", 1, "--eval-interval", 1, "--eval-iters", 2, "--metrics-file"]
    said = train([*common, tmp_path / "m", "--train-data", write_corpus(tmp_path / "corpus"), "--split", "6,2,2"])
    for line in (line for line in records(tmp_path / "m") if line.get("eval")):
        bits = line["lm_loss"] / math.log(2)
        assert bits < line["bits_per_byte"] < 1.5 * bits, "a byte a token, and none of the ends"
        assert f" | lm loss PPL: {line['ppl']:.6E} | bits per byte: {line['bits_per_byte']:.3E}\n" in said
    said = train([*common, tmp_path / "mock", "--mock-data"])
    assert "bits per byte" not in said and not any("bits_per_byte" in line for line in records(tmp_path / "mock"))
