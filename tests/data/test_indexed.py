"""MMIDIDX files: golden bytes, round trips, and every way an index can lie; merging equals writing at once. Samples are
those of a plain reference that joins everything in memory, whatever was read before."""

from __future__ import annotations

import os
import pickle
import random
import struct
from collections import Counter
from fractions import Fraction
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import gpt2_dataset, indexed
from data.gpt2_dataset import BlendedDataset, GPT2Dataset
from data.indexed import IndexedCorpus, TokenizerFacts, token_dtype
from data.merge import main as merge, merge_corpora
from data.sampling import MAX_BLEND_PERIOD, Blend, Permutation, integer_weights, parse_split, split_documents
from data.storage import DataError
from data.verify import verify_corpus
from data.writer import CorpusWriter
from tests.data.helpers import documents_of, files_of, sizes_of

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6]]
MADE_BY = TokenizerFacts("T", "abcd", 10, 9)

GOLDEN_INDEX = (
    "4d4d49444944580000" "0100000000000000" "08" "0400000000000000" "0500000000000000"
    "03000000" "00000000" "01000000" "02000000"
    "0000000000000000" "0600000000000000" "0600000000000000" "0800000000000000"
    "0000000000000000" "0100000000000000" "0200000000000000" "0300000000000000" "0400000000000000")


def write(prefix: Path, documents: list[list[int]], **settings: object) -> Path:
    with CorpusWriter(prefix, **(settings or {"vocab_size": 10})) as writer:  # type: ignore[arg-type]
        for document in documents:
            writer.add_documents(document, [len(document)])
    return prefix


def test_files_are_those_of_megatron_byte_for_byte(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", DOCUMENTS)
    assert Path(f"{prefix}.idx").read_bytes().hex() == GOLDEN_INDEX
    assert Path(f"{prefix}.bin").read_bytes().hex() == "010002000300040005000600"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "<u2"), (65_500, "<i4")])
def test_reading_gives_back_what_was_written(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
    documents = [[vocab_size - 1, 0], [], [5]]
    corpus = IndexedCorpus(write(tmp_path / "c", documents, vocab_size=vocab_size))
    assert [corpus.document(i).tolist() for i in range(corpus.num_documents)] == documents
    assert sizes_of(corpus) == [2, 0, 1] and corpus.num_tokens == 3 and corpus.dtype == np.dtype(dtype)
    assert corpus.document(0, 1).tolist() == [0] and corpus.document(0, 0, 99).tolist() == documents[0]
    assert pickle.loads(pickle.dumps(corpus)).document(2).tolist() == [5]


def test_documents_of_several_sequences_are_joined(tmp_path: Path) -> None:
    """As `--split-sentences` of Megatron writes them; here documents of 2, 0 and 1 sequences, with modes at the end."""
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 1, 3, 4) + struct.pack("<3i", 2, 1, 3)
    index += struct.pack("<3q", 0, 2, 3) + struct.pack("<4q", 0, 2, 2, 3) + bytes(3)
    (tmp_path / "c.idx").write_bytes(index)
    (tmp_path / "c.bin").write_bytes(bytes([1, 2, 3, 4, 5, 6]))
    assert documents_of(tmp_path / "c") == [[1, 2, 3], [], [4, 5, 6]]


LIES: list[tuple[int, str, object, str]] = [
    (0, "9s", b"MMIDIDZ\0\0", "magic: expected"),
    (0, "9s", b"TNTIDX\0\0\0", "is this a corpus index"),
    (9, "<Q", 2, "version: expected 1, found 2"),
    (17, "<B", 99, "dtype code: expected one of .* found 99"),
    (17, "<B", 6, "dtype code: 6 .* integer type"),
    (17, "<B", 4, "c.bin: size: the index says 24 bytes, found 12"),
    (18, "<Q", 2**64 - 1, "size: 18446744073709551615 sequences .* found 122"),
    (26, "<Q", 0, "size: "),
    (34, "<i", -3, r"lengths\[0\]: expected 0 or more, found -3"),
    (34, "<i", 4, "c.bin: size: the index says 14 bytes, found 12"),
    (74, "<q", 2**62, r"pointers\[3\]: expected 8 "),
    (82, "<q", 1, "documents: expected 0 to 4, found 1 to 4"),
    (90, "<q", -1, r"documents\[1\]: expected at least 0, found -1"),
    (98, "<q", 4, r"documents\[3\]: expected at least 4, found 3")]
