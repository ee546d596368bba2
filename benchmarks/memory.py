"""What a training run really holds, beside what the planner says: `python benchmarks/memory.py --preset 124M 345M
--stage 0 1 2 3 --precision fp32 bf16`.

Each run is pretrain_gpt2.py itself on that many CPU ranks over loopback, on random tokens, with the settings of the C
library that the training scripts choose. Reported is the largest anonymous memory of any of its ranks (what malloc
took; files and shared memory are not counted) less LIBRARIES, and its ratio to the peak of
`python -m megatron.plan --device cpu`. Other flags go to both.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = 256 << 20
"""Anonymous memory of a process that has imported torch and connected to its peers."""
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}  # as scripts/lib.sh


def planned(flags: list[str], ranks: int) -> dict[str, int]:
    """The planner's peak, by component."""
    command = [sys.executable, "-m", "megatron.plan", "--device", "cpu", "--ranks", str(ranks), "--json", *flags]
    rows = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)["rows"]
    peak: dict[str, int] = next(row["peak"] for row in rows if row["chosen"])
    return peak


def anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def measured(flags: list[str], ranks: int, steps: int) -> tuple[int, float]:
    """(bytes of the largest rank at its peak, seconds)."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "pretrain_gpt2.py", "--mock-data", "--train-iters", str(steps), "--log-interval", "1",
               "--eval-iters", "1", *flags]
    shape = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
             "GLOO_SOCKET_IFNAME": "lo", **MALLOC}
    begin = time.monotonic()
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  env={**os.environ, **shape, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                 for rank in range(ranks)]
    try:
        peak = 0
        while any(process.poll() is None for process in processes):
            peak = max(peak, *(anonymous(process.pid) for process in processes))
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
    for process in processes:
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{process.communicate()[0]}")
    return peak, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["124M"])
    parser.add_argument("--stage", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "fp16", "bf16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of each run (3)")
    options, flags = parser.parse_known_args()
    print(f"{'model':8} {'precision':9} {'stage':5} {'planned':>9} {'held':>9} {'ratio':>6} {'seconds':>7}   at",
          flush=True)
    for preset in options.preset:
        for precision in options.precision:
            kind = ["--no-bf16"] if precision == "fp32" else [f"--{precision}"]
            for stage in options.stage:
                given = ["--preset", preset, *kind, "--zero-stage", str(stage), *flags]
                plan = planned(given, options.ranks)
                peak, seconds = measured(given, options.ranks, options.steps)
                held = peak - LIBRARIES
                print(f"{preset:8} {precision:9} {stage:5} {plan['total'] / 1e9:9.3f} {held / 1e9:9.3f} "
                      f"{held / plan['total']:6.3f} {seconds:7.0f}   {plan['moment']}", flush=True)


if __name__ == "__main__":
    main()
