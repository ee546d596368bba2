"""The arrangement of the ranks does not change the training: tp x dp x accumulation against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.cli import parse_args
from megatron.model import GPT2
from megatron.train.build import engine as make_engine, model as make_model, tokenizer, with_vocab_size
from mpu.collectives import all_gather
from mpu.groups import build
from mpu.partition import partition_of
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, train, write_corpus


def same_training(rank: int, world: int, tp: int, accumulation: int, folder: Path, corpus: str) -> None:
    """The same global batches, cut another way."""
    train([*TINY, *NO_DROPOUT, "--train-data", corpus, "--split", "8,1,1", "--train-iters", 50, "--lr", 3e-3,
           "--clip-grad", 0.5, "--weight-decay", 0.1, "--model-parallel-size", tp,
           "--batch-size", 8 * tp // world // accumulation, "--global-batch-size", 8,
           "--metrics-file", folder / f"{world}.jsonl"])


def test_a_run_split_both_ways_trains_like_one_process(tmp_path: Path) -> None:
    """tests/megatron/zero/test_matrix.py has every layout."""
    corpus = write_corpus(tmp_path / "corpus")
    for world, tp, accumulation in ((1, 1, 1), (4, 2, 2)):
        run_ranks(same_training, world, tp, accumulation, tmp_path, corpus, timeout=300)
    expected, found = steps(tmp_path / "1.jsonl"), steps(tmp_path / "4.jsonl")
    assert expected[-1]["lm_loss"] < expected[0]["lm_loss"] - 1, "nothing is learnt"
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("lm_loss", "grad_norm"):
            # The sums are the same in another order: rounding of 2e-7 a step, which 50 steps of Adam may enlarge.
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4, rel=0), (key, mine["iteration"])
        for key in ("iteration", "learning_rate", "consumed_samples", "samples_digest", "skipped"):
            assert mine[key] == theirs[key]


def logical_weights(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Every parameter as an unsplit model would have it, put together from the slices of all ranks."""
    groups = build(world)
    model = GPT2(tiny_model(num_layers=3, vocab_size=201), groups.tp, seed=5)
    whole = {}
    for name, parameter in model.named_parameters():
        partition, x = partition_of(parameter), parameter.detach()
        if partition is None:
            copies = all_gather(x.unsqueeze(0), groups.tp, dim=0)
            assert all(copy.equal(x) for copy in copies), f"{name} differs between ranks"
        elif partition.stride == 1:
            x = all_gather(x, groups.tp, dim=partition.dim)
        else:  # q, k and v are cut one by one
            x = torch.cat([all_gather(part.contiguous(), groups.tp, dim=partition.dim)
                           for part in x.chunk(partition.stride, partition.dim)], partition.dim)
        whole[name] = x[:201] if name == "wte.weight" else x
        padding = parameter[max(0, 201 - rank * len(parameter)):] if name == "wte.weight" else parameter[:0]
        assert not padding.any(), "padding is not zero"
    return whole


def test_initial_weights_are_bit_equal_for_every_tensor_parallel_size() -> None:
    (expected,) = run_ranks(logical_weights, 1)
    for tp in (2, 4):
        for found in run_ranks(logical_weights, tp):
            assert found.keys() == expected.keys()
            assert all(found[name].equal(expected[name]) for name in expected)


def test_the_vocabulary_padding_does_not_change_the_training(tmp_path: Path) -> None:
    """257 tokens in 257, 260, 384 and 1,000 rows."""
    for multiple in (1, 4, 128, 1000):
        train([*TINY, "--mock-data", "--train-iters", 20, "--lr", 1e-2, "--weight-decay", 0.1, "--metrics-file",
               tmp_path / str(multiple),
               "--make-vocab-size-divisible-by", multiple])
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
