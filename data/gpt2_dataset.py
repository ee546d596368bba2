"""Fixed-length samples for training: any index, the same sample for ever.

A *dataset* maps every index from 0 without end to seq_length + 1 token ids (inputs and targets overlap by all but
one). Index i is sample i mod n of epoch i div n, n the samples of one epoch; it does not depend on how many samples
will be asked for, on ranks or on what was read before. So the number of consumed samples is all that a resumed run
must know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data.indexed import IndexedCorpus
from data.sample_index import EpochCache, content_digest, count_samples
from data.sampling import Blend, index_dtype
from data.storage import DataError, prefix_data_errors

Sample = NDArray[np.int64]


class Dataset(ABC):
    """What a trainer reads. Equal fingerprints mean equal samples at every index."""

    name: str
    seq_length: int
    fingerprint: str

    @property
    @abstractmethod
    def distinct_samples(self) -> int | None:
        """So many samples from index 0 on show no text twice; None where there is no such limit."""

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """seq_length + 1 token ids of sample `index`, 0 or more."""


@final
class GPT2Dataset(Dataset):
    """Samples of some documents of one corpus, joined across documents."""

    def __init__(self, corpus: IndexedCorpus, documents: Sequence[int] | ArrayLike, seq_length: int, seed: int,
                 name: str, cache_path: str | None = None, vocab_size: int | None = None, flag: str = "") -> None:
        """`flag`: where the name of the corpus is from, for errors."""
        self.name, self.seq_length, self._flag = name, seq_length, flag
        self._corpus, self._vocab_size = corpus, vocab_size
        chosen = np.arange(documents.start, documents.stop, documents.step) if isinstance(documents, range) \
            else np.asarray(documents)
        chosen = chosen.astype(index_dtype(corpus.num_documents))
        tokens = int(corpus.sizes[chosen].sum(dtype=np.int64))
        self.samples_per_epoch = count_samples(tokens, seq_length)
        if not self.samples_per_epoch:
            raise DataError(f"{corpus.prefix}: {name}: {len(chosen)} documents with {tokens} tokens, one sample needs "
                            f"{seq_length + 1}; give more text, another --split or a shorter --seq-length")
        if vocab_size is not None:
            corpus.check_vocabulary(vocab_size)
        self._epochs = EpochCache(corpus.sizes, chosen, seq_length, seed, self.samples_per_epoch, cache_path)
        self.fingerprint = content_digest(
            [corpus.fingerprint.encode(),
             chosen.tobytes(), repr((seq_length, seed)).encode()])

    @property
    def distinct_samples(self) -> int:
        return self.samples_per_epoch

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}: expected 0 or more")
        with prefix_data_errors(self._flag):
            return self._sample(index)

    def _sample(self, index: int) -> Sample:
        number, phase = divmod(int(index), self.samples_per_epoch)
        epoch = self._epochs[number]
        position, offset = map(int, epoch.starts[phase])
        sample = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        while filled < len(sample):
            ids = self._corpus.read(int(epoch.documents[position]), offset, offset + len(sample) - filled)
            sample[filled:filled + len(ids)] = ids
            filled += len(ids)
            position, offset = position + 1, 0
        # As unsigned numbers the negative ids are large too: one comparison finds both.
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

    @property
    def distinct_samples(self) -> int | None:
        # The first part to run out ends it; its share of the blend says when.
        limits = [part.distinct_samples * self._blend.period // int(count)
                  for part, count in zip(self._datasets, self._blend.counts) if part.distinct_samples is not None]
        return min(limits, default=None)

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}: expected 0 or more")
        dataset, within = self._blend.locate(index)
        return self._datasets[int(dataset)][int(within)]


@final
class MockDataset(Dataset):
    """Uniformly random ids: for measuring and for tests, nothing can be learnt from it."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, name: str = "mock") -> None:
        self.name, self.seq_length = name, seq_length
        self._vocab_size, self._seed = vocab_size, seed
        self.fingerprint = content_digest([repr(("mock", vocab_size, seq_length, seed)).encode()])

    @property
    def distinct_samples(self) -> None:
        return None

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}: expected 0 or more")
        bits = np.random.Philox(key=np.array([self._seed, index], np.uint64)).random_raw(self.seq_length + 1)
        return (bits % np.uint64(self._vocab_size)).astype(np.int64)
