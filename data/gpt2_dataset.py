"""Fixed-length training samples: `GPT2Dataset` and `BlendedDataset`.

A dataset maps every index >= 0 to seq_length + 1 token ids. In one corpus index i is sample i mod n of epoch i div n;
in a blend each source has epochs of its own. An epoch shuffles blocks of consecutive documents, and the documents of
each block; the result is one stream of tokens, from which samples are cut, and those are shuffled: a pure function of
(corpus, documents, seq_length, seed, epoch). So the number of consumed samples is the whole state of a resumed run.
Memory and start depend on the number of blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import final

import numpy as np
from numpy.typing import NDArray

from data.indexed import IndexedCorpus
from data.sampling import Blend, IntArray, Permutation
from data.storage import DataError, content_digest, prefix_data_errors

# Part of the order of samples. A power of 4, so that no result of a block's permutation lies outside of the block.
BLOCK_DOCUMENTS = 1 << 12

# Orders of blocks in memory, 64 kB each. Building one takes 0.2 ms, and a sample touches one or two of them.
MAX_CACHED_BLOCKS = 256

# An epoch and its neighbour: ranks and prefetch threads cross an epoch's end at slightly different times.
MAX_CACHED_EPOCHS = 2

ORDER_VERSION = 2


def count_samples(tokens: int, seq_length: int) -> int:
    """Number of samples of seq_length + 1 tokens in a stream; neighbouring samples share one token."""
    return max(0, tokens - 1) // seq_length


def shuffle_blocks(bounds: IntArray, seed: int, epoch: int) -> tuple[IntArray, IntArray]:
    """(number of each block, its end in the epoch's stream), in the order of the stream."""
    order = Permutation(len(bounds) - 1, seed, epoch, "blocks").to_array()
    return order, np.cumsum(np.diff(bounds)[order])


def shuffle_documents(corpus: IndexedCorpus, documents: range, seed: int, epoch: int, block: int
                      ) -> tuple[IntArray, IntArray]:
    """(end of each document of a block in the corpus, its end in the block), in the order of the stream."""
    chosen = documents[block * BLOCK_DOCUMENTS:(block + 1) * BLOCK_DOCUMENTS]
    bounds = corpus.first_tokens(chosen.start, chosen.stop)
    order = Permutation(len(chosen), seed, epoch, block).to_array()
    return bounds[1:][order], np.cumsum(np.diff(bounds)[order])


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

    def __init__(self, corpus: IndexedCorpus, documents: range, seq_length: int, seed: int, name: str,
                 vocab_size: int | None = None, flag: str = "") -> None:
        """`documents` are consecutive. `flag` is the flag that named the corpus, for errors."""
        self.name, self.seq_length, self._flag = name, seq_length, flag
        self._corpus, self._seed, self._vocab_size = corpus, seed, vocab_size
        # The first token of each block, and the end.
        bounds = np.array([*map(corpus.first_token, (*documents[::BLOCK_DOCUMENTS], documents.stop))], np.int64)
        tokens = int(bounds[-1] - bounds[0])
        self.samples_per_epoch = self.distinct_samples = count_samples(tokens, seq_length)
        if not self.samples_per_epoch:
            raise DataError(f"{corpus.prefix}: {name}: {len(documents)} documents with {tokens} tokens, one sample "
                            f"needs {seq_length + 1}; give more text, another --split or a shorter --seq-length")
        self._block_order = lru_cache(MAX_CACHED_EPOCHS)(partial(shuffle_blocks, bounds, seed))
        self._document_order = lru_cache(MAX_CACHED_BLOCKS)(partial(shuffle_documents, corpus, documents, seed))
        self.fingerprint = content_digest([corpus.fingerprint.encode(), repr(
            (documents.start, documents.stop, seq_length, seed, ORDER_VERSION)).encode()])

    def _segments(self, epoch: int, token: int) -> Iterator[tuple[int, int]]:
        """(first token, end) in the corpus of what an epoch's stream holds from `token` on, by document."""
        blocks, block_ends = self._block_order(epoch)
        for place in range(int(block_ends.searchsorted(token)), len(blocks)):
            stops, ends = self._document_order(epoch, int(blocks[place]))
            token -= int(block_ends[place] - ends[-1])  # within the block
            for number in range(int(ends.searchsorted(token)), len(ends)):
                stop, end = int(stops[number]), int(ends[number])
                yield stop - (end - token), stop
                token = end
            token = int(block_ends[place])

    def __getitem__(self, index: int) -> Sample:
        epoch, place = divmod(int(index), self.samples_per_epoch)
        order = Permutation(self.samples_per_epoch, self._seed, epoch, "samples")
        with prefix_data_errors(self._flag):
            sample = np.empty(self.seq_length + 1, np.int64)
            filled = 0
            for first, stop in self._segments(epoch, order[place] * self.seq_length):
                ids = self._corpus.read_tokens(first, min(stop, first + len(sample) - filled))
                sample[filled:filled + len(ids)] = ids
                filled += len(ids)
                if filled == len(sample):
                    break
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
