"""The arrangement of the ranks does not change the training: tp x dp x accumulation against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.model import GPT2
from mpu.collectives import all_gather
from mpu.groups import build
from mpu.layers import partition_of
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, total_digest, train, write_corpus

STEPS, BATCH, CLIP = 50, 8, 0.5

TOLERANCE = 1e-4
"""The sums are the same in another order: rounding of 2e-7 a step, which 50 steps of Adam may enlarge."""


def same_training(rank: int, world: int, tp: int, folder: Path, corpus: str) -> None:
    """One run per accumulation, each of the same global batches."""
    dp = world // tp
    for accumulation in (1, 2):
        train([*TINY, *NO_DROPOUT, "--train-data", corpus, "--split", "8,1,1", "--train-iters", STEPS, "--lr", 3e-3, "--clip-grad", CLIP,
               "--weight-decay", 0.1, "--model-parallel-size", tp, "--batch-size", BATCH // (dp * accumulation), "--global-batch-size", BATCH,
               "--eval-interval", 25, "--eval-iters", 2, "--metrics-file", folder / f"{tp}-{dp}-{accumulation}.jsonl"])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the corpus and the metrics of one process."""
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(same_training, 1, 1, folder, write_corpus(folder / "corpus"))
    return folder


GRIDS = [pytest.param(tp, dp, marks=[pytest.mark.slow] if tp * dp > 4 else []) for tp in (1, 2, 4) for dp in (1, 2)]


@pytest.mark.parametrize(("tp", "dp"), GRIDS)
def test_every_grid_and_accumulation_trains_like_one_process(tp: int, dp: int, one_process: Path) -> None:
    if tp * dp > 1:
        run_ranks(same_training, tp * dp, tp, one_process, str(one_process / "corpus"), timeout=300)
    expected = steps(one_process / "1-1-1.jsonl")
    assert sum(step["grad_norm"] > CLIP for step in expected) > STEPS // 2, "clipping is not active"
    assert expected[-1]["lm_loss"] < expected[0]["lm_loss"] - 1, "nothing is learnt"
    for accumulation in (1, 2):
        found = steps(one_process / f"{tp}-{dp}-{accumulation}.jsonl")
        assert len(found) == len(expected) == STEPS
        for mine, theirs in zip(found, expected, strict=True):
            for key in ("lm_loss", "grad_norm"):
                assert mine[key] == pytest.approx(theirs[key], abs=TOLERANCE, rel=TOLERANCE), (accumulation, key, mine["iteration"])
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
        assert name != "wte.weight" or not model.wte.weight[max(0, 201 - rank * len(parameter)):].any(), "padding is not zero"
    return whole


def test_initial_weights_are_bit_equal_for_every_tensor_parallel_size() -> None:
    (expected,) = run_ranks(logical_weights, 1)
    for tp in (2, 4):
        for found in run_ranks(logical_weights, tp):
            assert found.keys() == expected.keys()
            assert all(found[name].equal(expected[name]) for name in expected)


def initial_checkpoints(rank: int, world: int, tp: int, folder: Path) -> None:
    train([*TINY, "--mock-data", "--train-iters", 1, "--lr", 0, "--weight-decay", 0, "--model-parallel-size", tp, "--no-save-optim",
           "--save", folder / f"{tp}-{world}"])


def test_a_step_at_learning_rate_0_leaves_the_same_weights_on_every_grid(tmp_path: Path) -> None:
    for tp, dp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        run_ranks(initial_checkpoints, tp * dp, tp, tmp_path)
    assert len({total_digest(folder) for folder in tmp_path.iterdir()}) == 1


def test_the_vocabulary_padding_stays_zero_and_does_not_change_the_training(tmp_path: Path) -> None:
    """257 tokens padded to 257, 260, 384 and 1,000 rows: the very same arithmetic on the real ones."""
    from megatron.zero.engine import ZeroEngine

    engines: list[ZeroEngine] = []
    made = ZeroEngine.__init__

    def remember(engine: ZeroEngine, *args: object, **settings: object) -> None:
        made(engine, *args, **settings)  # type: ignore[arg-type]
        engines.append(engine)

    digests, metrics = set(), []
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(ZeroEngine, "__init__", remember)
        for multiple, rows in ((1, 257), (4, 260), (128, 384), (1000, 1000)):
            train([*TINY, "--mock-data", "--train-iters", 20, "--lr", 1e-2, "--weight-decay", 0.1, "--save", tmp_path / str(multiple),
                   "--make-vocab-size-divisible-by", multiple, "--metrics-file", tmp_path / f"{multiple}.jsonl"])
            wte = engines[-1].module.wte.weight  # type: ignore[union-attr]
            assert wte.shape[0] == rows and not wte[257:].any()
            assert wte[:257].all(dim=1).any()  # type: ignore[index]
            digests.add(total_digest(tmp_path / str(multiple)))
            metrics.append(steps(tmp_path / f"{multiple}.jsonl"))
    assert len(digests) == 1
    assert all(found == metrics[0] for found in metrics)
