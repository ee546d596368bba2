"""Samples against a plain reference that joins everything in memory, and their independence of everything else."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import gpt2_dataset
from data.gpt2_dataset import BlendedDataset, EpochCache, GPT2Dataset, MockDataset, count_samples, sample_starts
from data.indexed import IndexedCorpus
from data.sampling import epoch_permutation
from data.storage import DataError
from data.writer import CorpusWriter


def corpus_of(prefix: Path, sizes: list[int], first: int = 0) -> IndexedCorpus:
    """Documents of these sizes; the tokens count upwards, so each shows its place."""
    with CorpusWriter(prefix, vocab_size=1 << 20) as writer:
        for size in sizes:
            writer.add_document(np.arange(first, first + size))
            first += size
    return IndexedCorpus(prefix)


def naive_starts(sizes: list[int], order: list[int], seq_length: int) -> list[list[int]]:
    """Walk over every token of the joined documents."""
    places = [[position, offset] for position, document in enumerate(order) for offset in range(sizes[document])]
    return places[:-1:seq_length][:count_samples(len(places), seq_length)]


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_starts_equal_a_walk_over_all_tokens(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(gpt2_dataset, "BLOCK_DOCUMENTS", block)
    draw = random.Random(block)
    for _ in range(200):
        sizes = [draw.choice([0, 0, 1, 4, 5, draw.randint(0, 30)]) for _ in range(draw.randint(1, 12))]
        order = draw.sample(range(len(sizes)), draw.randint(1, len(sizes)))
        seq_length = draw.randint(1, 9)
        starts = sample_starts(np.array(sizes, np.int32), np.array(order), seq_length)
        assert starts.tolist() == naive_starts(sizes, order, seq_length)


SIZES = [5, 0, 17, 1, 0, 8, 3, 29, 0, 2, 11]


@pytest.mark.parametrize("documents", [range(11), range(2, 8), [10, 2, 5]])
@pytest.mark.parametrize("seq_length", [1, 4, 7])
def test_samples_equal_the_joined_documents_cut_in_pieces(tmp_path: Path, documents: list[int] | range,
                                                          seq_length: int) -> None:
    corpus = corpus_of(tmp_path / "c", SIZES)
    dataset = GPT2Dataset(corpus, documents, seq_length, seed=3, name="train")
    n = dataset.samples_per_epoch
    for epoch in range(3):
        order = np.array(list(documents))[epoch_permutation(len(documents), 3, epoch, 0)]
        stream = np.concatenate([corpus.document(int(number)) for number in order])
        assert n == (len(stream) - 1) // seq_length
        for place, sample in enumerate(epoch_permutation(n, 3, epoch, 1)):
            expected = stream[sample * seq_length:(sample + 1) * seq_length + 1]
            found = dataset[epoch * n + place]
            assert found.dtype == np.int64 and found.tolist() == expected.tolist()


def test_samples_do_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "c", SIZES)
    asked = list(range(60))
    straight = [GPT2Dataset(corpus, range(11), 4, 1, "a")[i].tolist() for i in asked]
    dataset = GPT2Dataset(corpus, range(11), 4, 1, "b")
    random.Random(0).shuffle(asked)
    for i in asked:
        assert dataset[i].tolist() == straight[i]
    assert [GPT2Dataset(corpus, range(11), 4, 2, "a")[i].tolist() for i in range(60)] != straight


def test_stored_epochs_equal_computed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, folder = corpus_of(tmp_path / "c", SIZES), tmp_path / "cache"
    computed = GPT2Dataset(corpus, range(11), 4, 1, "computed", str(folder))
    assert not folder.exists()
    monkeypatch.setattr(gpt2_dataset, "MIN_STORED_SAMPLES", 1)
    for attempt in range(2):
        stored = GPT2Dataset(corpus, range(11), 4, 1, "stored", str(folder))
        assert all(stored[i].tolist() == computed[i].tolist() for i in range(3 * stored.samples_per_epoch))
        assert len(list(folder.glob("*.rows"))) == 6, attempt
    GPT2Dataset(corpus, range(10), 4, 1, "other", str(folder))[0]
    assert len(list(folder.glob("*.rows"))) == 8


def test_of_several_ranks_one_builds_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, folder = corpus_of(tmp_path / "c", SIZES), tmp_path / "cache"
    monkeypatch.setattr(gpt2_dataset, "MIN_STORED_SAMPLES", 1)
    real, built = gpt2_dataset.build_epoch, []

    def slowly(*given: object) -> gpt2_dataset.EpochIndex:
        built.append(given[-1])
        time.sleep(0.05)  # the others are here before it is done
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(gpt2_dataset, "build_epoch", slowly)
    found: list[list[int]] = []
    ranks = [threading.Thread(target=lambda: found.append(
        GPT2Dataset(corpus, range(11), 4, 1, "rank", str(folder))[0].tolist())) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 8 and all(sample == found[0] for sample in found) and built == [0]


def test_few_epochs_stay_in_memory(tmp_path: Path) -> None:
    dataset = GPT2Dataset(corpus_of(tmp_path / "c", SIZES), range(11), 4, 1, "a")
    for i in range(20 * dataset.samples_per_epoch):
        dataset[i]
    assert len(dataset._epochs._cached) == gpt2_dataset.MAX_CACHED_EPOCHS


def test_an_epoch_that_was_left_behind_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = GPT2Dataset(corpus_of(tmp_path / "c", SIZES), range(11), 4, 1, "a")
    n = dataset.samples_per_epoch
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
    with pytest.raises(IndexError):
        GPT2Dataset(corpus, range(3), 7, 0, "train")[-1]


@pytest.mark.parametrize("bad", [90, -1])
def test_a_token_outside_the_vocabulary_is_refused_at_open(tmp_path: Path, bad: int) -> None:
    corpus_of(tmp_path / "c", [50])
    raw = np.fromfile(tmp_path / "c.bin", "<i4")
    raw[33] = bad
    raw.tofile(tmp_path / "c.bin")
    os.unlink(tmp_path / "c.json")
    with pytest.raises(DataError, match=f"document 0, offset 33: token id {bad} is outside the vocabulary of 60"):
        GPT2Dataset(IndexedCorpus(tmp_path / "c"), range(1), 4, 0, "train", vocab_size=60)


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


def test_mock_samples_are_a_function_of_seed_and_index() -> None:
    a, b, c = MockDataset(100, 9, seed=1), MockDataset(100, 9, seed=1), MockDataset(100, 9, seed=2)
    assert a[5].tolist() == b[5].tolist() != c[5].tolist()
    assert a[5].tolist() != a[6].tolist()
    everything = np.concatenate([a[i] for i in range(300)])
    assert a[0].shape == (10,) and everything.dtype == np.int64
    assert set(everything.tolist()) == set(range(100))


def stored(folder: Path, sizes: list[int], seq_length: int) -> EpochCache:
    """As `GPT2Dataset` makes it."""
    samples = count_samples(sum(sizes), seq_length)
    return EpochCache(np.array(sizes), np.arange(len(sizes)), seq_length, 1, samples, str(folder))


def content(index: gpt2_dataset.EpochIndex) -> tuple[list[int], list[list[int]]]:
    return ([int(index.documents[k]) for k in range(len(index.documents))],
            [list(map(int, index.starts[k])) for k in range(len(index.starts))])


@pytest.mark.parametrize(("sizes", "seq_length"), [
    ([2], 1), ([0, 0, 3, 0], 2), ([7] * 50, 4), ([3] * 1023, 3), ([3] * 1024, 3), ([0, 9] * 1500, 2), ([5000], 1)],
    ids=["one row", "empty documents", "a page begun", "a page full", "a row more", "many pages", "one document"])
def test_every_row_of_a_stored_order_is_that_of_the_computed_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], seq_length: int) -> None:
    monkeypatch.setattr(gpt2_dataset, "MIN_STORED_SAMPLES", 1)
    for epoch in range(2):
        computed = gpt2_dataset.build_epoch(np.array(sizes), np.arange(len(sizes)), seq_length, 1, epoch)
        for _ in range(2):  # the one that writes, and the one that finds it
            assert content(stored(tmp_path, sizes, seq_length)[epoch]) == content(computed)


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
    dataset = GPT2Dataset(IndexedCorpus(tmp_path / "c"), range(3000), 4, 1, "train")
    assert found[0] == [dataset[i].tolist() for i in range(6000)] and dataset.samples_per_epoch < 3000
    assert len(list((tmp_path / "cache").glob("*.rows"))) == 6


SOMEBODY = {
    "emptied": lambda path: path.write_bytes(b""), "magic alone": lambda path: path.write_bytes(path.read_bytes()[:8]),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 9), "longer": lambda path: os.truncate(path, 3 * 4096),
    "other content": lambda path: path.write_bytes(b"other"), "zeros": lambda path: path.write_bytes(bytes(2 * 4096)),
    "another epoch's": lambda path: shutil.copy(str(path).replace("-0-", "-1-"), path),
    "another corpus's": lambda path: shutil.copy(next(path.parent.glob(f"other/*-0-{path.stem.split('-')[-1]}.rows")),
                                                 path),
    "the other of the two": lambda path: shutil.copy(next(path.parent.glob(
        f"*-0-{'starts' if 'documents' in path.name else 'documents'}.rows")), path)}


@pytest.mark.parametrize("what", ["documents", "starts"])
@pytest.mark.parametrize("somebody", SOMEBODY.values(), ids=SOMEBODY)
def test_a_stored_order_that_is_damaged_or_another_is_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, somebody: Callable[[Path], object]) -> None:
    monkeypatch.setattr(gpt2_dataset, "MIN_STORED_SAMPLES", 1)
    store = stored(tmp_path, [7] * 50, 4)
    whole, _ = content(store[0]), content(store[1])
    content(stored(tmp_path / "other", [6, 8] * 25, 4)[0])
    path = next(tmp_path.glob(f"*-0-{what}.rows"))
    somebody(path)
    with pytest.raises(DataError, match=rf"^{path}: .*; delete it, and it is built again$"):
        content(stored(tmp_path, [7] * 50, 4)[0])
    path.unlink()
    assert content(stored(tmp_path, [7] * 50, 4)[0]) == whole


def test_orders_that_an_earlier_version_stored_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2_dataset, "MIN_STORED_SAMPLES", 1)
    expected = content(stored(tmp_path, [7] * 50, 4)[0])
    for path in list(tmp_path.glob("*.rows")):
        path.rename(path.with_suffix(".npy")).write_bytes(b"wrong")
    assert content(stored(tmp_path, [7] * 50, 4)[0]) == expected


def test_a_run_whose_stored_order_is_emptied_ends_with_its_name_and_no_signal(tmp_path: Path) -> None:
    corpus_of(tmp_path / "c", [0, 9, 1] * 1000)
    program = (f"import glob, os, sys\nfrom data import gpt2_dataset\nfrom data.cli import run_command\n"
               "from data.gpt2_dataset import GPT2Dataset\nfrom data.indexed import IndexedCorpus\n"
               "gpt2_dataset.MIN_STORED_SAMPLES = 1\n"
               f"dataset = GPT2Dataset(IndexedCorpus({str(tmp_path / 'c')!r}), range(3000), 4, 1, 'train', "
               f"{str(tmp_path / 'cache')!r})\ndataset[0]\n"
               f"for path in glob.glob({str(tmp_path / 'cache')!r} + '/*.rows'): os.truncate(path, 0)\n"
               "run_command(lambda: [dataset[i] for i in range(1, 2000)])\n")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, text=True, capture_output=True)
    assert done.returncode == 3 and done.stderr.count("\n") == 1, (done.returncode, done.stderr)
    assert ".rows: size: " in done.stderr and "delete it, and it is built again" in done.stderr
