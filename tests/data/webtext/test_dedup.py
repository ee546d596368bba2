"""Duplicates of a planted corpus: all that should go goes, nothing else does, whatever workers, memory and shards."""

from __future__ import annotations

import json
import os
import random
import unicodedata
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from data.storage import DataError
from data.webtext import dedup, exchange, minhash
from data.webtext.dedup import run_dedup
from data.webtext.documents import Document, DocumentCounts, parse_shard_line
from data.webtext.engines import LocalEngine
from data.webtext.exchange import iterate_rows, merge_runs, pairs_with_equal_keys, write_runs
from data.webtext.minhash import (NUM_HASHES, RECALL_AT_THRESHOLD, UNSPACED_SCRIPTS, Banding, hash_words,
                                  jaccard_similarity, minhash_signatures, ngram_hashes, shingle_hashes)
from tests.data.webtext.planted import Page, babble, edited, plant, write


def deduplicate(shards: Sequence[Path], output: Path, workers: int = 1, **options: Any) -> DocumentCounts:
    return sum(run_dedup(shards, output, LocalEngine(workers), **options), DocumentCounts())


def visible(folder: Path) -> dict[str, bytes]:
    """The files that are not hidden."""
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def kept_of(folder: Path) -> list[str]:
    return [parse_shard_line(line, path.name).text for path in sorted(folder.glob("part-*"))
            for line in path.read_bytes().splitlines()]


def shingle_sets(texts: Sequence[str]) -> list[set[int]]:
    return [set(shingle_hashes(text).tolist()) for text in texts]


def jaccard(left: set[int], right: set[int]) -> float:
    return len(left & right) / len(left | right) if left and right else 0.0


def slow_dedup(texts: Sequence[str], threshold: float) -> dict[int, int]:
    """Document -> the kept one it is a copy of. Every pair is compared."""
    kept: list[int] = []
    first_with: dict[str, int] = {}
    gone: dict[int, int] = {}
    sets = shingle_sets(texts)
    for number, text in enumerate(texts):
        same = first_with.setdefault(" ".join(text.split()), number)
        like = [other for other in kept if jaccard(sets[number], sets[other]) >= threshold]
        if same != number:
            gone[number] = gone.get(same, same)
        elif like:
            gone[number] = like[0]
        else:
            kept.append(number)
    return gone


def logged(folder: Path, shards: Sequence[Path]) -> dict[int, int]:
    """Document -> the kept one, from the log."""
    sizes = [len(path.read_bytes().splitlines()) for path in shards]
    first = {path.name: sum(sizes[:k]) for k, path in enumerate(shards)}

    def number(place: dict[str, Any]) -> int:
        return first[place["shard"]] + int(place["line"]) - 1

    drops = [json.loads(line) for line in (folder / "dropped.jsonl").read_bytes().splitlines()]
    return {number(drop): number(drop["kept"]) for drop in drops}


