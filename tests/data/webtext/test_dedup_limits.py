"""How much memory removing duplicates takes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from data.webtext.documents import Document

REPOSITORY = Path(__file__).resolve().parents[3]

PEAK = """
import sys
from pathlib import Path
from data.webtext import minhash
from data.webtext.dedup import DedupOptions, run_dedup
from tests.peak import peak
folder, output, memory, range_bytes = sys.argv[1:]
minhash.BATCH_BYTES = int(range_bytes)
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
