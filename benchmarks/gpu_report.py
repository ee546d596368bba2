"""What a GPU shows and nothing else can: a check a call, each in a process of its own (scripts/gpu_check.sh calls all).

    speed      tokens/s, MFU and peak memory of a model at the batch the planner chooses; ours beside the planner's
               figure, or plain torch compiled as a whole, as nanoGPT does. With --kernels those of one step, by time
    syncs      where the host waits for the device in ten steps

`--device cpu --tiny` runs every line of a check with a model of no size, so that a first run on a GPU meets no mistake.
The last line of a check is its result; --results adds it to a file of JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import torch  # noqa: E402
from contenders import CONTENDERS, TASKS, Task, values_of  # noqa: E402

from megatron.config.tree import build_config  # noqa: E402
from megatron.plan.footprint import PlannedRun  # noqa: E402
from megatron.plan.memory import peak_memory  # noqa: E402
from megatron.train.flops import flops_per_token, peak_tflops  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""More tokens at a time than 64 x 1,024 make nothing faster."""

ROOM = 0.88
"""Of a card's memory: the rest is the context's, the libraries' and the allocator's rounding."""

NOT_COUNTED = "not counted on a CPU"

CPU_MEMORY = 1e9
"""Bytes that the planner may fill where there is no card."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("speed", "syncs"))
    parser.add_argument("--model", choices=TASKS, default="124M")
    parser.add_argument("--contender", choices=CONTENDERS, default="ours")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the model is of no size, whatever --model says")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a step as well")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--results", type=Path, help="a file of JSON lines to add the result to")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    shape = TASKS["tiny" if args.tiny else args.model]
    seq = shape.seq if args.tiny else 1024
    task = replace(shape, seq=seq, precision="bf16", device=args.device, compile=not args.no_compile)
    result = {"speed": speed, "syncs": syncs}[args.check](args, task)
    if args.results is not None:
        with args.results.open("a") as file:
            file.write(json.dumps({"check": args.check, "model": args.model, "contender": args.contender,
                                   **result}) + "\n")


def planned(task: Task) -> float:
    """Bytes that the planner expects at the peak of a step."""
    return peak_memory(PlannedRun(build_config(values_of(task)), 1, "cuda" if task.device == "cuda" else "cpu")).total


def fitting(task: Task) -> Task:
    """The task with the largest batch that the planner puts on this device."""
    room = ROOM * torch.cuda.get_device_properties(0).total_memory if task.device == "cuda" else CPU_MEMORY
    fits = [batch for batch in BATCHES if planned(replace(task, batch=batch)) <= room]
    return replace(task, batch=max(fits, default=1))


def built(name: str, task: Task) -> Callable[[], None]:
    step = CONTENDERS[name](task)
    rows = torch.randint(0, task.vocab, (task.batch, task.seq + 1), device=task.device)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return lambda: step(tokens, targets)


def wait(task: Task) -> None:
    if task.device == "cuda":
        torch.cuda.synchronize()


def speed(args: argparse.Namespace, task: Task) -> dict[str, Any]:
    task = fitting(task)
    while True:
        try:
            seconds, launches = _timed(args, task)
            break
        except torch.OutOfMemoryError:  # plain torch keeps all logits: half the batch then
            if task.batch == 1:
                raise
            traceback.clear_frames(sys.exc_info()[2])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        task = replace(task, batch=task.batch // 2)
    tokens = task.batch * task.seq / seconds
    tflops = tokens * flops_per_token(build_config(values_of(task)).model, task.seq) / 1e12
    limit = peak_tflops(torch.cuda.get_device_name()) if task.device == "cuda" else None
    held = torch.cuda.max_memory_allocated() if task.device == "cuda" else None
    expected = planned(task)
    mfu = f"{tflops / limit:.1%}" if limit else "unknown"
    print(f"{args.contender}: batch {task.batch} x {task.seq}, {seconds * 1e3:.1f} ms a step, {tokens:,.0f} tokens/s, "
          f"MFU {mfu}, peak {NOT_COUNTED if held is None else f'{held / 1e9:.2f} GB'}"
          + f" (planned {expected / 1e9:.2f} GB)" * (args.contender == "ours" and held is not None))
    return {"batch": task.batch, "ms": seconds * 1e3, "tokens_per_s": tokens, "mfu": tflops / limit if limit else None,
            "peak_bytes": held, "planned_bytes": expected, "launches": launches}


def _timed(args: argparse.Namespace, task: Task) -> tuple[float, int | None]:
    """Seconds of one step among many, and its launches: no wait between them, as in training, where the host runs
    ahead of the device. (The model is this function's alone, so that it goes where the device has no room for it.)"""
    step = built(args.contender, task)
    for _ in range(args.warmup):
        step()
    wait(task)
    begin = time.perf_counter()
    for _ in range(args.steps):
        step()
    wait(task)
    return (time.perf_counter() - begin) / args.steps, _kernels(task, step) if args.kernels else None


def syncs(args: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Ten steps, the fourth to the thirteenth, in which torch warns at every operation that waits for the device. It
    does not warn where the host waits for an event, as for the report of a step."""
    step = built(args.contender, replace(task, batch=2))
    for _ in range(3):
        step()
    wait(task)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if task.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        for _ in range(10):
            step()
        if task.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    if task.device != "cuda":
        print(f"{args.contender}: synchronisations {NOT_COUNTED}")
        return {"synchronisations": None, "places": None}
    places = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    for place, count in places.most_common():
        print(f"  {count:4d} x {place}")
    print(f"{args.contender}: {sum(places.values())} synchronisations in ten steps, at {len(places)} places")
    return {"synchronisations": sum(places.values()), "places": dict(places)}


def _kernels(task: Task, step: Callable[[], None]) -> int | None:
    """Print the 25 kernels (operators, on a CPU) that take most of a step; the number of its launches."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (task.device == "cuda")
    with profile(activities=activities) as seen:
        step()
        wait(task)
    rows = seen.key_averages()
    print(rows.table(sort_by=f"self_{task.device}_time_total", row_limit=25, max_name_column_width=80))
    launches = sum(row.count for row in rows if row.key in ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch",
                                                            "cuLaunchKernel", "cudaLaunchKernelExC"))
    print(f"launches in one step: {launches if task.device == 'cuda' else NOT_COUNTED}")
    return launches if task.device == "cuda" else None


if __name__ == "__main__":
    main()