def test_exactly_the_copies_go_and_what_is_kept_is_unchanged(tmp_path: Path) -> None:
    pages = plant(0, originals=60)
    shards = write(pages, tmp_path / "in")
    counts = deduplicate(shards, tmp_path / "out")

    kept = kept_of(tmp_path / "out")
    positions = {page.text: number for number, page in enumerate(pages)}
    gone = set(range(len(pages))) - {positions[text] for text in kept}
    for kind, rate, least, most in [("exact", 0.0, 1, 1), ("near", 0.01, 0.99, 1), ("near", 0.05, 0, 0.01),
                                    ("near", 0.2, 0, 0), ("original", 0.0, 0, 0), ("boilerplate", 0.0, 0, 0),
                                    ("contaminated", 0.0, 0, 0), ("foreign", 0.0, 0, 0)]:
        planted = [number for number, page in enumerate(pages) if (page.kind, page.rate) == (kind, rate)]
        assert least <= len(gone.intersection(planted)) / len(planted) <= most, (kind, rate)
    lines = [line for shard in shards for line in shard.read_bytes().splitlines()]
    out = [line for path in sorted((tmp_path / "out").glob("part-*")) for line in path.read_bytes().splitlines()]
    assert out == [line for number, line in enumerate(lines) if number not in gone]
    assert counts.documents_in == len(pages) and counts.documents_kept == len(kept)
    assert counts.bytes_in == sum(map(len, lines)) + len(lines)
    assert counts.dropped["exact copy"] == 60 and counts.dropped["near copy"] == len(gone) - 60
    assert os.listdir(tmp_path / "out").count(".work") == 0


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_the_same_goes_as_when_every_pair_is_compared(threshold: float, tmp_path: Path) -> None:
    rng = random.Random(1)
    texts = []
    for _ in range(30):  # families with members at every distance, in any order; also short texts
        texts.append(babble(rng, rng.randint(3, 150)))
        for _ in range(rng.randint(0, 8)):
            texts.append(edited(rng, rng.choice(texts[-9:]), rng.choice([0, 0, 0.004, 0.01, 0.02, 0.05, 0.1])))
    texts += ["", " ", "!", "?", "a", "A", "a ", "!", "one two"] * 2
    rng.shuffle(texts)
    shards = write([Page(text, "family") for text in texts], tmp_path / "in", 5)
    deduplicate(shards, tmp_path / "out", threshold=threshold)

    expected, found = slow_dedup(texts, threshold), logged(tmp_path / "out", shards)
    assert len(expected) > 60
    sets = shingle_sets(texts)
    for document, kept in found.items():  # exact, whatever was found
        same = texts[document].split() == texts[kept].split()
        assert kept not in found and (same or jaccard(sets[document], sets[kept]) >= threshold)
    missed = set(expected) - set(found)  # bands find pairs near the threshold by chance, 9 in 10 and better
    assert len(missed) <= 0.03 * len(expected)
    assert len(set(found) - set(expected)) <= len(missed)  # what a missed one would have been kept instead of
    assert sum(found[d] != expected[d] for d in found if d in expected) <= 2 * len(missed)


@pytest.mark.parametrize(("threshold", "shared", "more"), [(0.3, 30, 70), (0.8, 8, 2), (0.95, 190, 10), (1.0, 100, 0)])
def test_a_document_exactly_at_the_threshold_goes_and_one_below_it_stays(threshold, shared, more, tmp_path):
    """Each second page is the one before it and some words more."""
    texts = []
    for family in range(40):
        first, at, below = (" ".join(f"w{family}x{number}" for number in range(shared + 4 + extra))
                            for extra in (0, more, more + 1))
        sets = shingle_sets([first, at, below])
        assert jaccard(sets[0], sets[1]) == threshold > jaccard(sets[0], sets[2])
        texts += [first, at.upper() if family < 20 else below]  # upper case: where `more` is 0, it is no exact copy
    deduplicate(write([Page(text, "") for text in texts], tmp_path / "in"), tmp_path / "out", threshold=threshold)
    kept = set(kept_of(tmp_path / "out"))
    assert kept.issuperset(texts[::2]) and kept.issuperset(texts[41::2])
    assert len(kept.intersection(texts[1:40:2])) <= 6  # 2 are to be expected: bands find such a pair 9 times in 10


def test_a_copy_of_a_near_copy_is_logged_with_what_is_kept(tmp_path: Path) -> None:
    rng = random.Random(5)
    text = babble(rng, 300)
    near_copy = edited(rng, text, 0.01)
    texts = [babble(rng, 50), text, near_copy, babble(rng, 60), near_copy.replace(" ", "  "), text]
    shards = write([Page(t, "") for t in texts], tmp_path / "in", 2)
    deduplicate(shards, tmp_path / "out")
    assert logged(tmp_path / "out", shards) == {2: 1, 4: 1, 5: 1}
    log = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_bytes().splitlines()]
    assert [drop["reason"] for drop in log] == ["near copy", "exact copy", "exact copy"]
    assert 0.8 <= log[0]["similarity"] == log[1]["similarity"] < 1 == log[2]["similarity"]


def test_a_crowd_of_near_copies_costs_comparisons_in_proportion(tmp_path, monkeypatch):
    template = babble(random.Random(6), 400)
    pages = [Page(f"{template} number {number}", "template") for number in range(500)]
    compared = []
    monkeypatch.setattr(dedup, "jaccard_similarity", lambda *pair: compared.append(pair) or jaccard_similarity(*pair))
    deduplicate(write(pages, tmp_path / "in"), tmp_path / "out")
    assert kept_of(tmp_path / "out") == [pages[0].text]
    assert len(compared) < 500


