"""The two ways to a product of few rows on this CPU, at the shapes of the 124M model.

    python benchmarks/few_rows.py

Prints the time of x W^T over that of W x^T, weights coming from memory each time. mpu/layers.py takes the second
where it is above 1. On a machine that does other things at the same time the numbers are noise.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

SHAPES = [(768, 768), (768, 2304), (768, 3072), (3072, 768), (768, 50304)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 96]
FROM_MEMORY = 200e6
"""Bytes of weights that take turns."""


def seconds(run: Callable[[], object], times: int = 20) -> float:
    run()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return sorted(found)[times // 4]


def main() -> None:
    print(f"{'':28}" + "".join(f"{rows:>7}" for rows in ROWS))
    for dtype, (width, out) in itertools.product((torch.bfloat16, torch.float32, torch.float16), SHAPES):
        weights = [torch.randn(out, width).to(dtype) for _ in range(max(2, int(FROM_MEMORY / out / width / 4)))]
        turn, bias = itertools.cycle(weights), torch.randn(out).to(dtype)
        ratios = []
        for rows in ROWS:
            x = torch.randn(rows, width).to(dtype)
            first = seconds(lambda: torch.nn.functional.linear(x, next(turn), bias))
            if rows == 1:
                second = seconds(lambda: torch.addmv(bias, next(turn), x[0]))
            else:
                second = seconds(lambda: torch.addmm(bias[:, None], next(turn), x.t()).t().contiguous())
            ratios.append(first / second)
        print(f"{str(dtype).removeprefix('torch.'):9} {width:5} -> {out:5}     " +
              "".join(f"{ratio:7.2f}" for ratio in ratios))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
