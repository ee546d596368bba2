"""Fixed-length training samples: `GPT2Dataset`, `BlendedDataset`, and the shuffled index of each epoch.

A dataset maps every index >= 0 to seq_length + 1 token ids. Index i is sample i mod n of epoch i div n. An epoch
shuffles documents, concatenates them, cuts samples, and shuffles those: a pure function of (sizes, documents,
seq_length, seed, epoch). So the number of consumed samples is the whole state of a resumed run.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data.compressed import read_errors_for
from data.indexed import IndexedCorpus, StableFile
from data.sampling import Blend, epoch_permutation, index_dtype
from data.storage import (DataError, content_digest, crc32, make_folder, prefix_data_errors, prefix_storage_errors,
                          staged_file, wait_for_lock)

BLOCK_DOCUMENTS = 1 << 20
MIN_STORED_SAMPLES = 1 << 16  # smaller epochs are not stored: computing them is faster than opening their files

# An epoch and its neighbour: ranks and prefetch threads cross an epoch's end at slightly different times.
MAX_CACHED_EPOCHS = 2

ROW_FILE_VERSION = 2
ROW_FILE_MAGIC = b"\x89rows\r\n\x1a"
# Magic, version, dtype, rows, columns (0: rows are scalars), CRC-32 of the content name, the shape and the rows.
ROW_FILE_HEADER = struct.Struct("<8sI4sQII")
REBUILD_HINT = "delete it, and it is built again"


def count_samples(tokens: int, seq_length: int) -> int:
    """Number of samples of seq_length + 1 tokens in a stream; neighbouring samples share one token."""
    return max(0, tokens - 1) // seq_length


def sample_starts(sizes: NDArray[np.integer], order: NDArray[np.integer], seq_length: int) -> NDArray[np.integer]:
    """[samples, 2]: position in `order` and offset in that document of each sample's first token. Works in blocks, so
    memory stays small for any corpus."""
    blocks = range(0, len(order), BLOCK_DOCUMENTS)
    total = sum(int(sizes[order[at:at + BLOCK_DOCUMENTS]].sum(dtype=np.int64)) for at in blocks)
    samples = count_samples(total, seq_length)
    starts = np.empty((samples, 2), index_dtype(max(len(order), int(sizes.max()))))
    before, done = 0, 0  # tokens in earlier blocks; samples that begin in them
    for at in blocks:
        lengths = sizes[order[at:at + BLOCK_DOCUMENTS]].astype(np.int64)
        ends = before + np.cumsum(lengths)
        stop = min(samples, -(-int(ends[-1]) // seq_length))
        tokens = np.arange(done, stop) * seq_length
        # "right" skips zero-length documents, and one that ends exactly here.
        where = np.searchsorted(ends, tokens, side="right")
        starts[done:stop, 0] = at + where
        starts[done:stop, 1] = tokens - (ends[where] - lengths[where])
        before, done = int(ends[-1]), stop
    return starts


def write_row_file(path: str | os.PathLike[str], name: str, values: NDArray[np.integer]) -> None:
    """Write [rows] or [rows, columns] atomically. `name` identifies the content."""
    rows = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    kind, columns = rows.dtype.str.encode(), rows.shape[1] if rows.ndim > 1 else 0
    content = rows.reshape(-1).view(np.uint8).data
    # The checksum starts with name and shape: others do not fit the same rows.
    crc = crc32(content, crc32(repr((name, kind, len(rows), columns)).encode()))
    with staged_file(path) as file:
        file.write(ROW_FILE_HEADER.pack(ROW_FILE_MAGIC, ROW_FILE_VERSION, kind, len(rows), columns, crc))
        file.write(content)


@final
class RowFile:
    """Reads what `write_row_file` wrote under the same name. Opening it reads all rows once and checks their checksum;
    raises DataError."""

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self._path, self._name = os.fspath(path), name
        with read_errors_for(self._path):
            self._file = StableFile(self._path, REBUILD_HINT)
        header = self._file.read(0, min(ROW_FILE_HEADER.size, self._file.size), "u1").tobytes()
        magic, version, padded_kind, rows, columns, expected = ROW_FILE_HEADER.unpack(
            header.ljust(ROW_FILE_HEADER.size, b"\0"))
        kind = padded_kind.rstrip(b"\0")
        found = self._file.checksum(crc32(repr((name, kind, rows, columns)).encode()), ROW_FILE_HEADER.size)
        if (magic, version) != (ROW_FILE_MAGIC, ROW_FILE_VERSION) or found != expected:
            raise DataError(f"{self._path}: damaged, or made from something else: has the checksum {found:08x}, "
                            f"expected {expected:08x}; {REBUILD_HINT}")
        self.shape: tuple[int, ...] = (rows, columns) if columns else (rows,)
        self._dtype = np.dtype(kind.decode())

    def __reduce__(self) -> tuple[type[RowFile], tuple[str, str]]:
        return RowFile, (self._path, self._name)  # another process opens the file itself

    def __getitem__(self, row: int) -> Any:
        """A scalar, or [columns]."""
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row}: expected 0 to {self.shape[0] - 1}")
        columns = self.shape[1] if len(self.shape) > 1 else 1
        offset = ROW_FILE_HEADER.size + row * columns * self._dtype.itemsize
        values = self._file.read(offset, columns, self._dtype)
        return values if len(self.shape) > 1 else values[0]


# Of one epoch: document numbers in shuffled order; and [samples, 2], in sample order: position of the first document in
# that array, and offset of the first token in it.
EpochIndex = tuple[NDArray[np.integer] | RowFile, NDArray[np.integer] | RowFile]


class EpochCache:
    """Epochs by number. Holds the last two in memory, and stores all as files if a folder is given.
    Files are named by everything they depend on and appear by rename; damaged or foreign ones are refused
    (`RowFile`). One of the processes that share the folder builds an epoch; the others wait and read its files."""

    def __init__(self, sizes: NDArray[np.integer], documents: NDArray[np.integer], seq_length: int, seed: int,
                 samples: int, folder: str | None = None) -> None:
        self._sizes, self._documents, self._seq_length, self._seed = sizes, documents, seq_length, seed
        self._folder = make_folder(folder) if folder is not None and samples >= MIN_STORED_SAMPLES else None
        self._cached: OrderedDict[int, EpochIndex] = OrderedDict()

    def __getitem__(self, epoch: int) -> EpochIndex:
        index = self._cached.get(epoch)
        if index is None:
            while len(self._cached) >= MAX_CACHED_EPOCHS:  # before the new one is built
                self._cached.popitem(last=False)
            index = self._build(epoch) if self._folder is None else self._load_or_build(epoch, self._folder)
            self._cached[epoch] = index
        self._cached.move_to_end(epoch)
        return index

    @cached_property
    def _content_name(self) -> str:
        """Digest of everything that all epochs depend on."""
        return content_digest([self._sizes.tobytes(), self._documents.tobytes(),
                               repr((self._seq_length, self._seed, ROW_FILE_VERSION)).encode()])

    def _build(self, epoch: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Shuffle documents, cut samples, shuffle samples."""
        order = self._documents[epoch_permutation(len(self._documents), self._seed, epoch, stream=0)]
        starts = sample_starts(self._sizes, order, self._seq_length)
        return order, starts[epoch_permutation(len(starts), self._seed, epoch, stream=1)]

    def _load_or_build(self, epoch: int, folder: Path) -> EpochIndex:
        names = [f"{self._content_name}-{epoch}-{what}" for what in ("documents", "starts")]
        paths = [folder / f"{name}.rows" for name in names]
        if not all(path.exists() for path in paths):
            with prefix_storage_errors("--data-cache-path"), wait_for_lock(folder / f".{self._content_name}.lock"):
                if not all(path.exists() for path in paths):
                    for path, name, values in zip(paths, names, self._build(epoch)):
                        write_row_file(path, name, values)
        documents, starts = map(RowFile, paths, names)
        return documents, starts


