"""Removing duplicates when it is killed, and how much memory it takes."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data.webtext.documents import Document
from tests.data.webtext.planted import plant, write
from tests.data.webtext.test_dedup import deduplicate, visible

REPOSITORY = Path(__file__).resolve().parents[3]

KILLED = """
import os, signal, sys
from pathlib import Path
from data.webtext import dedup
left = [int(sys.argv[1])]
def tick():
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
def deadly(function):
    def call(*arguments, **options):
        tick()
        return function(*arguments, **options)
    return call
for name in ("fsync", "replace", "pread", "open"):
    setattr(os, name, deadly(getattr(os, name)))
dedup.run_dedup(sorted(Path(sys.argv[2]).glob("part-*")), Path(sys.argv[3]), dedup.DedupOptions(memory=1 << 16), 1,
                lambda _: None)
print(left[0])
"""


def run_killed(after: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """A run that is killed at the call after so many that touch the disk."""
    return subprocess.run([sys.executable, "-c", KILLED, str(after), str(folder / "in"), str(folder / "out")],
                          cwd=REPOSITORY, timeout=60, capture_output=True, text=True)


def check_kills(tmp_path: Path, points: int) -> None:
    """Nothing half done is left after a kill, and the next run ends as if there had been none."""
    shards = write(plant(9, originals=4, words=60), tmp_path / "in")
    deduplicate(shards, tmp_path / "alone")
    whole = visible(tmp_path / "alone")
    calls = 10_000 - int(run_killed(10_000, tmp_path).stdout)
    assert visible(tmp_path / "out") == whole and calls > 40
    for point in range(points):
        shutil.rmtree(tmp_path / "out")
        after = calls * point // points
        assert run_killed(after, tmp_path).returncode == -signal.SIGKILL
        left = visible(tmp_path / "out")
        assert all(whole[name] == content for name, content in left.items()), after
        deduplicate(shards, tmp_path / "out")
        assert visible(tmp_path / "out") == whole, after


def test_a_killed_run_leaves_nothing_half_and_is_finished_by_the_next(tmp_path: Path) -> None:
    check_kills(tmp_path, 4)


@pytest.mark.slow
def test_a_run_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    check_kills(tmp_path, 60)


PEAK = """
import sys
from pathlib import Path
from data.webtext import documents
from data.webtext.dedup import DedupOptions, run_dedup
from tests.peak import peak
folder, output, memory, range_bytes = sys.argv[1:]
documents.split_into_ranges.__defaults__ = (int(range_bytes),)
run_dedup(sorted(Path(folder).glob("part-*")), Path(output), DedupOptions(memory=int(memory)), 1, lambda counts: None)
print(peak())
"""


def peak_memory(tmp_path: Path, documents: int, phrases: int, memory: int, range_bytes: int) -> int:
    """Bytes that a run of its own takes for a corpus of distinct pages and some copies."""
    folder, rng, line = tmp_path / f"in{documents}", random.Random(0), b""
    folder.mkdir()
    pool = [f"a{n % 97} b{n % 89} c{n % 83} d{n}" for n in range(1 << 16)]  # shorter than a shingle
    for shard in range(4):
        with (folder / f"part-{shard:05d}.jsonl").open("wb") as file:
            for number in range(documents // 4):
                if number % 10 or not line:
                    line = Document(" ".join(rng.choices(pool, k=phrases))).to_line()
                file.write(line)
    arguments = [folder, tmp_path / f"out{documents}", memory, range_bytes]
    result = subprocess.run([sys.executable, "-c", PEAK, *map(str, arguments)], cwd=REPOSITORY, capture_output=True,
                            text=True, check=True)
    return int(result.stdout)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    # Short pages show what is kept for each, and budgets are such that the small corpus uses them up.
    small, large = (peak_memory(tmp_path, documents, 3, 1 << 20, 1 << 16) for documents in (4000, 16_000))
    assert large <= 1.1 * small


@pytest.mark.slow
def test_memory_is_that_of_a_hundredth_of_the_corpus(tmp_path: Path) -> None:
    small, large = (peak_memory(tmp_path, documents, 280, 16 << 20, 1 << 20) for documents in (2000, 200_000))
    assert large <= 1.1 * small  # of 10 MB and 1 GB
