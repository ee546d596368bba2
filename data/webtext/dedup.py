"""Every text once: exact copies, then near copies; of several, the first in the order of the corpus is kept.

*Exact*: the same text but for white space. *Near*: see `near`. A text shorter than a shingle can only be an exact copy.
What is kept depends on the documents and their order alone, not on workers, memory or shards.

Memory holds one bit per document, and about `memory` bytes for everything else. Output: `part-00000.jsonl` for each
input shard in order, the lines that are kept, unchanged; `dropped.jsonl`, of each other one which it is (shard and line
of the input), why, and what was kept in its place.
"""

from __future__ import annotations

import heapq
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from data.parallel import ordered_map
from data.storage import make_folder, staged_file
from data.webtext.counts import DocumentCounts
from data.webtext.external import Rows, RowSorter, iterate_rows, pairs_with_equal_keys
from data.webtext.minhash import Banding
from data.webtext.near import SIMILARITY_SCALE, BitSet, drop_near_duplicates
from data.webtext.shards import machine_share, read_shard_lines, shard_name
from data.webtext.signatures import DIGEST_COLUMNS, SignatureFiles, write_signatures

REASONS = ("exact copy", "near copy")
EXACT, NEAR = 0, 1

ReportCounts = Callable[[DocumentCounts], None]


@dataclass(frozen=True)
class DedupOptions:
    threshold: float = 0.8
    near: bool = True
    memory: int = 1 << 30


def run_dedup(inputs: Sequence[Path], output: Path, options: DedupOptions, workers: int, report: ReportCounts) -> None:
    """Write what is kept of each input shard. Signatures that are there already are used."""
    work, banding, memory = make_folder(output / ".work"), Banding.for_threshold(options.threshold), options.memory // 4
    write_signatures(inputs, range(len(inputs)), work, banding, workers)
    signatures = SignatureFiles.open(inputs, work, banding)
    dropped = BitSet(signatures.documents)
    copies = _drop_exact_duplicates(signatures, dropped, work, memory)
    near = RowSorter(work, 3, memory)
    if options.near:
        near = drop_near_duplicates(inputs, signatures, dropped, options.threshold, work, 2 * memory, workers)
    drops = RowSorter(work, 4, memory)
    drops.add_each(_drops_with_reasons(iterate_rows(copies.sorted()), iterate_rows(near.sorted())))
    _write_kept(inputs, output, signatures, drops.sorted(), workers, report)
    shutil.rmtree(work)


def write_signature_share(inputs: Sequence[Path], output: Path, options: DedupOptions, workers: int, index: int,
                          count: int) -> None:
    """The part of `run` that takes the time, for the index-th of `count` machines; `run` then does the rest."""
    write_signatures(inputs, machine_share(len(inputs), index, count), output / ".work",
                     Banding.for_threshold(options.threshold), workers)


def _drop_exact_duplicates(signatures: SignatureFiles, dropped: BitSet, work: Path, memory: int) -> RowSorter:
    """Flags them too. Rows (first document, copy of it)."""
    digests, copies = RowSorter(work, 3, memory), RowSorter(work, 2, memory)
    for _, first, rows in signatures.blocks(memory // 4):
        digests.add(np.column_stack([rows[:, DIGEST_COLUMNS], np.arange(first, first + len(rows), dtype=np.uint64)]))
    for pairs in pairs_with_equal_keys(digests.sorted(), max_earlier=1):
        dropped.add(pairs[:, 0].astype(np.int64))
        copies.add(pairs[:, ::-1])
    return copies


def _drops_with_reasons(copies: Iterable[list[int]], near: Iterable[list[int]]) -> Iterator[tuple[int, int, int, int]]:
    """(dropped document, reason, the kept one, similarity in millionths) of each.

    The first of some exact copies may be a near copy of something earlier; then that was kept in place of all of them.
    """
    events = heapq.merge(((later, NEAR, kept, alike) for later, kept, alike in near),
                         ((first, NEAR + 1, copy, SIMILARITY_SCALE) for first, copy in copies))
    instead: tuple[int, int, int] | None = None
    for document, kind, other, alike in events:
        if kind == NEAR:
            instead = document, other, alike
            yield document, NEAR, other, alike
        elif instead and instead[0] == document:
            yield other, EXACT, instead[1], instead[2]
        else:
            yield other, EXACT, document, alike


def _write_kept(inputs: Sequence[Path], output: Path, signatures: SignatureFiles, drops: Iterable[Rows], workers: int,
                report: ReportCounts) -> None:
    with staged_file(output / "dropped.jsonl") as log:
        for counts in ordered_map(_copy_kept_lines,
                                  _shards_and_drops(inputs, output, signatures, iterate_rows(drops), log), workers):
            report(counts)


def _shards_and_drops(inputs: Sequence[Path], output: Path, signatures: SignatureFiles, drops: Iterator[list[int]],
                      log: IO[bytes]) -> Iterator[tuple[Path, Path, dict[int, int]]]:
    """(input, output, line -> why it is dropped) of each shard; what is dropped is logged on the way."""
    def line_of(document: int) -> dict[str, object]:
        shard = int(np.searchsorted(signatures.first_documents, document, "right")) - 1
        return {"shard": shard_name(shard), "line": document - int(signatures.first_documents[shard]) + 1}

    drop = next(drops, None)
    for number, (path, first,
                 stop) in enumerate(zip(inputs, signatures.first_documents[:-1], signatures.first_documents[1:])):
        reasons = {}
        while drop is not None and drop[0] < stop:
            document, reason, kept, alike = drop
            log.write(
                json.dumps({
                    **line_of(document), "reason": REASONS[reason], "similarity": alike /
                    SIMILARITY_SCALE, "kept": line_of(kept)
                }).encode() + b"\n")
            reasons[document - int(first)] = reason
            drop = next(drops, None)
        yield path, output / shard_name(number), reasons


def _copy_kept_lines(task: tuple[Path, Path, dict[int, int]]) -> DocumentCounts:
    """Write the lines of a shard that are kept."""
    path, target, reasons = task
    counts = DocumentCounts()
    with staged_file(target) as file:
        for number, line in enumerate(read_shard_lines(path)):
            if number in reasons:
                counts.add_dropped(REASONS[reasons[number]], len(line))
            else:
                counts.add_kept(len(line), len(line))
                file.write(line)
    return counts
