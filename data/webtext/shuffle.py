"""All documents in a random order that depends on the seed and on the order they came in, alone.

Every document has a *key*, a one-to-one map of its number; the order is that of the keys. Lines are scattered over
*buckets* (ranges of keys) that fit in memory, and each is sorted. Shard k of n holds the k-th n-th of all keys, so its
content depends neither on memory nor on which machine makes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import numpy as np

from data.storage import make_folder, staged_file
from data.webtext.counts import DocumentCounts
from data.webtext.external import LineBuckets
from data.webtext.shards import machine_share, read_shard_lines, shard_name, whole_file
from data.webtext.words import splitmix64

ReportShuffled = Callable[[DocumentCounts], None]


@dataclass(frozen=True)
class ShuffleOptions:
    seed: int = 0
    shards: int | None = None
    """How many to write; default: as many as there are."""
    memory: int = 1 << 30
    part: tuple[int, int] = (0, 1)
    """(i, n): write the i-th n-th of the shards."""


def run_shuffle(inputs: Sequence[Path], output: Path, options: ShuffleOptions, workers: int,
                report: ReportShuffled) -> None:
    """Write the shards. Moving bytes is all the work, so one process does it, whatever `workers` says."""
    work = make_folder(output / ".work")
    total = options.shards or max(1, len(inputs))
    own_shards = machine_share(total, *options.part)
    size = sum(whole_file(path).stop for path in inputs)
    buckets_per_shard = max(1, -(-4 * size //
                                 (options.memory * total)))  # buckets of a shard; a bucket takes a quarter of memory
    buckets = LineBuckets(work, max(1, len(own_shards) * buckets_per_shard), options.memory // 2)
    for key, line in zip(shuffle_keys(options.seed), chain.from_iterable(map(read_shard_lines, inputs))):
        bucket = (key * total * buckets_per_shard >> 64) - own_shards.start * buckets_per_shard
        if 0 <= bucket < len(own_shards) * buckets_per_shard:
            buckets.add(bucket, key, line)
    for number, shard in enumerate(own_shards):
        counts = DocumentCounts()
        with staged_file(output / shard_name(shard)) as file:
            for bucket in range(number * buckets_per_shard, (number + 1) * buckets_per_shard):
                for line in buckets.lines(bucket):
                    file.write(line)
                    counts.add_kept(len(line), len(line))
        report(counts)
    shutil.rmtree(work)


def shuffle_keys(seed: int) -> Iterator[int]:
    """The keys of documents 0, 1, 2, ...; all are distinct."""
    start = splitmix64(np.array([seed % (1 << 64)], np.uint64))
    for first in count(0, 4096):
        yield from splitmix64(np.arange(first, first + 4096, dtype=np.uint64) ^ start).tolist()
