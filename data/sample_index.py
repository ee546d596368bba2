"""The order of one epoch: which document and which token every sample begins with.

The documents of an epoch are shuffled and joined; sample s holds tokens s*L to s*L + L of the joined stream (L the
sequence length), so neighbours share one token: the last target of one is the first input of the next. Tokens at the
end that fill no sample are dropped. The samples are then shuffled in turn. All arrays are a pure function of
(sizes, documents, L, seed, epoch); nothing depends on how long the training will be.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.pages import REBUILD_HINT, RowFile, write_row_file
from data.sampling import epoch_permutation, index_dtype
from data.storage import DataError, make_folder, prefix_storage_errors, wait_for_lock

BLOCK_DOCUMENTS = 1 << 20
MIN_STORED_SAMPLES = 1 << 16
"""Smaller epochs are computed faster than their files are opened; they are not stored."""

MAX_CACHED_EPOCHS = 2
"""An epoch and its neighbour: ranks and prefetching readers cross the border a little apart."""

SAMPLES_BEFORE_EVICTION = 4096
"""Samples of one epoch after which its neighbour has been left behind, and goes."""


def count_samples(tokens: int, seq_length: int) -> int:
    """How many samples of seq_length + 1 tokens a stream holds, neighbours sharing one token."""
    return max(0, tokens - 1) // seq_length


def sample_starts(sizes: NDArray[np.integer], order: NDArray[np.integer], seq_length: int) -> NDArray[np.integer]:
    """[samples, 2]: position in `order` and offset in that document of the first token of each sample.

    Block by block, so the working memory stays small for any corpus.
    """
    total = int(
        sum(sizes[order[at:at + BLOCK_DOCUMENTS]].sum(dtype=np.int64) for at in range(0, len(order), BLOCK_DOCUMENTS)))
    samples = count_samples(total, seq_length)
    starts = np.empty((samples, 2), index_dtype(max(len(order), int(sizes.max()))))
    before, done = 0, 0  # tokens in the blocks before this one; samples that begin in them
    for at in range(0, len(order), BLOCK_DOCUMENTS):
        lengths = sizes[order[at:at + BLOCK_DOCUMENTS]].astype(np.int64)
        ends = before + np.cumsum(lengths)
        stop = min(samples, -(-int(ends[-1]) // seq_length))
        tokens = np.arange(done, stop) * seq_length
        # "right" steps over zero-length documents and over one that ends exactly here.
        where = np.searchsorted(ends, tokens, side="right")
        starts[done:stop, 0] = at + where
        starts[done:stop, 1] = tokens - (ends[where] - lengths[where])
        before, done = int(ends[-1]), stop
    return starts


@dataclass(frozen=True)
class EpochIndex:
    """One epoch, ready to be served."""

    documents: NDArray[np.integer] | RowFile
    """Document numbers in the shuffled order."""
    starts: NDArray[np.integer] | RowFile
    """[samples, 2]: position in `documents` and offset of the first token, in the order of serving."""


def build_epoch(sizes: NDArray[np.integer], documents: NDArray[np.integer], seq_length: int,
                seed: int, epoch: int) -> EpochIndex:
    """Shuffle documents, cut samples, shuffle samples."""
    order = documents[epoch_permutation(len(documents), seed, epoch, stream=0)]
    starts = sample_starts(sizes, order, seq_length)
    return EpochIndex(order, starts[epoch_permutation(len(starts), seed, epoch, stream=1)])


class EpochCache:
    """Epochs by number: one in memory, two while the border is crossed, and all of them as files when there is a folder
    for it.

    Files are named after everything they depend on and appear by rename; what was damaged since then, or has come from
    elsewhere, is refused (`pages`). Of the processes that share the folder one builds an epoch, and the others wait for
    it and read its files.
    """

    def __init__(self, sizes: NDArray[np.integer], documents: NDArray[np.integer], seq_length: int, seed: int,
                 samples: int, folder: str | None = None) -> None:
        self._sizes, self._documents, self._seq_length, self._seed = sizes, documents, seq_length, seed
        self._samples = samples
        self._folder = make_folder(folder) if folder is not None and samples >= MIN_STORED_SAMPLES else None
        self._cached: OrderedDict[int, EpochIndex] = OrderedDict()
        self._last_epoch, self._reads_of_last_epoch = -1, 0

    def __getitem__(self, epoch: int) -> EpochIndex:
        index = self._cached.get(epoch)
        if index is None:
            while len(self._cached) >= MAX_CACHED_EPOCHS:  # before the new one comes
                self._cached.popitem(last=False)
            index = self._build(epoch) if self._folder is None else self._load_or_build(epoch, self._folder)
            self._cached[epoch] = index
        self._cached.move_to_end(epoch)
        self._reads_of_last_epoch = self._reads_of_last_epoch + 1 if epoch == self._last_epoch else 1
        self._last_epoch = epoch
        while len(self._cached) > 1 and self._reads_of_last_epoch >= SAMPLES_BEFORE_EVICTION:
            self._cached.popitem(last=False)
        return index

    @cached_property
    def _content_name(self) -> str:
        """Of what all epochs are made from."""
        return content_digest(
            [self._sizes.tobytes(),
             self._documents.tobytes(),
             repr((self._seq_length, self._seed)).encode()])

    def _build(self, epoch: int) -> EpochIndex:
        return build_epoch(self._sizes, self._documents, self._seq_length, self._seed, epoch)

    def _load_or_build(self, epoch: int, folder: Path) -> EpochIndex:
        names = [f"{self._content_name}-{epoch}-{what}" for what in ("documents", "starts")]
        paths = [folder / f"{name}.rows" for name in names]
        if not all(path.exists() for path in paths):
            with prefix_storage_errors("--data-cache-path"), wait_for_lock(folder / f".{self._content_name}.lock"):
                if not all(path.exists() for path in paths):
                    index = self._build(epoch)
                    for path, name, values in zip(paths, names, (index.documents, index.starts)):
                        assert isinstance(values, np.ndarray), "made just now"
                        write_row_file(path, name, values)
        found = EpochIndex(*map(RowFile, paths, names))
        shapes = (self._documents.shape, (self._samples, 2))
        for path, rows, shape in zip(paths, (found.documents, found.starts), shapes):
            if rows.shape != shape:
                raise DataError(f"{path}: expected an order of {shape} numbers, found {rows.shape}; {REBUILD_HINT}")
        return found


def content_digest(parts: Iterable[bytes]) -> str:
    """16 hexadecimal digits that name a sequence of byte strings."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()[:16]