"""Offset and layout of a field of the index, what it says, and the message."""


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_a_lying_index_is_refused_naming_file_and_field(block: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(indexed, "BLOCK_ENTRIES", block)
    (tmp_path / "c.bin").write_bytes(bytes.fromhex("010002000300040005000600"))
    for offset, layout, value, message in LIES:
        raw = bytearray.fromhex(GOLDEN_INDEX)
        struct.pack_into(layout, raw, offset, value)
        (tmp_path / "c.idx").write_bytes(raw)
        with pytest.raises(DataError, match=message) as caught:
            IndexedCorpus(tmp_path / "c")
        assert str(tmp_path / "c") in str(caught.value)


WRONG_LENGTHS = [
    (".bin", 0, "c.bin: size: the file is empty"), (".bin", 10, "says 12 bytes, found 10"),
    (".bin", 13, "says 12 bytes, found 13"), (".bin", None, "c.bin: cannot read: No such file"),
    (".idx", 0, "c.idx: size: the file is empty"), (".idx", 20, "header: expected 34 bytes, found 20"),
    (".idx", 113, "size: 4 sequences .* found 113"), (".idx", None, "c.idx: cannot read: No such file")]
WRONG_FACTS = ["", "[]", "{}", '{"documents": "4"}',
               '{"documents": 4, "tokens": 6, "crc32": "", "max_token": 6, "tokenizer": null, "identity": 3}']


def test_files_of_the_wrong_length_and_wrong_facts_are_refused(tmp_path: Path) -> None:
    for suffix, size, message in WRONG_LENGTHS:
        prefix = write(tmp_path / "c", DOCUMENTS)
        path = Path(f"{prefix}{suffix}")
        if size is None:
            path.unlink()
        else:
            path.write_bytes((path.read_bytes() + b"\0")[:size])
        with pytest.raises(DataError, match=message):
            IndexedCorpus(prefix)
    for content in WRONG_FACTS:
        prefix = write(tmp_path / "c", DOCUMENTS)
        Path(f"{prefix}.json").write_text(content)
        with pytest.raises(DataError, match="c.json: not the facts of a corpus"):
            IndexedCorpus(prefix)


@pytest.mark.parametrize(("dtype", "bad", "with_facts"), [("<u2", 300, False), ("<i4", 300, True), ("<i4", -1, False)])
def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path, dtype: str, bad: int, with_facts: bool) -> None:
    prefix = write(tmp_path / "c", [[1, 2], [], [3, abs(bad), 4]], dtype=np.dtype(dtype))
    if not with_facts:
        os.unlink(f"{prefix}.json")
    if bad < 0:  # which we do not write
        raw = np.fromfile(f"{prefix}.bin", dtype)
        raw[3] = bad
        raw.tofile(f"{prefix}.bin")
    corpus = IndexedCorpus(prefix)
    with pytest.raises(DataError, match=f"document 2, offset 1: token id {bad} is outside the vocabulary of 300"):
        corpus.check_vocabulary(300)
    if bad > 0:
        corpus.check_vocabulary(301)


def test_the_writer_refuses_ids_that_do_not_fit(tmp_path: Path) -> None:
    for bad in (-1, 10):
        with pytest.raises(DataError, match=f"token id {bad} .* expected 0 to 9"):
            write(tmp_path / "c", [[1], [2, bad]])
    with pytest.raises(DataError, match="no tokens"):
        write(tmp_path / "c", [[], []])
    assert os.listdir(tmp_path) == []


