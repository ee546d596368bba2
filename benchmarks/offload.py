"""An optimizer step whose state is on a drive, beside the same step in memory and beside what it cannot be faster than:
`python benchmarks/offload.py --nvme-path DIR`.

One process, gradients of ones, no model is run: only `engine.step()` is timed, the two homes in turn. The bound is the
longer of two times: what the drive needs for the bytes (rates as the preflight measures them just before, reads and
writes one after the other), and what the update takes in memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from megatron.config.tree import PRESETS, build_config  # noqa: E402
from megatron.train import build  # noqa: E402
from megatron.zero.api.engine import Engine  # noqa: E402
from megatron.zero.offload.nvme import NvmeStorage  # noqa: E402
from megatron.zero.offload.swap_drive import measure_rates  # noqa: E402
from mpu import groups  # noqa: E402

FLAG = "--nvme-path"


def made(chosen: argparse.Namespace, **home: object) -> Engine:
    config = build_config({**PRESETS[chosen.preset], "vocab_size": 50257, "zero_stage": 3, "batch_size": 1,
                           "bf16": chosen.bf16, "sub_group_size": chosen.sub_group_size, **home})
    grid = groups.build()
    return build.engine(config, build.model(config, grid), grid, torch.device("cpu"))


def step(engine: Engine) -> float:
    """Seconds of one step."""
    for bucket in engine.core.buckets:
        grads = bucket.grads
        for index in range(len(bucket.parameters)):
            grads.accumulated_grad(index).fill_(1e-3)
        grads.start_reduction()
        grads.end_backward(ends_step=True)
    begin = time.perf_counter()
    engine.core.step()
    engine.core.engine_storage.wait_for_writes()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(FLAG, required=True)
    parser.add_argument("--preset", default="124M", choices=sorted(PRESETS))
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sub-group-size", type=int, default=1 << 24)
    chosen = parser.parse_args()
    here = made(chosen)
    there = made(chosen, offload_optimizer_device="nvme", offload_optimizer_nvme_path=chosen.nvme_path)
    home = there.core.engine_storage.optimizer
    assert isinstance(home, NvmeStorage)
    for engine in (here, there):
        step(engine)  # the first one reads nothing
    bounds, ratios, times = [], [], []
    print("| in memory, s | on the drive, s | read, MB | written, MB | drive alone, s | ratio to the bound |")
    print("|---" * 6 + "|")
    for _ in range(chosen.steps):
        before = home.stats
        read_rate, write_rate = measure_rates(Path(chosen.nvme_path), 256 << 20)
        update, whole = step(here), step(there)
        read = home.stats.read_bytes - before.read_bytes
        written = home.stats.written_bytes - before.written_bytes
        transfer = read / read_rate + written / write_rate
        bounds.append(max(transfer, update))
        times.append(whole)
        ratios.append(whole / bounds[-1])
        print(f"| {update:.3f} | {whole:.3f} | {read / 1e6:.0f} | {written / 1e6:.0f} | {transfer:.3f} "
              f"| {ratios[-1]:.2f} |", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")
    for engine in (here, there):
        engine.destroy()


if __name__ == "__main__":
    main()
