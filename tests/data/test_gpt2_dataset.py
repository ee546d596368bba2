"""Samples against a plain reference that joins everything in memory, and their independence of everything else."""

from __future__ import annotations

import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import gpt2_dataset
from data.gpt2_dataset import BlendedDataset, GPT2Dataset, count_samples, sample_starts
from data.indexed import IndexedCorpus
from data.sampling import MAX_BLEND_PERIOD, Blend, epoch_permutation, integer_weights, parse_split, split_documents
from data.storage import DataError
from data.writer import CorpusWriter


def corpus_of(prefix: Path, sizes: list[int], first: int = 0) -> IndexedCorpus:
    """Documents of these sizes; the tokens count upwards, so each shows its place."""
    with CorpusWriter(prefix, vocab_size=1 << 20) as writer:
        for size in sizes:
            writer.add_documents(np.arange(first, first + size), [size])
            first += size
    return IndexedCorpus(prefix)


def test_starts_equal_a_walk_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    for case in range(450):
        monkeypatch.setattr(gpt2_dataset, "BLOCK_DOCUMENTS", (1, 3, 1 << 20)[case % 3])
        sizes = [draw.choice([0, 0, 1, 4, 5, draw.randint(0, 30)]) for _ in range(draw.randint(1, 12))]
        order = draw.sample(range(len(sizes)), draw.randint(1, len(sizes)))
        seq_length = draw.randint(1, 9)
        starts = sample_starts(np.array(sizes, np.int32), np.array(order), seq_length)
        places = [[position, offset] for position, document in enumerate(order) for offset in range(sizes[document])]
        assert starts.tolist() == places[:-1:seq_length][:count_samples(len(places), seq_length)]


SIZES = [5, 0, 17, 1, 0, 8, 3, 29, 0, 2, 11]


@pytest.mark.parametrize(("documents", "seq_length"), [(range(11), 1), (range(2, 8), 4), ([10, 2, 5], 7)])
def test_samples_equal_the_joined_documents_cut_in_pieces(tmp_path, documents, seq_length):
    corpus = corpus_of(tmp_path / "c", SIZES)
    dataset = GPT2Dataset(corpus, documents, seq_length, seed=3, name="train")
    n, expected = dataset.samples_per_epoch, []
    for epoch in range(3):
        order = np.array(list(documents))[epoch_permutation(len(documents), 3, epoch, 0)]
        stream = np.concatenate([corpus.document(int(number)) for number in order])
        assert n == (len(stream) - 1) // seq_length
        expected += [stream[sample * seq_length:(sample + 1) * seq_length + 1].tolist()
                     for sample in epoch_permutation(n, 3, epoch, 1)]
    for index in random.Random(0).sample(range(3 * n), 3 * n):  # whatever was read before
        assert dataset[index].dtype == np.int64 and dataset[index].tolist() == expected[index]


