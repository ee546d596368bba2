"""Time of a training step and peak memory, contenders side by side: `python benchmarks/step_time.py --model 124M
--precision bf16`.

Every contender lives in processes of its own; they take steps in turn (A B C A B C ...), so drift of the machine hits
all alike. Reported are medians, their ratio to the first contender, and the peak anonymous memory of one rank (what
malloc took; files not counted). `NAME@FOLDER` is a contender of another checkout.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """Samples this process's anonymous memory every 2 ms while it is armed: during its own steps, as reading it takes
    processor time, and the others are timed then."""

    def __init__(self) -> None:
        self.peak, self.armed = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.armed.wait()
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.002)


def serve(
    name: str, task, rank: int, world: int, store: str, threads: int, products: str, pipe: Connection
) -> None:
    """One rank of one contender: a step per request."""
    name, _, checkout = name.partition("@")
    if checkout:
        folders = [folder for folder in ("benchmarks", "scripts/bench") if (Path(checkout) / folder).is_dir()]
        sys.path[:0] = [str(Path(checkout) / folders[0]), checkout]  # older checkouts have scripts/bench
        sys.modules.pop("contenders", None)  # this checkout's, which `task` came with
    import torch
    import torch.distributed as dist
    from contenders import CONTENDERS
    from products import install

    install(products)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if task.device == "cuda":
        torch.cuda.set_device(rank)  # before NCCL connects: two ranks on one GPU are refused
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "nccl" if task.device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=world
        )
    step = CONTENDERS[name](task)
    rows = torch.randint(0, task.vocab, (task.batch, task.seq + 1), device=task.device)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    memory = PeakMemory()
    while pipe.recv() == "step":
        if task.device == "cpu":
            memory.armed.set()
        else:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step(tokens, targets)
        if task.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        memory.armed.clear()
        pipe.send(seconds)
    pipe.send(torch.cuda.max_memory_allocated() if task.device == "cuda" else memory.peak)
    pipe.recv()


class Contender:
    """The processes of one contender."""

    def __init__(self, name: str, task, world: int, threads: int, products: str) -> None:
        from contenders import environment

        context = multiprocessing.get_context("spawn")
        self.name, self.seconds = name, []
        store = tempfile.mktemp(prefix="bench-store-")
        self.pipes, self.processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            arguments = (name, task, rank, world, store, threads, products, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            with mock.patch.dict(os.environ, environment(name.partition("@")[0], task.device)):
                process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def step(self) -> float:
        for pipe in self.pipes:
            pipe.send("step")
        return max(pipe.recv() for pipe in self.pipes)

    def finish(self) -> int:
        for pipe in self.pipes:
            pipe.send("stop")
        peak = max(pipe.recv() for pipe in self.pipes)
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send("bye")
            process.join()
        return peak


def is_single(name: str) -> bool:
    """Contenders that know one process only; with several ranks they are the single-process yardstick."""
    return name.startswith(("plain", "hf"))


def measure(
    names: list[str], task, world: int, steps: int, warmup: int, threads: int, products: str
) -> list[tuple[str, float, int]]:
    """(name, median seconds, peak bytes) of each."""
    whole = replace(task, batch=task.batch * world)  # one process does the work of all ranks, with all their threads
    contenders = [
        Contender(name, whole, 1, threads * world, products)
        if is_single(name)
        else Contender(name, task, world, threads, products)
        for name in names
    ]
    for round_ in range(warmup + steps):
        for contender in contenders:
            seconds = contender.step()
            if round_ >= warmup:
                contender.seconds.append(seconds)
            print(f"round {round_ + 1} of {warmup + steps}: {contender.name} {seconds:.2f} s", file=sys.stderr)
    return [(c.name, statistics.median(c.seconds), c.finish()) for c in contenders]


def main() -> None:
    from contenders import CONTENDERS, TASKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TASKS, default="14M")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, help="threads of one rank (default: all cores shared out)")
    parser.add_argument(
        "--contenders", default="plain,hf,ours", help=f"of {', '.join(CONTENDERS)}; ratios are to the first"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--products",
        choices=("torch", "fp32", "none"),
        default="torch",
        help="other ones in bf16, for a processor that has none: see products.py",
    )
    args = parser.parse_args()
    task = replace(TASKS[args.model], precision=args.precision, device=args.device, compile=args.compile)
    task = replace(task, batch=args.batch or task.batch, seq=args.seq or task.seq)
    threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
    rows = measure(args.contenders.split(","), task, args.ranks, args.steps, args.warmup, threads, args.products)
    base = rows[0][1]
    precision = args.precision + f", products: {args.products}," * (args.products != "torch")
    print(
        f"{args.model} {precision} {args.ranks} rank(s) x {threads} threads, "
        f"batch {task.batch} x {task.seq} a rank, {args.steps} steps"
    )
    print(f"{'':15s} {'ms/step':>10s} {'time ratio':>11s} {'tokens/s':>10s} {'peak MB/rank':>13s}")
    for name, seconds, peak in rows:
        print(
            f"{name:15s} {seconds * 1e3:10.1f} {seconds / base:11.3f} "
            f"{args.ranks * task.batch * task.seq / seconds:10.0f} {peak / 1e6:13.0f}"
        )


if __name__ == "__main__":
    main()
