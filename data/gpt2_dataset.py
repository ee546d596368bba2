"""Fixed-length training samples: `GPT2Dataset`, `BlendedDataset`, and the shuffled index of each epoch.

A dataset maps every index >= 0 to seq_length + 1 token ids. Index i is sample i mod n of epoch i div n. An epoch
shuffles documents, concatenates them, cuts samples, and shuffles those: a pure function of (sizes, documents,
seq_length, seed, epoch). So the number of consumed samples is the whole state of a resumed run.
"""

from __future__ import annotations

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
from data.indexed import IndexedCorpus
from data.sampling import Blend, epoch_permutation, index_dtype
from data.storage import (DataError, content_digest, crc32, make_folder, prefix_data_errors, prefix_storage_errors,
                          staged_file, wait_for_lock)

MIN_STORED_SAMPLES = 1 << 16  # smaller epochs are not stored: computing them is faster than opening their files

# An epoch and its neighbour: ranks and prefetch threads cross an epoch's end at slightly different times.
MAX_CACHED_EPOCHS = 2

ROW_FILE_VERSION = 3


def count_samples(tokens: int, seq_length: int) -> int:
    """Number of samples of seq_length + 1 tokens in a stream; neighbouring samples share one token."""
    return max(0, tokens - 1) // seq_length


def starts_dtype(sizes: NDArray[np.integer], order: NDArray[np.integer]) -> type[np.signedinteger[Any]]:
    """The dtype of `sample_starts`."""
    return index_dtype(max(len(order), int(sizes.max())))


def sample_starts(sizes: NDArray[np.integer], order: NDArray[np.integer], seq_length: int) -> NDArray[np.integer]:
    """[samples, 2]: position in `order` and offset in that document of each sample's first token."""
    lengths = sizes[order]
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(count_samples(int(ends[-1]), seq_length)) * seq_length
    # "right" skips zero-length documents, and one that ends exactly here.
    where = np.searchsorted(ends, tokens, side="right")
    return np.stack([where, tokens - (ends - lengths)[where]], axis=1, dtype=starts_dtype(sizes, order),
                    casting="same_kind")


def write_rows(path: Path, values: NDArray[np.integer]) -> None:
    """Write [rows] or [rows, columns] atomically, and a checksum."""
    with staged_file(path) as file:
        file.write(values.data)
        file.write(crc32(values.data).to_bytes(4, "little"))


def open_rows(path: Path, dtype: type[np.integer[Any]], shape: tuple[int, ...]) -> NDArray[np.integer]:
    """What `write_rows` wrote, memory-mapped, so that the ranks of a machine share it; raises DataError."""
    with read_errors_for(str(path)):
        raw = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    if crc32(raw[:-4].data).to_bytes(4, "little") != raw[-4:].tobytes():
        raise DataError(f"{path}: damaged: its checksum is another one; delete it, and it is built again")
    return raw[:-4].view(dtype).reshape(shape)


# Of one epoch: document numbers in shuffled order; and [samples, 2], in sample order: position of the first document in
# that array, and offset of the first token in it.
EpochIndex = tuple[NDArray[np.integer], NDArray[np.integer]]


class EpochCache:
    """Epochs by number. Holds the last two in memory, and stores all as files if a folder is given. Files are named by
    everything they depend on and appear by rename; damaged ones are refused. One of the processes that share the folder
    builds an epoch; the others wait and read its files."""

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
        paths = [folder / f"{self._content_name}-{epoch}-{what}.rows" for what in ("documents", "starts")]
        if not all(path.exists() for path in paths):
            with prefix_storage_errors("--data-cache-path"), wait_for_lock(folder / f".{self._content_name}.lock"):
                if not all(path.exists() for path in paths):
                    for path, values in zip(paths, self._build(epoch)):
                        write_rows(path, values)
        return (open_rows(paths[0], self._documents.dtype.type, (-1,)),
                open_rows(paths[1], starts_dtype(self._sizes, self._documents), (-1, 2)))


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