Sample = NDArray[np.int64]


class Dataset(ABC):
    """What the trainer reads. Equal fingerprints mean equal samples at every index."""

    name: str
    seq_length: int
    fingerprint: str
    distinct_samples: int | None  # number of samples from index 0 on before text repeats; None if unlimited

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """seq_length + 1 token ids of sample `index` >= 0."""


@final
class GPT2Dataset(Dataset):
    """Samples from a range of documents of one corpus, concatenated across documents."""

    def __init__(self, corpus: IndexedCorpus, documents: Sequence[int] | ArrayLike, seq_length: int, seed: int,
                 name: str, cache_path: str | None = None, vocab_size: int | None = None, flag: str = "") -> None:
        """`flag` is the flag that named the corpus, for errors."""
        self.name, self.seq_length, self._flag = name, seq_length, flag
        self._corpus, self._vocab_size = corpus, vocab_size
        chosen = np.arange(documents.start, documents.stop, documents.step) if isinstance(documents, range) \
            else np.asarray(documents)
        chosen = chosen.astype(index_dtype(corpus.num_documents))
        tokens = int(corpus.sizes[chosen].sum(dtype=np.int64))
        self.samples_per_epoch = self.distinct_samples = count_samples(tokens, seq_length)
        if not self.samples_per_epoch:
            raise DataError(f"{corpus.prefix}: {name}: {len(chosen)} documents with {tokens} tokens, one sample needs "
                            f"{seq_length + 1}; give more text, another --split or a shorter --seq-length")
        self._epochs = EpochCache(corpus.sizes, chosen, seq_length, seed, self.samples_per_epoch, cache_path)
        self.fingerprint = content_digest([corpus.fingerprint.encode(), chosen.tobytes(),
                                           repr((seq_length, seed)).encode()])

    def __getitem__(self, index: int) -> Sample:
        number, phase = divmod(int(index), self.samples_per_epoch)
        with prefix_data_errors(self._flag):
            documents, starts = self._epochs[number]
            position, offset = map(int, starts[phase])
            sample = np.empty(self.seq_length + 1, np.int64)
            filled = 0
            while filled < len(sample):
                ids = self._corpus.document(int(documents[position]), offset, offset + len(sample) - filled)
                sample[filled:filled + len(ids)] = ids
                filled += len(ids)
                position, offset = position + 1, 0
            # Viewed as unsigned, negative ids are large too: one comparison finds both.
            if self._vocab_size is not None and sample.view(np.uint64).max() >= self._vocab_size:
                self._corpus.raise_for_invalid_token(self._vocab_size)
        return sample


