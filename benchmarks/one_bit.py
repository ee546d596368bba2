"""What 1-bit Adam saves on a slow network: time of a step beside Adam's, and the bytes of both.

    python benchmarks/one_bit.py                              124M, 2 ranks, 1 Gbit/s
    python benchmarks/one_bit.py --gbits 10 --seq-length 512

The ranks are on one machine, and the wire is slowed by arithmetic: each rank has a link of its own, full duplex, on
which what it sends goes out one operation after the other at the given rate; an operation ends when its bytes would be
there, or when it really ends, whichever is later. So an exchange that runs beside the backward hides behind it, as on a
network. Steps of both optimizers are taken in turn; 1-bit Adam's are after its warm-up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WARM_UP = 2


class Link:
    """This rank's, to all others."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free_at, self.sent = bytes_per_second, 0.0, 0

    def send(self, count: int) -> float:
        """When that many bytes are there."""
        self.sent += count
        self._free_at = max(self._free_at, time.perf_counter()) + count / self._rate
        return self._free_at


def slow_wire(wire, link: Link):
    """The same wire, whose operations take as long as the link needs for what this rank sends."""
    from mpu.collectives import CollectiveWork

    def share(group, numel: int, size: int, times: int = 1) -> int:
        return times * (group.size - 1) * numel * size // group.size

    def held(pending: CollectiveWork, there_at: float) -> CollectiveWork:
        return CollectiveWork([pending], lambda: time.sleep(max(0.0, there_at - time.perf_counter())))

    class Slow:
        def all_gather(self, full, shard, group, at_a_time):
            at = link.send(share(group, full.numel(), full.element_size()))
            return held(wire.all_gather(full, shard, group, at_a_time), at)

        def reduce_scatter(self, shard, full, group, sum_in, at_a_time):
            at = link.send(share(group, full.numel(), full.element_size()))
            return held(wire.reduce_scatter(shard, full, group, sum_in, at_a_time), at)

        def all_reduce(self, flat, group, op, sum_in, at_a_time):
            at = link.send(share(group, flat.numel(), flat.element_size(), 2))
            return held(wire.all_reduce(flat, group, op, sum_in, at_a_time), at)

        def broadcast(self, x, src, group):
            at = link.send(x.numel() * x.element_size() if group.rank == src else 0)
            return held(wire.broadcast(x, src, group), at)

        def all_to_all(self, received, sent, group):
            at = link.send(share(group, sent.numel(), sent.element_size()))
            return held(wire.all_to_all(received, sent, group), at)

    return Slow()


def serve(rank: int, world: int, store: str, options: argparse.Namespace, optimizer: str, pipe: Connection) -> None:
    """One rank of one optimizer: a step for each request, and what it sent."""
    import torch
    import torch.distributed as dist

    from megatron.config.model_config import PRESETS
    from megatron.config.tree import build_config
    from megatron.train.build import engine as build_engine, model as build_model
    from mpu import collectives, groups

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    link, wire_for = Link(options.gbits * 1e9 / 8), collectives.backend_for
    collectives.backend_for = lambda x: slow_wire(wire_for(x), link)
    config = build_config({
        "vocab_size": 50257, **PRESETS[options.preset], "seq_length": options.seq_length, "batch_size": 1,
        "global_batch_size": world,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "compile": False, "zero_stage": options.zero_stage,
        "bf16": options.bf16, "optimizer": optimizer, "onebit_freeze_step": str(WARM_UP)})
    grid = groups.build(1)
    engine = build_engine(config, build_model(config, grid), grid, torch.device("cpu"))
    rows = torch.randint(config.model.vocab_size, (1, options.seq_length + 1))
    while pipe.recv():
        before, begin = link.sent, time.perf_counter()
        engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
        engine.step()
        pipe.send((time.perf_counter() - begin, link.sent - before))


class Contender:
    def __init__(self, options: argparse.Namespace, optimizer: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, store = [], tempfile.mktemp(prefix="bench-store-")
        for rank in range(options.ranks):
            mine, theirs = context.Pipe()
            context.Process(target=serve, args=(rank, options.ranks, store, options, optimizer, theirs),
                            daemon=True).start()
            self._pipes.append(mine)

    def step(self) -> tuple[float, int]:
        """Seconds and bytes of the slowest rank."""
        for pipe in self._pipes:
            pipe.send(True)
        return max(pipe.recv() for pipe in self._pipes)

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    for name, default in (("ranks", 2), ("steps", 5), ("seq-length", 256), ("threads", 1), ("zero-stage", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--preset", default="124M")
    parser.add_argument("--gbits", type=float, default=1.0, help="of each rank's link, in each direction")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--optimizers", default="adam,onebit_adam")
    options = parser.parse_args()
    names = options.optimizers.split(",")
    contenders = {name: Contender(options, name) for name in names}
    found = {name: [] for name in names}
    for step in range(WARM_UP + 1 + options.steps):
        for name, contender in contenders.items():
            taken = contender.step()
            if step > WARM_UP:
                found[name].append(taken)
    print(f"{options.preset}, {options.ranks} ranks at {options.gbits:g} Gbit/s, sequences of {options.seq_length}, "
          f"{'bf16' if options.bf16 else 'fp32'}, ZeRO stage {options.zero_stage}, {options.steps} steps of each")
    first = statistics.median(seconds for seconds, _ in found[names[0]])
    for name, steps in found.items():
        median = statistics.median(seconds for seconds, _ in steps)
        print(f"{name:<12} {median * 1e3:8.0f} ms a step ({first / median:.2f} x {names[0]}), "
              f"{steps[-1][1] / 1e6:8.2f} MB sent by a rank")
    for contender in contenders.values():
        contender.end()


if __name__ == "__main__":
    main()
