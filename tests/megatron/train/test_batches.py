"""Which samples a step uses, and what becomes of a row that holds several documents."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data import gpt2_dataset
from data.gpt2_dataset import GPT2Dataset
from data.indexed import IndexedCorpus
from data.writer import CorpusWriter
from megatron.model import GPT2
from megatron.train.batches import (MicroBatchSampler, batch_stream, document_numbers, positions_in_document,
                                    samples_digest)
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, total_digest, train, write_corpus

EOD = 256


class Counting:
    """Sample i is the row i, i, i, ...: batches show their ids."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(5, index, np.int64)


def rule(**changes: Any) -> MicroBatchSampler:
    settings: dict[str, Any] = dict(micro_batch=2, accumulation=1, dp_rank=0, dp_size=1, eod=EOD)
    return MicroBatchSampler(**(settings | changes))


def test_the_ranks_use_every_id_of_a_step_exactly_once() -> None:
    for micro, accumulation, dp, taken in itertools.product((1, 2, 3, 8), (1, 2, 5), (1, 2, 3, 8), (0, 1, 7)):
        rules = [rule(micro_batch=micro, accumulation=accumulation, dp_rank=rank, dp_size=dp) for rank in range(dp)]
        size = micro * accumulation * dp
        first = taken * size
        batches = [one.micro_batch_ids(first) for one in rules]
        assert all(len(ids) == micro for mine in batches for ids in mine)
        assert all(len(mine) == accumulation for mine in batches)
        # Micro-batch by micro-batch over all ranks they are in order, whatever accumulation and dp.
        in_order = [i for ids in zip(*batches, strict=True) for part in ids for i in part]
        assert in_order == list(range(first, first + size))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_gives_the_steps_in_order_and_then_ends(workers: int) -> None:
    stream = batch_stream(Counting(), rule(accumulation=2, dp_rank=1, dp_size=2), first=80, steps=7, workers=workers)
    seen = [[batch.tokens[:, 0].tolist() for batch in batches] for batches in stream]
    stream.close()
    assert seen == [[[first + 2, first + 3], [first + 6, first + 7]] for first in range(80, 80 + 7 * 8, 8)]


