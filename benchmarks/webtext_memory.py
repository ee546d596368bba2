"""Peak memory of the webtext chain over corpora of growing size: `python benchmarks/webtext_memory.py 10 1000`.

Each corpus (in MB) goes through `python -m data.webtext run` into tokens, in a process of its own. Reported is the peak
resident memory of its largest process, and its ratio to that of the first corpus. Texts are paragraphs of English in a
new order each, with names that occur nowhere else: what a word or a document costs shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHARD = 64e6
PARAGRAPHS = 9
"""Of about 550 bytes each, in a document."""


def write_corpus(folder: Path, size: float) -> int:
    """Documents of 5 kB, a tenth of them copies of the one before; their number."""
    from tests.data.webtext.planted import babble

    rng, written, documents, shard = random.Random(0), 0.0, 0, 0
    pool = [babble(rng, 80) for _ in range(2000)]
    folder.mkdir()
    text = ""
    while written < size:
        with (folder / f"part-{shard:05d}.jsonl").open("wb") as file:
            while file.tell() < min(SHARD, size - written):
                if documents % 10 or not text:
                    name = f"{rng.choice('BCDFGKLMNPRST')}{rng.randrange(26 ** 5):x}son"
                    text = "\n\n".join((*rng.sample(pool, PARAGRAPHS), f"This page was written by {name}."))
                file.write(json.dumps({"text": text, "url": f"http://example.org/{documents}"}).encode() + b"\n")
                documents += 1
            written += file.tell()
            shard += 1
    return documents


def peak_of_chain(raw: Path, output: Path, workers: int, memory: str) -> tuple[float, float]:
    """(bytes at the peak of the largest process, seconds)."""
    command = [sys.executable, "-m", "data.webtext", "run", raw, "--output", output, "--workers", workers,
               "--memory", memory]
    begin = time.monotonic()
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the chain ended with code {process.returncode}")
    return usage.ru_maxrss * 1024.0, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of the webtext chain over corpora of growing size.")
    parser.add_argument("sizes", metavar="MB", type=float, nargs="+")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--memory", default="16M", help="handed on: small, so that the first corpus uses it up")
    args = parser.parse_args()
    first = None
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            documents = write_corpus(Path(folder, "raw"), size * 1e6)
            peak, seconds = peak_of_chain(Path(folder, "raw"), Path(folder, "out"), args.workers, args.memory)
        first = first or peak
        print(f"{size:8.0f} MB {documents:9d} documents {peak / 1e6:8.0f} MB peak {peak / first:6.2f} x the first "
              f"{seconds:8.0f} s", flush=True)


if __name__ == "__main__":
    main()