def test_few_epochs_stay_in_memory_and_one_that_was_left_behind_goes(tmp_path, monkeypatch):
    dataset = GPT2Dataset(corpus_of(tmp_path / "c", SIZES), range(11), 4, 1, "a")
    n = dataset.samples_per_epoch
    for i in range(20 * n):
        dataset[i]
    assert len(dataset._epochs._cached) == gpt2_dataset.MAX_CACHED_EPOCHS
    monkeypatch.setattr(gpt2_dataset, "SAMPLES_BEFORE_EVICTION", n // 2)
    for i in (n - 1, n, n - 2, n + 1):  # readers cross the border a little apart
        dataset[i]
    assert sorted(dataset._epochs._cached) == [0, 1]
    for i in range(n, 2 * n):
        dataset[i]
    assert sorted(dataset._epochs._cached) == [1]


def test_too_little_text_is_refused_with_both_numbers(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "c", [3, 0, 5])
    assert GPT2Dataset(corpus, range(3), 7, 0, "train").samples_per_epoch == 1
    with pytest.raises(DataError, match="valid: 3 documents with 8 tokens, one sample needs 9"):
        GPT2Dataset(corpus, range(3), 8, 0, "valid")


def test_a_token_outside_the_vocabulary_is_refused_when_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the facts are wrong, or the corpus too large to be scanned at the start."""
    corpus_of(tmp_path / "c", [50])
    os.unlink(tmp_path / "c.json")
    monkeypatch.setattr("data.indexed.SCAN_LIMIT_TOKENS", 10)
    dataset = GPT2Dataset(IndexedCorpus(tmp_path / "c"), range(1), 4, 0, "train", vocab_size=40)
    with pytest.raises(DataError, match="document 0, offset 40: token id 40 is outside the vocabulary of 40"):
        for i in range(dataset.samples_per_epoch):
            dataset[i]


def test_blends_serve_every_dataset_in_its_own_order(tmp_path: Path) -> None:
    parts = [GPT2Dataset(corpus_of(tmp_path / f"c{k}", SIZES, first=1000 * k), range(11), 4, k, "part") for k in (0, 1)]
    blend = BlendedDataset(parts, [Fraction("0.25"), Fraction("0.75")], "train")
    samples = [blend[i] for i in range(40)]
    for k, part in enumerate(parts):
        own = [sample.tolist() for sample in samples if sample[0] // 1000 == k]
        assert len(own) == (10, 30)[k]
        assert own == [part[i].tolist() for i in range(len(own))]


def test_fingerprints_differ_where_samples_do(tmp_path: Path) -> None:
    corpus, other = corpus_of(tmp_path / "a", SIZES), corpus_of(tmp_path / "b", SIZES, first=1)
    same = GPT2Dataset(IndexedCorpus(tmp_path / "a"), range(11), 4, 1, "again")
    dataset = GPT2Dataset(corpus, range(11), 4, 1, "train")
    assert dataset.fingerprint == same.fingerprint
    changed = [GPT2Dataset(other, range(11), 4, 1, "t"), GPT2Dataset(corpus, range(10), 4, 1, "t"),
               GPT2Dataset(corpus, range(11), 5, 1, "t"), GPT2Dataset(corpus, range(11), 4, 2, "t")]
    assert len({dataset.fingerprint, *(one.fingerprint for one in changed)}) == 5


def served(prefix: str, folder: str | None, count: int, start: Any = None) -> list[list[int]]:
    gpt2_dataset.MIN_STORED_SAMPLES = 1
    if start is not None:
        start.wait()
    dataset = GPT2Dataset(IndexedCorpus(prefix), range(3000), 4, 1, "train", folder)
    return [dataset[i].tolist() for i in range(count)]


def test_two_processes_that_share_a_folder_serve_the_same_as_one_without(tmp_path: Path) -> None:
    corpus_of(tmp_path / "c", [0, 9, 1] * 1000)
    given = (str(tmp_path / "c"), str(tmp_path / "cache"), 6000)  # into the third epoch
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(2, context) as pool:
        start = manager.Barrier(2)
        found = [answer.result(60) for answer in [pool.submit(served, *given, start) for _ in range(2)]]
    assert found[0] == found[1]
    dataset = GPT2Dataset(IndexedCorpus(tmp_path / "c"), range(3000), 4, 1, "train", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists(), "small orders are not stored"
    assert found[0] == [dataset[i].tolist() for i in range(6000)] and dataset.samples_per_epoch < 3000
    assert len(list((tmp_path / "cache").glob("*.rows"))) == 6


# -------------------------------------------------------------------------------------- splits, permutations and blends

SPLITS = [
    ("949,50,1", ("0.949", "0.05", "0.001")), ("949/50/1", ("0.949", "0.05", "0.001")), ("100", ("1", "0", "0")),
    ("8,2", ("0.8", "0.2", "0")), ("0.9,0.05", ("0.9", "0.05", "0.05")), ("0.9", ("0.9", "0.1", "0")),
    (" .5, .25, .25", ("0.5", "0.25", "0.25")), ("0,0,1", ("0", "0", "1")), ("0.1,0.1,0.1", ("1/3", "1/3", "1/3"))]


def test_splits_mean_their_proportions_and_every_document_is_in_one_part() -> None:
    for split, expected in SPLITS:
        assert parse_split(split) == tuple(map(Fraction, expected))
    for split in ("", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1", "1,,2", "1e400,inf"):
        with pytest.raises(DataError, match="--split"):
            parse_split(split)
    shares = parse_split("949,50,1")
    for documents in (0, 1, 2, 10, 999, 1000, 8_013_769):
        parts = split_documents(shares, documents)
        assert parts[0].start == 0 and parts[-1].stop == documents
        assert all(a.stop == b.start for a, b in zip(parts, parts[1:]))
        assert all(abs(len(part) - documents * share) <= 1 for part, share in zip(parts, shares))


def test_permutations_are_permutations_depend_on_all_arguments_and_never_change() -> None:
    """A resumed run must see the order it left: these numbers may not depend on the version of numpy."""
    seen = {tuple(epoch_permutation(50, *arguments)) for arguments in product((0, 1), repeat=3)}
    assert len(seen) == 8 and all(sorted(order) == list(range(50)) for order in seen)
    assert epoch_permutation(8, seed=1234, epoch=0).tolist() == [5, 6, 3, 7, 4, 1, 2, 0]
    assert len(epoch_permutation(0, 1, 1)) == 0


def test_blends_hold_their_proportions_after_every_sample() -> None:
    draw = random.Random(0)
    for _ in range(100):
        weights = [draw.randint(1, draw.choice([3, 40, 500])) for _ in range(draw.randint(1, 8))]
        blend = Blend(weights)
        n = 2 * blend.period + 3
        dataset, within = blend.locate(np.arange(n))
        drawn = np.cumsum(np.eye(len(weights), dtype=int)[dataset], axis=0)
        ideal = np.arange(1, n + 1)[:, None] * np.array(weights) / sum(weights)
        assert np.abs(drawn - ideal).max() < 1
        # Each dataset is read from its beginning, in order, without a gap.
        assert (within == drawn[np.arange(n), dataset] - 1).all()


def test_any_weights_have_a_bounded_period() -> None:
    assert integer_weights([Fraction("0.3"), Fraction("0.7")]) == [3, 7]
    assert integer_weights([10, 20, 30]) == [1, 2, 3]
    blend = Blend([Fraction("123456.789"), 987_654_321, 1])
    assert blend.period <= MAX_BLEND_PERIOD + 1 and blend.counts.min() >= 1
    dataset, within = blend.locate(10**15)
    assert 0 <= int(dataset) < 3 and int(within) < 10**15
