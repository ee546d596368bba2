"""What it costs that each rank says where it is: steps with it and without it in turn, in the same processes.

    python -m megatron.launch --nproc-per-node 2 benchmarks/rank_status.py --steps 400

Every rank does the same kind of step at the same time. Reported are the medians of both kinds, the median of the
differences of neighbours, and what the numbers of a step cost by themselves: how often they are written, times the time
of one. The second figure has no noise of the machine in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from megatron import zero
from megatron.distributed import process_group
from megatron.distributed.rank_status import FORWARD, STATUS, RankStatus
from mpu import collective_tracker
from mpu.collectives import GlooBackend

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


def silent() -> list[Any]:
    """Patches that write nothing."""
    nothing: Callable[..., None] = lambda *arguments: None  # noqa: E731
    patches: list[Any] = [mock.patch.object(RankStatus, name, nothing) for name in ("set_phase", "set_step")]
    patches += [mock.patch.object(collective_tracker, name, nothing) for name in ("mark_waiting", "mark_idle")]
    return patches + [mock.patch.object(GlooBackend, name, getattr(GlooBackend, name).__wrapped__)
                      for name in OPERATIONS]


def counted(step: Callable[[], None]) -> int:
    """How many times something is written in a step."""
    count = 0

    def one(*arguments: Any) -> None:
        nonlocal count
        count += 1

    patches = [mock.patch.object(RankStatus, name, one) for name in ("set_phase", "set_step")]
    patches += [mock.patch.object(collective_tracker, name, one) for name in ("mark_waiting", "mark_idle")]
    for patch in patches:
        patch.start()
    step()
    for patch in patches:
        patch.stop()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of each kind (400)")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage: 3 writes most (3)")
    parser.add_argument("--layers", type=int, default=12, help="blocks (12)")
    parser.add_argument("--width", type=int, default=256, help="of a block: the smaller, the less a step takes (256)")
    options = parser.parse_args()
    env = process_group.init_process_group()
    torch.set_num_threads(1)
    model = Blocks(options.layers, options.width)
    engine = zero.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 0}})[0]
    x = torch.randn(8 * 64, options.width)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    def timed() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    for _ in range(10):
        step()
    writes, told, untold = counted(step), [], []
    for _ in range(options.steps):
        told.append(timed())
        patches = silent()
        for patch in patches:
            patch.start()
        untold.append(timed())
        for patch in patches:
            patch.stop()
    number, began = 200_000, time.perf_counter()
    for _ in range(number):
        STATUS.set_phase(FORWARD, "blocks.1")
    each = (time.perf_counter() - began) / number
    if env.rank == 0:
        with_it, without = statistics.median(told), statistics.median(untold)
        between = statistics.median(a - b for a, b in zip(told, untold, strict=True))
        print(f"a step: {1e3 * with_it:.3f} ms with it, {1e3 * without:.3f} ms without ({with_it / without - 1:+.2%}; "
              f"median of the differences {between / without:+.2%})\n{writes} writes of {1e9 * each:.0f} ns: "
              f"{1e6 * writes * each:.1f} us, {writes * each / without:.3%} of a step")
    process_group.shutdown()


class Blocks(torch.nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
            for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


if __name__ == "__main__":
    main()