def test_the_files_do_not_depend_on_how_tokens_and_sizes_come(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sizes = draw.integers(0, 5, 100)
    tokens = draw.integers(0, 10, sizes.sum())
    documents = [part.tolist() for part in np.split(tokens, np.cumsum(sizes)[:-1])]
    expected = write(tmp_path / "a", documents)
    with CorpusWriter(tmp_path / "b", vocab_size=10) as writer:
        for part in np.array_split(tokens, 9):
            writer.add_tokens(part)
        for part in np.array_split(sizes, 4):
            writer.add_sizes(part)
    assert files_of(tmp_path / "b") == files_of(expected)


@pytest.mark.parametrize("has_facts", [True, False])
def test_corpora_of_equal_lengths_have_fingerprints_of_their_own(tmp_path: Path, has_facts: bool) -> None:
    """Other tokens in the middle: one anywhere where the checksum is recorded, a stretch of them where it is not."""
    count = 3 << 20
    tokens = np.arange(count) % 50_000
    for name in ("a", "b", "same"):
        other = tokens.copy()
        if name == "b":
            other[count // 2:count // 2 + (1 if has_facts else count // 8)] = 7
        write(tmp_path / name, [other], vocab_size=50_000)
        if not has_facts:
            (tmp_path / f"{name}.json").unlink()
    first, second, same = (IndexedCorpus(tmp_path / name).fingerprint for name in ("a", "b", "same"))
    assert first == same != second


# ------------------------------------------------------------------------------------------------------------ merging

def test_merging_equals_writing_everything_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(indexed, "BLOCK_ENTRIES", 2)  # documents lie across blocks
    parts = [DOCUMENTS, [[7], [8, 9]], [[0]], [[], [3, 1, 4, 1, 5]]]
    prefixes = [write(tmp_path / f"part{i}", part, tokenizer=MADE_BY) for i, part in enumerate(parts)]
    whole = write(tmp_path / "whole", sum(parts, []), tokenizer=MADE_BY)
    merge([str(tmp_path / "new" / "merged"), *map(str, prefixes)])
    assert capsys.readouterr().out == f"{tmp_path}/new/merged: 9 documents, 15 tokens of 4 corpora\n"
    assert files_of(tmp_path / "new" / "merged") == files_of(whole)


def test_different_origins_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    a = write(tmp_path / "a", DOCUMENTS)
    b = write(tmp_path / "b", DOCUMENTS, vocab_size=70_000)
    c = write(tmp_path / "c", DOCUMENTS, tokenizer=MADE_BY)
    with pytest.raises(DataError, match="uint16.*int32"):
        merge_corpora([a, b], tmp_path / "new" / "out")
    with pytest.raises(DataError, match="different tokenizers"):
        merge_corpora([a, c], tmp_path / "new" / "out")
    with pytest.raises(DataError, match="missing.idx: cannot read"):
        merge_corpora([a, tmp_path / "missing"], tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_corpus_that_changed_since_it_was_made_is_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", DOCUMENTS), write(tmp_path / "b", [[1] * 100_000])
    raw = bytearray(Path(f"{b}.bin").read_bytes())
    raw[5000] ^= 1  # between the places that opening looks at
    Path(f"{b}.bin").write_bytes(raw)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError, match="b.bin: crc32: expected .* found .* make this corpus again"):
        merge_corpora([a, b], tmp_path / "out")
    with pytest.raises(DataError, match="b.bin: crc32: expected .* found .* preprocess the text again"):
        verify_corpus(str(b))
    assert sorted(os.listdir(tmp_path)) == before


# ---- samples -------------------------------------------------------------------------------------------------------

def corpus_of(prefix: Path, sizes: list[int], first: int = 0) -> IndexedCorpus:
    """Documents of these sizes; the tokens count upwards, so each shows its place."""
    with CorpusWriter(prefix, vocab_size=1 << 20) as writer:
        for size in sizes:
            writer.add_documents(np.arange(first, first + size), [size])
            first += size
    return IndexedCorpus(prefix)


SIZES = [5, 0, 17, 1, 0, 8, 3, 29, 0, 2, 11]


def epoch_of(corpus: IndexedCorpus, documents: range, seq_length: int, seed: int, epoch: int, block: int
             ) -> tuple[list[int], list[list[int]]]:
    """(stream, samples) of an epoch, one token and one sample at a time."""
    def order(n: int, *key: int | str) -> list[int]:
        return [Permutation(n, seed, epoch, *key)[i] for i in range(n)]

    blocks = [documents[at:at + block] for at in range(0, len(documents), block)]
    stream = [token for k in order(len(blocks), "blocks") for i in order(len(blocks[k]), k)
              for token in corpus.document(blocks[k][i]).tolist()]
    samples = [stream[at:at + seq_length + 1] for at in range(0, len(stream) - seq_length, seq_length)]
    return stream, [samples[i] for i in order(len(samples), "samples")]


def test_samples_equal_those_of_a_stream_of_all_tokens(tmp_path, monkeypatch):
    """Over blocks that end within a sample, empty documents and blocks, and parts that begin within a block."""
    monkeypatch.setattr(gpt2_dataset, "BLOCK_DOCUMENTS", 4)
    draw, several = random.Random(1), 0
    for case in range(60):
        sizes = [draw.choice([0, 0, 1, 4, 5, draw.randint(0, 30)]) for _ in range(draw.randint(2, 40))]
        sizes += [9] + [0] * case
        corpus = corpus_of(tmp_path / "c", sizes)
        documents = range(draw.randint(0, len(sizes) - 1 - case), draw.randint(len(sizes) - case, len(sizes)))
        seq_length, seed = draw.randint(1, 8), draw.randint(0, 9)
        dataset, expected = GPT2Dataset(corpus, documents, seq_length, seed, "train"), []
        for epoch in range(3):
            stream, samples = epoch_of(corpus, documents, seq_length, seed, epoch, 4)
            assert sorted(stream) == list(range(sum(sizes[:documents.start]), sum(sizes[:documents.stop])))
            assert len(samples) == dataset.samples_per_epoch == (len(stream) - 1) // seq_length
            expected += samples
        for index in draw.sample(range(len(expected)), len(expected)):  # whatever was read before
            assert dataset[index].dtype == np.int64 and dataset[index].tolist() == expected[index]
        several += len(documents) > 8
    assert several > 30


def test_the_order_of_samples_never_changes(tmp_path: Path) -> None:
    """A resumed run must see the order it left: these numbers may not depend on the version of numpy or of ours."""
    dataset = GPT2Dataset(corpus_of(tmp_path / "c", [9, 0, 1] * 3000), range(5, 8999), 4, 1234, "train")
    assert [int(dataset[index][0]) for index in (0, 1, 2, 7000, 7493, 7494)] == [28515, 29358, 13211, 7100, 932, 26125]


def test_memory_holds_few_blocks_and_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt2_dataset, "BLOCK_DOCUMENTS", 1)
    monkeypatch.setattr(gpt2_dataset, "MAX_CACHED_BLOCKS", 3)
    dataset = GPT2Dataset(corpus_of(tmp_path / "c", SIZES), range(11), 4, 1, "a")
    for i in range(20 * dataset.samples_per_epoch):
        dataset[i]
    assert (dataset._block_order.cache_info().currsize, dataset._document_order.cache_info().currsize) == (2, 3)


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
    for n in (1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000, 5000):
        order = Permutation(n, 7, "x").to_array()
        assert sorted(order.tolist()) == list(range(n))
        assert [Permutation(n, 7, "x")[i] for i in range(n)] == order.tolist()
    assert len({tuple(Permutation(50, *key).to_array()) for key in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, "1"))}) == 4
    assert Permutation(8, 1234, 0, "samples").to_array().tolist() == [0, 5, 3, 6, 7, 2, 4, 1]
    assert [Permutation(10**13, 1)[i] for i in (0, 1, 10**13 - 1)] == [6826628699704, 9575915866253, 8726406704891]


def is_even(counts: Any, expected: float, freedom: int) -> bool:
    """Whether counts differ from what is expected as much as chance has it (chi-squared, 5 standard deviations)."""
    chi = float(((np.array(counts) - expected) ** 2 / expected).sum())
    return abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


def test_permutations_look_random() -> None:
    """Every order of a few elements is as frequent; in longer ones every place of an element, and every distance of
    neighbours."""
    for n in (3, 4):
        found = Counter(tuple(Permutation(n, 7, key).to_array().tolist()) for key in range(100 * factorial(n)))
        assert len(found) == factorial(n) and is_even(list(found.values()), 100, factorial(n) - 1)
    n, orders = 64, np.array([Permutation(64, 9, key).to_array() for key in range(2000)], np.int64)
    for column in orders.T:
        assert is_even(np.bincount(column, minlength=n), len(orders) / n, n - 1)
    distances = np.bincount(np.diff(orders, axis=1).ravel() % n, minlength=n)
    assert distances[0] == 0 and is_even(distances[1:], len(orders), n - 2)


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
