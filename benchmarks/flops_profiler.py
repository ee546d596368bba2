"""What the flops profiler costs a step that it looks at: steps with and without it in turn, in one process.

    python benchmarks/flops_profiler.py                              the presets tiny and small
    python benchmarks/flops_profiler.py --device cuda --bf16 --presets 124M 345M

Its cost is one call of Python for each operation, so it is largest where operations are short.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron.config.tree import PRESETS, build_config  # noqa: E402
from megatron.profiler import FlopsProfiler  # noqa: E402
from megatron.train.build import engine as build_engine  # noqa: E402
from megatron.train.build import model as build_model  # noqa: E402
from megatron.zero.api.engine import Engine  # noqa: E402
from mpu import groups as mpu_groups  # noqa: E402


def made(preset: str, options: argparse.Namespace) -> Engine:
    config = build_config({**PRESETS[preset], "vocab_size": options.vocab_size, "batch_size": options.batch_size,
                           "bf16": options.bf16, "compile": False})
    groups = mpu_groups.build(1)
    return build_engine(config, build_model(config, groups), groups, torch.device(options.device))


def seconds(engine: Engine, rows: torch.Tensor, profiler: FlopsProfiler | None = None) -> float:
    """Of one step."""
    begin = time.perf_counter()
    if profiler is not None:
        profiler.start_profile()
    engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
    if profiler is not None:
        profiler.stop_profile()
    engine.step()
    if rows.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"])
    for name, default in (("vocab-size", 8192), ("batch-size", 8), ("pairs", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    for preset in options.presets:
        engine = made(preset, options)
        length = engine.config.seq_length
        rows = torch.randint(options.vocab_size, (options.batch_size, length + 1), device=options.device)
        profiler = FlopsProfiler(engine.module, engine)
        seconds(engine, rows)
        first = seconds(engine, rows, profiler)
        plain, profiled = map(statistics.median, zip(*(
            (seconds(engine, rows), seconds(engine, rows, profiler)) for _ in range(options.pairs)), strict=True))
        print(f"{preset}, {options.batch_size} x {length} tokens on {options.device}: {plain * 1e3:.1f} ms a step, "
              f"{profiled * 1e3:.1f} ms with the profiler, {profiled / plain:.2f} x; its first, {first * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
