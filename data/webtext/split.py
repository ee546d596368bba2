"""`shuffle` and `split`: a seeded random order of all documents, and training, validation and test parts.

Shuffle: each document has a key, a bijection of its number; lines are scattered over buckets of keys that fit in
memory. Shard k of n holds the k-th n-th of all keys. Split: a document's part depends on its text and the seed, so
copies stay together.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from fractions import Fraction
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import IO

import numpy as np

from data.parallel import ordered_map
from data.sampling import PARTS, parse_split
from data.storage import make_folder, staged_file, write_errors_for
from data.webtext.documents import DocumentCounts, parse_shard_line, shard_name
from data.webtext.minhash import splitmix64

BUCKET_RECORD = struct.Struct("<QQ")  # before each line in a bucket: its key and its size


class LineBuckets:
    """Takes (bucket, key, line); returns the lines of a bucket in the order of their distinct keys. Each bucket has a
    file, opened only to append a buffer."""

    def __init__(self, folder: Path, buckets: int, memory: int) -> None:
        self._folder, self._bucket_bytes = folder, max(1, memory // buckets)
        self._buffered = [bytearray() for _ in range(buckets)]

    def add(self, bucket: int, key: int, line: bytes) -> None:
        buffer = self._buffered[bucket]
        buffer += BUCKET_RECORD.pack(key, len(line)) + line
        if len(buffer) >= self._bucket_bytes:
            with write_errors_for(self._folder), open(self._folder / str(bucket), "ab") as file:
                file.write(buffer)
            self._buffered[bucket] = bytearray()

    def lines(self, bucket: int) -> Iterator[bytes]:
        """The sorted lines of a bucket, which is loaded into memory."""
        raw: bytes | bytearray = self._buffered[bucket]
        with suppress(FileNotFoundError):
            raw = (self._folder / str(bucket)).read_bytes() + raw
        places, at = [], 0
        while at < len(raw):
            key, size = BUCKET_RECORD.unpack_from(raw, at)
            places.append((key, at + BUCKET_RECORD.size, size))
            at += BUCKET_RECORD.size + size
        for _, start, size in sorted(places):
            yield bytes(raw[start:start + size])


def run_shuffle(inputs: Sequence[Path], output: Path, workers: int, *, seed: int = 0, shards: int | None = None,
                memory: int = 1 << 30) -> Iterator[DocumentCounts]:
    """Write the shuffled shards, as many as the input has unless `shards` says how many. It only moves bytes, so it
    uses one process, whatever `workers` is."""
    shutil.rmtree(output / ".work", ignore_errors=True)  # left by a process that ended early
    work = make_folder(output / ".work")
    total = shards or max(1, len(inputs))
    size = sum(path.stat().st_size for path in inputs)
    buckets_per_shard = max(1, -(-4 * size // (memory * total)))  # a bucket uses a quarter of the memory
    buckets = LineBuckets(work, total * buckets_per_shard, memory // 2)
    keys = shuffle_keys(seed)
    for path in inputs:
        with open(path, "rb") as lines:
            for line, key in zip(lines, keys):
                buckets.add(key * total * buckets_per_shard >> 64, key, line)
    for shard in range(total):
        counts = DocumentCounts()
        with staged_file(output / shard_name(shard)) as file:
            for bucket in range(shard * buckets_per_shard, (shard + 1) * buckets_per_shard):
                for line in buckets.lines(bucket):
                    file.write(line)
                    counts.add_kept(len(line), line)
        yield counts
    shutil.rmtree(work)


def shuffle_keys(seed: int) -> Iterator[int]:
    """The distinct keys of documents 0, 1, 2, ..."""
    start = splitmix64(np.array([seed % (1 << 64)], np.uint64))
    for first in count(0, 4096):
        yield from splitmix64(np.arange(first, first + 4096, dtype=np.uint64) ^ start).tolist()


def run_split(inputs: Sequence[Path], output: Path, workers: int, *, shares: str = "949,50,1",
              seed: int = 0) -> Iterator[DocumentCounts]:
    """Write the parts of each shard. A part without documents has no file."""
    for part in PARTS:
        make_folder(output / part)
    split_one = partial(split_shard, output=output, bounds=list(accumulate(parse_split(shares))), seed=seed)
    yield from ordered_map(split_one, [(path, shard_name(number)) for number, path in enumerate(inputs)], workers)


def split_shard(task: tuple[Path, str], output: Path, bounds: Sequence[Fraction], seed: int) -> DocumentCounts:
    """Split a shard, given as (path, output name): a part begins where the one before it ends in `bounds`."""
    path, name = task
    counts = DocumentCounts()
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for line in stack.enter_context(open(path, "rb")):
            text = parse_shard_line(line, str(path)).text
            digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
            point = Fraction(int.from_bytes(digest, "big"), 1 << 64)
            part = PARTS[next(k for k, bound in enumerate(bounds) if point < bound)]
            if part not in files:
                files[part] = stack.enter_context(staged_file(output / part / name))
            files[part].write(line)
            counts.add_kept(len(line), line)
    return counts