def test_output_is_the_same_for_any_workers_memory_and_partitions_and_after_an_interruption(tmp_path, monkeypatch):
    rng, pages = random.Random(4), plant(8, originals=12, words=150)
    for _ in range(12):  # families of edits of edits: whether the first similar document stays is decided elsewhere
        family = [babble(rng, 150)]
        for _ in range(9):
            family.append(edited(rng, rng.choice(family[-2:]), 0.012))
        pages += [Page(text, "family") for text in family]
    rng.shuffle(pages)
    shards, turns = write(pages, tmp_path / "in", 7), []
    monkeypatch.setattr(dedup.DedupTasks, "decide", lambda tasks, partition, turn, decide=dedup.DedupTasks.decide: (
        turns.append(turn), decide(tasks, partition, turn))[1])
    for name, memory, partition_bytes in [("whole", 1 << 30, 1 << 26), ("cut", 1 << 16, 1)]:
        monkeypatch.setattr(exchange, "PARTITION_BYTES", partition_bytes)
        deduplicate(shards, tmp_path / name, memory=memory)
    assert turns.count(0) == 1 + 7 and max(turns) > 1, "some documents wait for those of other partitions"
    monkeypatch.undo()
    deduplicate(shards, tmp_path / "two", 2, memory=1 << 17)
    assert visible(tmp_path / "whole") == visible(tmp_path / "cut") == visible(tmp_path / "two")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(dedup, "find_copies", Mock(side_effect=KeyboardInterrupt))
        deduplicate(shards, tmp_path / "out")
    monkeypatch.setattr(minhash, "signature_rows", lambda *rest, **named: pytest.fail("made again"))
    deduplicate(shards, tmp_path / "out")
    assert visible(tmp_path / "out") == visible(tmp_path / "whole")


def test_empty_inputs_give_empty_shards_and_a_line_that_is_no_document_is_named(tmp_path: Path) -> None:
    shards = write([], tmp_path / "in", 2)
    assert deduplicate(shards, tmp_path / "empty").documents_in == 0
    assert visible(tmp_path / "empty") == {"part-00000.jsonl": b"", "part-00001.jsonl": b"", "dropped.jsonl": b""}
    assert deduplicate([], tmp_path / "none").documents_in == 0
    (shard := tmp_path / "part-00000.jsonl").write_bytes(Document("fine").to_line() + b"{no\n")
    with pytest.raises(DataError, match=r"part-00000.jsonl: not JSON"):
        deduplicate([shard], tmp_path / "out")


# ------------------------------------------------------------------------------------------------- words and signatures

AWKWARD = [
    "", " ", "...", "a", "Hello, WORLD!", "don’t stop", "e\u0301te\u0301", "日本語 and 한국어", "x\u2028y\u0000z\ufeffw",
    "İstanbul ŞIRNAK ﬁn", "\U0001f600 a\U0001f600b", "\U00020000\U00020001", "१२३ हिन्दी", "a_b-c/d", "สวัสดี",
    "\u3000。、"]


def slow_words(text: str) -> list[tuple[str, int, int]]:
    """Character by character."""
    found: list[tuple[str, int, int]] = []
    open_word = False
    for place, character in enumerate(text):
        inside = character.isalnum() or unicodedata.category(character)[0] == "M"
        alone = inside and any(first <= ord(character) <= last for first, last in UNSPACED_SCRIPTS)
        lower = character.lower() if len(character.lower()) == 1 else character
        if inside and open_word and not alone:
            word, start, _ = found[-1]
            found[-1] = word + lower, start, place + 1
        elif inside:
            found.append((lower, place, place + 1))
        open_word = inside and not alone
    return found


def test_words_are_those_found_character_by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minhash, "MIN_POWERS", 1)
    rng = random.Random(0)
    numbers: dict[str, int] = {}
    for text in [*AWKWARD, *("".join(rng.choices("aAbé ’.\n日本9\u0301\U0001f600", k=rng.randint(0, 300)))
                             for _ in range(300))]:
        expected, found = slow_words(text), hash_words(text)
        assert list(zip(found.starts.tolist(), found.stops.tolist())) == [(a, b) for _, a, b in expected], repr(text)
        for (word, _, _), number in zip(expected, found.hashes.tolist(), strict=True):
            assert numbers.setdefault(word, number) == number
    assert len(set(numbers.values())) == len(numbers) > 1000


