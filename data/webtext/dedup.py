"""`dedup`: remove exact and near duplicates; `unique`: repeated addresses. The first document in corpus order stays.

*Exact*: equal text up to white space. *Near*: Jaccard similarity at or above the threshold to an earlier kept document;
candidates share a MinHash band and are compared by their texts, at most `MAX_PAIRS_PER_BAND` per document and band. The
result depends only on the documents and their order. Tasks over shards and over partitions exchange rows (exchange.py);
the driver holds one byte per document, its state. `dropped.jsonl` lists the documents that `dedup` dropped, the reason,
and the document kept instead.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.storage import make_folder, staged_file
from data.webtext.documents import DocumentCounts, copy_undropped_lines, parse_shard_line, shard_name
from data.webtext.engines import Engine
from data.webtext.exchange import (KEYS, LINE_BITS, LINE_MASK, Partition, Rows, iterate_rows, merge_runs,
                                   pairs_with_equal_keys, partitions, read_rows, runs_in, write_runs)
from data.webtext.filters import normalized_url
from data.webtext.minhash import (BAND_COLUMNS, DIGEST_COLUMNS, Banding, HashArray, SignatureFiles, jaccard_similarity,
                                  shingle_hashes, signature_file, write_signature_file)

MAX_PAIRS_PER_BAND = 32
SIMILARITY_SCALE = 1_000_000  # similarities in rows are in millionths
ROWS_PER_READ = 1 << 16

REASONS = ("exact copy", "near copy")
EXACT, NEAR = 0, 1
KEPT, DROPPED, UNKNOWN = 0, 1, 2  # states of a document


class DocumentStates:
    """The state of every document, one byte each. The driver changes them, tasks read the saved ones."""

    def __init__(self, first: NDArray[np.uint64], states: NDArray[np.uint8]) -> None:
        self._first, self._states = first, states  # [shards + 1]: number of the first document of each shard

    @classmethod
    def load(cls, folder: Path) -> DocumentStates:
        return cls(np.load(folder / "first.npy"), np.load(folder / "states.npy", mmap_mode="r"))

    def save(self, folder: Path) -> None:
        for name, values in (("first", self._first), ("states", self._states)):
            with staged_file(folder / f"{name}.npy") as file:
                np.save(file, values)

    def _numbers(self, documents: Any) -> Any:
        return self._first[documents >> LINE_BITS] + (documents & LINE_MASK)

    def of(self, documents: Any) -> Any:
        """The states of an array of documents, or of one."""
        return self._states[self._numbers(documents)]

    def mark(self, documents: Rows, state: int) -> None:
        self._states[self._numbers(documents)] = state

    def mark_column(self, folder: Path, column: int, state: int) -> None:
        """Mark the documents in one column of all pairs of an exchange."""
        for run in runs_in(folder):
            for first in range(0, run.stat().st_size // 16, ROWS_PER_READ):
                self.mark(read_rows(run, 2, first, ROWS_PER_READ)[:, column], state)

    def has_unknown(self) -> bool:
        return UNKNOWN in self._states


def run_dedup(inputs: Sequence[Path], output: Path, engine: Engine, *, threshold: float = 0.8, near: bool = True,
              memory: int = 1 << 30) -> Iterator[DocumentCounts]:
    """Write the kept documents of each input shard. Existing signature files are reused."""
    work, shards = make_folder(output / ".work"), range(len(inputs))
    of_keys, of_documents = (partitions(inputs, end) for end in (KEYS, len(inputs) << LINE_BITS))
    signatures = SignatureFiles(work, Banding.for_threshold(threshold))
    tasks = DedupTasks(inputs, output, signatures, threshold, memory // 4)
    first = np.cumsum([0, *engine.map(tasks.sign, shards)], dtype=np.uint64)
    states = DocumentStates(first, np.zeros(first[-1], np.uint8))
    list(engine.map(partial(find_copies, work=work, memory=memory // 4), of_keys))
    states.mark_column(work / "copies", 1, DROPPED)
    states.save(work)
    if near:
        list(engine.map(tasks.write_bands, shards))
        list(engine.map(tasks.find_candidates, of_keys))
        states.mark_column(work / "pairs", 0, UNKNOWN)  # all others stay: nothing earlier is like them
        turn = 0
        while states.has_unknown():
            # A turn decides at least the first partition with unknown documents: all earlier ones are decided.
            states.save(work)
            for dropped, kept in engine.map(partial(tasks.decide, turn=turn), of_documents):
                states.mark(dropped, DROPPED)
                states.mark(kept, KEPT)
            turn += 1
    list(engine.map(tasks.collect_drops, of_documents))
    make_folder(work / "log")
    yield from engine.map(tasks.write_shard, shards)
    with staged_file(output / "dropped.jsonl") as log:
        for shard in shards:
            with open(work / "log" / shard_name(shard), "rb") as part:
                shutil.copyfileobj(part, log)
    shutil.rmtree(work)


@dataclass(frozen=True)
class DedupTasks:
    """What a task does with a shard or a partition, in the order of `run_dedup`."""

    inputs: Sequence[Path]
    output: Path
    signatures: SignatureFiles
    threshold: float
    memory: int

    def write(self, exchange: str, task: str, blocks: Iterable[Rows]) -> None:
        write_runs(self.signatures.folder / exchange, task, blocks, self.memory)

    def merged(self, exchange: str, width: int, low: int, high: int) -> Iterator[Rows]:
        return merge_runs(self.signatures.folder / exchange, width, low, high, self.memory)

    def sign(self, shard: int) -> int:
        """Write the signatures and digests of a shard; returns its number of documents."""
        if not (file := signature_file(self.signatures.folder, shard)).exists():
            write_signature_file((self.inputs[shard], file), self.signatures.banding)
        self.write("keys", f"{shard:05d}", (np.column_stack([rows[:, DIGEST_COLUMNS], documents])
                                            for documents, rows in self.signatures.blocks(shard, self.memory)))
        return file.stat().st_size // self.signatures.row_bytes

    def write_bands(self, shard: int) -> None:
        def bands() -> Iterator[Rows]:
            states = DocumentStates.load(self.signatures.folder)
            for documents, rows in self.signatures.blocks(shard, self.memory // 8):
                of_band = rows[:, BAND_COLUMNS]
                # Of exact copies only the first has bands. Texts of fewer words than a shingle have none.
                used = (states.of(documents) == KEPT) & of_band.any(axis=1)
                yield np.column_stack([of_band[used].ravel(), np.repeat(documents[used], of_band.shape[1])])

        self.write("bands", f"{shard:05d}", bands())

    def find_candidates(self, partition: Partition) -> None:
        """Pairs (later document, earlier document) with an equal band, once per equal band."""
        number, low, high = partition
        pairs = pairs_with_equal_keys(self.merged("bands", 2, low, high), MAX_PAIRS_PER_BAND)
        self.write("pairs", f"{number:05d}", pairs)

    def decide(self, partition: Partition, turn: int) -> tuple[Rows, Rows]:
        """(documents to drop, documents to keep) of unknown ones. A document stays unknown if the first similar one is:
        whether that one is kept decides. Writes rows (document, kept document, similarity in millionths)."""
        number, low, high = partition
        states, found, near = DocumentStates.load(self.signatures.folder), dict[int, int](), array("Q")
        shingles = lru_cache(maxsize=8)(self._shingle_set)  # neighbouring pairs share documents
        for later, pairs in groupby(iterate_rows(self.merged("pairs", 2, low, high)), itemgetter(0)):
            if states.of(later) != UNKNOWN:
                continue
            found[later] = KEPT
            for earlier in dict.fromkeys(earlier for _, earlier in pairs):
                state = found.get(earlier, states.of(earlier))
                if state == DROPPED:
                    continue  # a dropped document drops no other
                similarity = jaccard_similarity(shingles(later), shingles(earlier))
                if similarity >= self.threshold:
                    # An undecided one is of another partition; the next turn knows more. A later similar one must
                    # not decide: the log names the first that was kept.
                    found[later] = UNKNOWN if state == UNKNOWN else DROPPED
                    if state == KEPT:
                        near.extend((later, earlier, round(similarity * SIMILARITY_SCALE)))
                    break
        self.write("near", f"{turn}-{number:05d}", [np.array(near, np.uint64).reshape(-1, 3)])
        dropped, kept = ([document for document in found if found[document] == state] for state in (DROPPED, KEPT))
        return np.array(dropped, np.uint64), np.array(kept, np.uint64)

    def _shingle_set(self, document: int) -> HashArray:
        shard, offset, size = self.signatures.location(document)
        with open(self.inputs[shard], "rb") as file:
            file.seek(offset)
            return np.unique(shingle_hashes(parse_shard_line(file.read(size), str(self.inputs[shard])).text))

    def collect_drops(self, partition: Partition) -> None:
        """Rows (dropped document, reason, kept document, similarity). If the first of several exact copies is itself a
        near copy, the document it resembles was kept in place of all of them."""
        number, low, high = partition

        def drops() -> Iterator[Rows]:
            near = np.concatenate([np.empty((0, 3), np.uint64), *self.merged("near", 3, low, high)])
            yield np.insert(near, 1, NEAR, axis=1)
            for firsts, copies in map(np.transpose, self.merged("copies", 2, low, high)):
                rows = np.empty((len(copies), 4), np.uint64)
                rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = copies, EXACT, firsts, SIMILARITY_SCALE
                is_near = np.isin(firsts, near[:, 0])  # near has one row per document, sorted
                rows[is_near, 2:] = near[np.searchsorted(near[:, 0], firsts[is_near]), 1:]
                yield rows

        self.write("drops", f"{number:05d}", drops())

    def write_shard(self, shard: int) -> DocumentCounts:
        def line_of(document: int) -> dict[str, object]:
            return {"shard": shard_name(document >> LINE_BITS), "line": (document & LINE_MASK) + 1}

        reasons = {}
        with staged_file(self.signatures.folder / "log" / shard_name(shard)) as log:
            for document, reason, kept, similarity in iterate_rows(
                    self.merged("drops", 4, shard << LINE_BITS, (shard + 1) << LINE_BITS)):
                reasons[document & LINE_MASK] = REASONS[reason]
                entry = {**line_of(document), "reason": REASONS[reason], "similarity": similarity / SIMILARITY_SCALE,
                         "kept": line_of(kept)}
                log.write(json.dumps(entry).encode() + b"\n")
        return copy_undropped_lines(self.inputs[shard], self.output / shard_name(shard), "dedup", reasons)


def find_copies(partition: Partition, work: Path, memory: int, by_copy: bool = False) -> None:
    """Rows (first document with a key, a later one), or the other way round."""
    number, low, high = partition
    pairs = pairs_with_equal_keys(merge_runs(work / "keys", 3, low, high, memory), max_earlier=1)
    write_runs(work / "copies", f"{number:05d}", (rows if by_copy else rows[:, ::-1] for rows in pairs), memory)


def run_unique(inputs: Sequence[Path], output: Path, engine: Engine, *, memory: int) -> Iterator[DocumentCounts]:
    """Keep the first document of each address."""
    work, shards = make_folder(output / ".work"), list(enumerate(inputs))
    list(engine.map(partial(write_url_hashes, work=work, memory=memory // 4), shards))
    list(engine.map(partial(find_copies, work=work, memory=memory // 4, by_copy=True), partitions(inputs, KEYS)))
    yield from engine.map(partial(drop_copies, work=work, output=output, memory=memory // 4), shards)
    shutil.rmtree(work)


def write_url_hashes(task: tuple[int, Path], work: Path, memory: int) -> None:
    """Rows of documents with an address: its 128-bit hash as two numbers, document."""
    (shard, path), rows = task, array("Q")
    with open(path, "rb") as lines:
        for document, line in enumerate(lines, start=shard << LINE_BITS):
            url = parse_shard_line(line, str(path)).url
            if url is not None:
                digest = hashlib.blake2b(normalized_url(url).encode(), digest_size=16).digest()
                rows.extend((*np.frombuffer(digest, "<u8").tolist(), document))
    write_runs(work / "keys", f"{shard:05d}", [np.array(rows, np.uint64).reshape(-1, 3)], memory)


def drop_copies(task: tuple[int, Path], work: Path, output: Path, memory: int) -> DocumentCounts:
    shard, path = task
    copies = iterate_rows(merge_runs(work / "copies", 2, shard << LINE_BITS, (shard + 1) << LINE_BITS, memory))
    reasons = {copy & LINE_MASK: "duplicate URL" for copy, _ in copies}
    return copy_undropped_lines(path, output / shard_name(shard), "unique", reasons)
