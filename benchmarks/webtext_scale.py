"""What a crawl on many machines needs, by arithmetic from rates measured here: `python benchmarks/webtext_scale.py`.

Each stage runs as a command with one worker over a made WARC file; its CPU seconds, output and peak memory are taken
per byte of WARC and multiplied. Pages are like Common Crawl's in size: about 5 kB of text in 100 kB of HTML. Every page
is English and a tenth are copies, so that no stage saves the next one work: a real crawl costs less after `language`.
The shared disk moves each stage's input and output twice, since checksums are read too. Two steps of the driver are
measured by themselves: it marks documents by candidate pairs, and joins the tokens.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from timeit import repeat

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SCRIPT_BYTES, STYLE_BYTES = 18_000, 60_000  # of a page: what does and what does not compress
PAIRS = 5_000_000
MEMORY = 1 << 30  # of --memory, which tasks of dedup may fill at that size
JOINED = 30  # times the sample's tokens: enough that opening files does not count


def write_warc(path: Path, pages: int) -> int:
    """A compressed record per page; their bytes."""
    from tests.data.webtext.planted import babble

    rng, text = random.Random(0), ""
    styles = [" ".join(f".c{rng.randrange(300)}{{margin:{rng.randrange(20)}px}}" for _ in range(STYLE_BYTES // 18))
              for _ in range(50)]
    with path.open("wb") as file:
        for number in range(pages):
            text = text if number % 10 == 9 else babble(rng, 740)
            body = "".join(f"<div class=\"c{rng.randrange(300)}\"><p>{part}</p></div>\n"
                           for part in text.split("\n\n"))
            noise = base64.b64encode(rng.randbytes(SCRIPT_BYTES)).decode()
            page = (f"<!DOCTYPE html><html><head><title>Page {number}</title><style>{rng.choice(styles)}</style>"
                    f"<script>var data = \"{noise}\";</script></head><body><nav>Home"
                    f"</nav><main>{body}</main><footer>Imprint</footer></body></html>").encode()
            answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
            file.write(gzip.compress((
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.org/{number}\r\nContent-Type: "
                f"application/http; msgtype=response\r\nContent-Length: {len(answer)}\r\n\r\n").encode()
                + answer + b"\r\n\r\n"))
    return path.stat().st_size


def run_measured(*words: object) -> tuple[float, float]:
    """(CPU seconds, bytes at the peak) of a command of data."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", *map(str, words), "--workers", "1"], env=environment,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: ended with code {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


def seconds_per_pair(folder: Path, documents: int) -> float:
    import numpy as np

    from data.webtext.dedup import UNKNOWN, DocumentStates

    rows = np.sort(np.random.default_rng(0).integers(0, documents, (PAIRS, 2), np.uint64), axis=0)
    (folder / "pairs").mkdir()
    rows.tofile(folder / "pairs" / "0.rows")
    states = DocumentStates(np.array([0, documents], np.uint64), np.zeros(documents, np.uint8))
    begin = time.perf_counter()
    states.mark_column(folder / "pairs", 0, UNKNOWN)
    return (time.perf_counter() - begin) / PAIRS


def main() -> None:
    parser = argparse.ArgumentParser(description="What a crawl on many machines needs, from rates measured here.")
    parser.add_argument("--terabytes", type=float, default=10, help="of compressed WARC")
    parser.add_argument("--machines", type=int, default=50)
    parser.add_argument("--cores", type=int, default=32, help="of a machine")
    parser.add_argument("--price", type=float, help="of a core for an hour: what there is to pay")
    parser.add_argument("--disk", type=float, default=10, help="GB/s that all machines together read and write")
    parser.add_argument("--pages", type=int, default=3000, help="in the sample")
    args = parser.parse_args()

    from data.merge import merge_corpora

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_warc(folder / "a.warc.gz", args.pages)
        scale, source = args.terabytes * 1e12 / size, folder / "a.warc.gz"
        cores, documents = args.machines * args.cores, round(args.pages * scale)
        print(f"{args.terabytes:g} TB of WARC, {documents / 1e6:.0f} million pages, {args.machines} machines of "
              f"{args.cores} cores")
        print(f"{'stage':<10} {'MB of WARC/s and core':>22} {'core hours':>11} {'hours':>6} {'disk, TB':>9} "
              f"{'memory, GB':>11}")
        total = disk = moved = peak = 0.0
        before = size
        for stage in ("extract", "urls", "clean", "language", "dedup", "shuffle", "tokens"):
            target = folder / stage
            words = ["data.preprocess", "--input", source, "--output-prefix", target / "corpus"] if stage == "tokens" \
                else ["data.webtext", stage, source, "--output", target]
            seconds, memory = run_measured(*words)
            written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
            hours = seconds * scale / 3600
            total, disk, peak = total + hours, disk + written * scale / 1e12, max(peak, memory)
            moved, before = moved + 2 * (before + written) * scale / 1e12, written
            print(f"{stage:<10} {size / seconds / 1e6:22.1f} {hours:11.0f} {hours / cores:6.2f} "
                  f"{written * scale / 1e12:9.1f} {memory / 1e9:11.2f}")
            source = target
        price = f"; {total * args.price:.0f} to pay" if args.price else ""
        print(f"{total:.0f} core hours in {total / cores:.2f} hours, {(peak + MEMORY) * args.cores / 1e9:.0f} GB of "
              f"memory per machine{price}")
        print(f"{disk:.1f} TB of disk, {moved:.0f} TB read and written in {moved * 1e3 / args.disk / 3600:.2f} hours "
              f"at {args.disk:g} GB/s")
        tokens = (folder / "tokens" / "corpus.bin").stat().st_size
        merge = partial(merge_corpora, JOINED * [folder / "tokens" / "corpus"], folder / "joined")
        join = min(repeat(merge, number=1)) / JOINED * scale / 3600
        pairs = documents * seconds_per_pair(folder, documents) / 3600
        print(f"driver: {tokens * scale / 1e12:.1f} TB of tokens in {join:.2f} hours, a pair per page in {pairs:.2f}, "
              f"{documents / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