def test_numbers_do_not_change_between_versions_of_this_code() -> None:
    # Signature files on disk hold them: raise minhash.SIGNATURE_VERSION together with these.
    assert hash_words("Hello, wörld 日本").hashes.tolist() == [
        14436853186599029085, 6754916799844202833, 3913650560111125320, 11557339308617255188]
    assert ngram_hashes(hash_words("a b c d e").hashes, 5).tolist() == [7462623408334267199]


def test_a_signature_depends_on_the_set_of_shingles_alone_and_bands_are_the_longest_that_keep_their_promise() -> None:
    rng = np.random.default_rng(3)
    sets = [rng.integers(0, 1 << 64, size, dtype=np.uint64) for size in (1, 70_000, 3, 2, 30_000, 10, 100_000, 1)]
    for shingles, found in zip(sets, minhash_signatures(sets)):
        assert (minhash_signatures([np.concatenate([shingles, shingles[::-1]])])[0] == found).all()
    for threshold in (0.5, 0.95):
        rows = Banding.for_threshold(threshold).rows
        assert Banding(NUM_HASHES // rows, rows).recall(threshold) >= RECALL_AT_THRESHOLD
        assert Banding(NUM_HASHES // (rows + 1), rows + 1).recall(threshold) < RECALL_AT_THRESHOLD
    for threshold in (0, 0.29, 1.01, float("nan")):
        with pytest.raises(DataError, match="expected a similarity from 0.3"):
            Banding.for_threshold(threshold)


# ----------------------------------------------------------------------------------------------- sorting outside memory


@pytest.mark.parametrize(("memory", "high"), [
    (1, (1 << 64) - 1), (2000, 3), (2000, (1 << 64) - 1), (20_000, 0), (1 << 20, 3)])  # 0: all are equal, 3: most
def test_rows_come_back_sorted_whatever_fits_and_each_in_one_partition(memory: int, high: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(memory)
    for width in (1, 3):
        for size in (0, 1, 700 if memory > 1 else 20):
            folder, parts = tmp_path / f"{width}-{size}", []
            for task in ("a", "b"):
                parts += [rng.integers(0, high, (count, width), dtype=np.uint64, endpoint=True)
                          for count in (size // 3, 0, size - size // 3)]
                write_runs(folder, task, parts[-3:], memory)
            expected = sorted(map(tuple, np.concatenate(parts).tolist()))
            for edges in ([0, 1 << 64], [0, 1, 2, 1 << 63, 1 << 64]):
                found = [iterate_rows(merge_runs(folder, width, *between, memory)) for between in pairwise(edges)]
                assert [tuple(row) for rows in found for row in rows] == expected
    memory = 1 << 14  # which bounds the blocks, even if all rows are equal
    write_runs(tmp_path / "equal", "a", 10 * [np.ones((1000, 2), np.uint64)], memory)
    sizes = [block.nbytes for block in merge_runs(tmp_path / "equal", 2, 0, 2, memory)]
    assert sum(sizes) == 10 * 1000 * 16 and max(sizes) <= memory // 4


@pytest.mark.parametrize(("crowd", "size"), [(1, 7), (3, 1), (3, 2), (100, 1000)])
def test_equals_are_paired_across_any_blocks(crowd: int, size: int) -> None:
    rng = random.Random(crowd)
    rows = sorted((rng.choice([0, 1, 1, 1, 7, document]), 0, document) for document in range(300))
    blocks = [np.array(rows[start:start + size], np.uint64) for start in range(0, len(rows), size)]
    expected = []
    for key in {row[:2] for row in rows}:
        group = [row[2] for row in rows if row[:2] == key]
        expected += [(later, earlier) for earlier, later in combinations(group, 2) if earlier in group[:crowd]]
    assert sorted(map(tuple, iterate_rows(pairs_with_equal_keys(blocks, crowd)))) == sorted(expected)