def test_a_hundred_chains_of_resumes_use_every_sample_of_three_epochs_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every link has its own dp, micro-batch, accumulation and readers, and ends where it likes."""
    monkeypatch.setattr(gpt2_dataset, "BLOCK_DOCUMENTS", 4)
    length, documents, draw = 4, 50, random.Random(3)
    with CorpusWriter(tmp_path / "corpus", vocab_size=length * documents) as writer:
        for number in range(documents):  # a sample is a document and one token more, so its first token names it
            writer.add_documents(range(number * length, (number + 1) * length), [length])
    samples = GPT2Dataset(IndexedCorpus(tmp_path / "corpus"), range(documents), length, seed=5, name="train")
    epoch = samples.samples_per_epoch
    expected = [int(samples[index][0]) for index in range(3 * epoch)]
    assert epoch == documents - 1
    assert all(len(set(expected[at:at + epoch])) == epoch for at in range(0, 3 * epoch, epoch))
    for _ in range(100):
        seen: list[int] = []
        while len(seen) < 3 * epoch:
            dp, micro, accumulation, steps = (draw.choice(values) for values in ((1, 2, 3, 4), (1, 2, 4), (1, 3),
                                                                                 (1, 2, 5, 9)))
            rules = [rule(micro_batch=micro, accumulation=accumulation, dp_rank=rank, dp_size=dp) for rank in range(dp)]
            # A stream reads ahead of the steps that are taken; only those count.
            streams = [batch_stream(samples, one, len(seen), 99, workers=draw.choice((0, 0, 2))) for one in rules]
            taken = [list(itertools.islice(stream, steps)) for stream in streams]
            for stream in streams:
                stream.close()
            for of_a_step in zip(*taken, strict=True):
                for of_ranks in zip(*of_a_step, strict=True):
                    seen += [token for batch in of_ranks for token in batch.tokens[:, 0].tolist()]
        assert seen[:3 * epoch] == expected


def test_the_batch_grows_in_equal_shares_of_the_samples() -> None:
    for start, increment, samples, micro, dp in ((4, 4, 100, 2, 2), (16, 48, 1000, 8, 2), (8, 8, 3, 2, 1),
                                                 (64, 1, 9, 1, 1)):
        full = 64
        rules = [rule(micro_batch=micro, accumulation=full // micro // dp, dp_rank=rank, dp_size=dp,
                      ramp=(start, increment, samples)) for rank in range(dp)]
        share = samples / max(1, (full - start) / increment)  # of one size, as Megatron-LM divides
        consumed = 0
        for _ in range(50):
            size = min(full, start + int(consumed / share + 1e-9) * increment)
            assert rules[0].global_batch(consumed) == size
            ids = [one.micro_batch_ids(consumed) for one in rules]
            before, consumed = consumed, consumed + size
            assert [i for step in zip(*ids, strict=True) for part in step for i in part] == [*range(before, consumed)]


def test_a_run_with_a_growing_batch_resumes_bit_for_bit(tmp_path: Path, capfd: Any) -> None:
    run = [*TINY, "--train-data", write_corpus(tmp_path / "corpus"), "--batch-size", "2", "--global-batch-size", "8",
           "--rampup-batch-size", "2", "2", "20", "--save-interval", "3", "--lr", "1e-2"]
    once, twice, fixed = tmp_path / "once", tmp_path / "twice", tmp_path / "fixed"
    train([*run, "--train-iters", "8", "--save", once, "--metrics-file", tmp_path / "metrics"])
    train([*run, "--train-iters", "8", "--exit-interval", "3", "--save", twice])
    capfd.readouterr()
    train([*run, "--train-iters", "8", "--save", twice, "--load", twice])
    assert "warning" not in capfd.readouterr().err
    assert total_digest(once) == total_digest(twice)
    found = steps(tmp_path / "metrics")
    assert [line["consumed_samples"] for line in found] == [2, 4, 6, 8, 12, 16, 22, 30]
    small = run[:run.index("--global-batch-size")]
    train([*small, "--train-iters", "4", "--lr", "1e-2", "--lr-decay-iters", "8", "--metrics-file", fixed])
    assert [line["lm_loss"] for line in steps(fixed)] == [line["lm_loss"] for line in found[:4]]


def test_targets_are_the_next_tokens() -> None:
    class Increasing:
        def __getitem__(self, index: int) -> np.ndarray:
            return np.arange(index, index + 9)

    batch = rule().load_batch(Increasing(), range(3, 5))
    assert batch.tokens.tolist() == [list(range(3, 11)), list(range(4, 12))]
    assert batch.targets.equal(batch.tokens + 1)
    assert batch.loss_weight is batch.positions is batch.segments is None


def slow_documents(row: list[int]) -> tuple[list[int], list[int]]:
    """(document number, position in it) of each token, one at a time."""
    numbers, positions, number, position = [], [], 0, 0
    for token in row:
        numbers.append(number)
        positions.append(position)
        position += 1
        if token == EOD:
            number, position = number + 1, 0
    return numbers, positions


def test_documents_and_positions_equal_a_count_by_hand() -> None:
    rng = np.random.default_rng(3)
    rows = np.where(rng.random((200, 30)) < rng.random((200, 1)), EOD, rng.integers(0, 5, (200, 30)))
    rows[0], rows[1, -1], rows[2, 0] = EOD, EOD, EOD
    numbers = document_numbers(torch.from_numpy(rows), EOD)
    expected = [slow_documents(row) for row in rows.tolist()]
    assert numbers.tolist() == [number for number, _ in expected]
    assert positions_in_document(numbers).tolist() == [position for _, position in expected]


class OneRow:
    def __init__(self, row: list[int]) -> None:
        self.row = np.array(row)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.row


DOCUMENTS = [[5, 6, 7, 8, EOD], [9, EOD], [1, 2, 3, 4, 5, 6, EOD], [7, 7]]


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(0)
    gpt2 = GPT2(tiny_model())
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return gpt2.eval()


@torch.no_grad()
def test_a_packed_document_gets_the_logits_it_gets_alone(model: GPT2) -> None:
    row = [token for document in DOCUMENTS for token in document]
    batch = rule(micro_batch=1, reset_position_ids=True,
                 reset_attention_mask=True).load_batch(OneRow([*row, 0]), range(1))
    assert batch.tokens.tolist() == [row]
    packed = model.logits(model.hidden_states(batch.tokens, batch.positions, batch.segments))[0]
    alone = torch.cat([model.logits(model.hidden_states(torch.tensor([document])))[0] for document in DOCUMENTS])
    # Another kernel (masked instead of causal) adds the same terms in another order.
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    plain = model.logits(model.hidden_states(batch.tokens))[0]
    assert (plain - alone).abs().max() > 0.1, "documents would not have met anyway"


def test_eod_mask_loss_leaves_out_what_follows_a_document(model: GPT2) -> None:
    row = [token for document in DOCUMENTS for token in document] + [3]
    batch = rule(micro_batch=1, eod_mask_loss=True).load_batch(OneRow(row), range(1))
    assert batch.loss_weight is not None and batch.loss_weight.tolist() == [[float(token != EOD) for token in row[:-1]]]
    with torch.no_grad():
        losses = F.cross_entropy(model.logits(model.hidden_states(batch.tokens))[0], batch.targets[0], reduction="none")
        expected = losses[torch.tensor(row[:-1]) != EOD].mean()
        found = model(batch.tokens, batch.targets, batch.loss_weight)
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert found.item() != pytest.approx(losses.mean().item(), abs=1e-4)


def test_a_row_of_nothing_but_document_ends_has_loss_0_and_finite_gradients(model: GPT2) -> None:
    batch = rule(micro_batch=1, eod_mask_loss=True, reset_position_ids=True,
                 reset_attention_mask=True).load_batch(OneRow([EOD] * 9), range(1))
    loss = model(batch.tokens, batch.targets, batch.loss_weight, batch.positions, batch.segments)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_digest_is_of_the_ordered_ids() -> None:
    import hashlib

    assert samples_digest(6, 3) == hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in (6, 7, 8))).hexdigest()


PACKED = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]


def packed_training(rank: int, world: int, tp: int, folder: Path, corpus: str) -> None:
    train([*TINY, *NO_DROPOUT, *PACKED, "--train-data", corpus, "--train-iters", 10, "--batch-size", 4 * tp // world,
           "--global-batch-size", 4,
           "--model-parallel-size", tp, "--metrics-file", folder / f"{tp}-{world}", "--lr", 1e-2])


def test_samples_digests_do_not_depend_on_the_layout_and_packing_trains_alike_over_tp(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", longest=12)
    for tp, world in ((1, 1), (2, 2), (1, 2)):
        run_ranks(packed_training, world, tp, tmp_path, corpus)
    one, over_tp, over_dp = (steps(tmp_path / name) for name in ("1-1", "2-2", "1-2"))
    digests = [[step["samples_digest"] for step in run] for run in (one, over_tp, over_dp)]
    assert digests[0] == digests[1] == digests[2] and len(set(digests[0])) == 10
    assert [s["lm_loss"] for s in one] == pytest.approx([s["lm_loss"] for s in over_tp], abs=1e-4)
