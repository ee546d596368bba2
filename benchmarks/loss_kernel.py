"""The kernel of the loss at several sizes of its blocks, beside a copy of the logits, which is its floor; on a GPU.

    python benchmarks/loss_kernel.py
    python benchmarks/loss_kernel.py --rows 64 --device cpu      every line of it, with TRITON_INTERPRET=1

The least of five times four launches. Losses are compared with torch's before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mpu import kernels  # noqa: E402

COLUMNS, WIDTH = 50_257, 50_304
SIZES = [(1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16),
         (16384, 32)]
"""Block, warps."""
LAUNCHES, ROUNDS = 4, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=9_344)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    torch.manual_seed(0)
    drawn = (torch.randn(asked.rows, WIDTH, device=device) * 2).bfloat16()
    target = torch.randint(0, COLUMNS, (asked.rows,), device=device)
    scale = torch.full((asked.rows,), 1 / asked.rows, device=device)
    logits = drawn.clone()
    told("copy", milliseconds(lambda: logits.copy_(drawn), device), logits)
    for block, warps in SIZES:
        with mock.patch.multiple(kernels, _BLOCK=block, _WARPS=warps):
            logits.copy_(drawn)
            losses = kernels.losses_and_gradients(logits, target, COLUMNS, scale)
            some = slice(0, 64)
            torch.testing.assert_close(losses[some], torch.nn.functional.cross_entropy(
                drawn[some, :COLUMNS].float(), target[some], reduction="none"))
            found = milliseconds(lambda: kernels.losses_and_gradients(logits, target, COLUMNS, scale), device)
        told(f"blocks of {block}, {warps} warps", found, logits)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    found = []
    for _ in range(ROUNDS):
        wait()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            work()
        wait()
        found.append((time.perf_counter() - begin) / LAUNCHES * 1e3)
    return min(found)


def told(name: str, found: float, logits: Tensor) -> None:
    print(f"{name:28} {found:8.3f} ms  {2 * logits.nbytes / found / 1e9:6.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