@final
class BlendedDataset(Dataset):
    """Several datasets in fixed proportions, which hold within one sample after any number of samples."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[Fraction | int], name: str) -> None:
        self.name, self.seq_length = name, datasets[0].seq_length
        assert len(datasets) == len(weights) and all(part.seq_length == self.seq_length for part in datasets)
        self._datasets = tuple(datasets)
        self._blend = Blend(weights)
        self.fingerprint = content_digest(
            [self._blend.counts.tobytes(), *(part.fingerprint.encode() for part in datasets)])
        # The dataset that runs out first limits the blend.
        self.distinct_samples = min((part.distinct_samples * self._blend.period // int(count)
                                     for part, count in zip(datasets, self._blend.counts)
                                     if part.distinct_samples is not None), default=None)

    def __getitem__(self, index: int) -> Sample:
        dataset, within = self._blend.locate(index)
        return self._datasets[int(dataset)][int(within)]


@final
class MockDataset(Dataset):
    """Uniformly random ids, for benchmarks and tests; nothing can be learnt from it."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, name: str = "mock") -> None:
        self.name, self.seq_length, self.distinct_samples = name, seq_length, None
        self._vocab_size, self._seed = vocab_size, seed
        self.fingerprint = content_digest([repr(("mock", vocab_size, seq_length, seed)).encode()])

    def __getitem__(self, index: int) -> Sample:
        bits = np.random.Philox(key=np.array([self._seed, index], np.uint64)).random_raw(self.seq_length + 1)
        return (bits % np.uint64(self._vocab_size)).astype(np.int64)
