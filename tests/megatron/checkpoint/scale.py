"""One rank of thousands in one process: what it costs it to start, to save, to open and to resume.

Two ranks are really played, as threads: rank 0 and the middle one. The others answer as that one does. What they
would have written is written afterwards, so that the tag is whole; it is not counted. Counted are calls that a file
system sees, bytes of control messages, numbers drawn, elements kept; times are reported and asserted nowhere.
"""

from __future__ import annotations

import builtins
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.checkpoint import writer
from megatron.checkpoint.manifest import MANIFEST, Lineage, parse_manifest
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.reshard import DPSharding, TPSlice
from megatron.checkpoint.writer import TensorSource
from megatron.config.tree import ModelConfig
from megatron.distributed import consistency
from megatron.model import GPT2
from megatron.zero.deferred_init import init_chunk
from megatron.zero.layout import FlatLayout, Slot
from mpu import groups, weight_init
from mpu.groups import Group
from mpu.partition import partition_of
from mpu.weight_init import initializer_of
from tests.megatron.checkpoint.made import ThreadWorld
from tests.megatron.counting import Calls
from tests.megatron.zero.run import configure_gpt2, gpt2_engine
from tests.wires import accelerator_side

KINDS = ("weight", "exp_avg", "exp_avg_sq")
TP = 8
MODEL = ModelConfig(num_layers=6, hidden_size=512, num_attention_heads=8, max_position_embeddings=64, vocab_size=1000)
CALLS = ("stat", "lstat", "mkdir", "rename", "replace", "unlink", "listdir", "scandir", "fsync", "link")


@dataclass
class Cost:
    """Of one rank in one phase."""

    calls: Counter[str] = field(default_factory=Counter)  # of the file system, by name
    told: int = 0  # bytes of control messages that it received
    drawn: int = 0  # elements
    kept: int = 0
    seconds: float = 0.0


class Played(ThreadWorld):
    """Ranks 0 and N / 2 of N, as threads; collectives among them, and the costs of each."""

    def __init__(self, size: int, total: int | None = None) -> None:
        """`total`: what every sum over all ranks is; left out, all but rank 0 give what the played one gives."""
        super().__init__(2)
        self._barrier = threading.Barrier(2, timeout=300)
        self.size, self.total = size, total
        self.groups = [Group(rank, size, ()) for rank in (0, size // 2)]
        self.costs = {group.rank: Cost() for group in self.groups}
        self._of_thread = threading.local()

    def reduce_number(self, number: float, group: Group, op: str = "max") -> float:
        first, last = self.exchange(number, group)
        self.costs[group.rank].told += 8
        if op == "sum":
            return float(first + last * (self.size - 1) if self.total is None else self.total)
        return float({"min": min, "max": max}[op](first, last))

    def least(self, numbers: Sequence[float], group: Group, op: str) -> list[float]:
        first, last = self.exchange(numbers, group)
        self.costs[group.rank].told += 8 * len(numbers)
        return [float(min(pair)) for pair in zip(first, last, strict=True)]

    def broadcast_json(self, value: Any, group: Group, src: int = 0) -> Any:
        text = self.exchange(json.dumps(value), group)[0 if src == 0 else 1]
        self.costs[group.rank].told += len(text)
        return json.loads(text)

    def run(self, action: Callable[[Group], Any]) -> list[Any]:
        def timed(group: Group) -> Any:
            self._of_thread.cost = self.costs[group.rank]
            begin = time.perf_counter()
            found = action(group)
            self.costs[group.rank].seconds = time.perf_counter() - begin
            return found

        results = super().run(timed)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    @contextmanager
    def installed(self) -> Iterator[None]:
        """With the calls of the file system counted."""
        with super().installed(), ExitStack() as stack:
            stack.enter_context(mock.patch.object(consistency, "all_reduce_scalars", self.least))
            for owner, name in [*((os, name) for name in CALLS), (builtins, "open")]:
                stack.enter_context(mock.patch.object(owner, name, self._counting(name, getattr(owner, name))))
            stack.enter_context(mock.patch("io.open", builtins.open))
            yield

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            if (cost := getattr(self._of_thread, "cost", None)) is not None:
                cost.calls[name] += 1
            return real(*given, **named)
        return counted


class Model:
    """The parameters of a GPT-2 of one tensor-parallel rank of TP, cut over `dp` ranks block by block; a rank keeps
    its shards alone."""

    def __init__(self, dp: int, tp_rank: int = 0) -> None:
        self.dp, self.tp_rank = dp, tp_rank
        gpt2 = GPT2(MODEL, Group(tp_rank, TP, tuple(range(TP))), deferred=True)
        units: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in gpt2.named_parameters():
            units.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks") else "root", []).append(
                (name, parameter))
        self.buckets = [(FlatLayout([Slot(name, tuple(p.shape), partition=partition_of(p)) for name, p in unit], dp),
                         [initializer_of(p) for _, p in unit]) for unit in units.values()]

    def tensors(self) -> Iterator[TensorSource]:
        for layout, _ in self.buckets:
            for kind in KINDS:
                for slot in layout.slots:
                    yield TensorSource.of(kind, slot.name, torch.float32,
                                          TPSlice(slot.shape, slot.partition, self.tp_rank, TP),
                                          lambda offset, count: torch.zeros(count),
                                          DPSharding(slot.offset, layout.shard_numel))


def start(size: int) -> Cost:
    """The initial weights of a rank in the middle."""
    model, cost = Model(size // TP, TP // 2), Cost()
    rows = weight_init.fill_normal_rows

    def counted(out: torch.Tensor, *places: Any) -> None:
        cost.drawn += out.numel()
        rows(out, *places)

    begin = time.perf_counter()
    with mock.patch.object(weight_init, "fill_normal_rows", counted):
        for layout, sources in model.buckets:
            init_chunk(torch.zeros(layout.shard_numel), layout, size // TP // 2, slice(0, layout.shard_numel),
                       [source for source in sources if source is not None])
            cost.kept += layout.shard_numel
    cost.seconds = time.perf_counter() - begin
    return cost


def schedule(size: int) -> tuple[int, float]:
    """(calls of the engine's functions, seconds) of a micro-batch at stage 3, for rank 0 of a data parallel group."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with accelerator_side():
            engine = gpt2_engine(configure_gpt2(zero_stage=3), groups.build())
            engine.forced_boundary = False  # a step would find that the others did nothing
            for _ in range(3):
                tokens, begin = torch.zeros(1, 8, dtype=torch.int64), time.perf_counter()
                with Calls("megatron/zero") as counted:
                    engine.backward(engine(tokens, tokens, grad_scale=engine.backward_scale))
                    engine.step()
        return counted.count, time.perf_counter() - begin
    finally:
        dist.destroy_process_group()


def save(root: Path, size: int) -> dict[int, Cost]:
    """Save as ranks 0 and N / 2, and let the others' files appear; the costs of the two."""
    played, models = Played(size), [Model(size // TP, tp) for tp in range(TP)]

    def work(world: Group) -> None:
        writer.save(root, "global_step1", tensors=models[world.rank % TP].tensors(),
                    rank_state={"seed": world.rank}, shared_state={}, config={}, layout={"tp": TP, "dp": size // TP},
                    world=world, run_id="scale", iteration=1)

    played.run(work)
    folder = root / "global_step1"
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        for rank in sorted({*range(1, size)} - {size // 2}):
            plan = writer.SavePlan(folder.parent, Group(rank, size, ()), manifest, Lineage(), staging=folder)
            writer.collect_files(plan, models[rank % TP].tensors(), {"seed": rank}, {})
            writer.write(plan)
    return played.costs


def open_and_read(root: Path, size: int) -> tuple[dict[int, Cost], dict[int, Cost]]:
    """Open the tag as ranks 0 and N / 2, then read what each keeps; the costs of both."""
    (tag,) = root.glob("global_step*")
    opening, reading = Played(size, len(os.listdir(tag)) - 1), Played(size)
    found: dict[int, Checkpoint] = {}

    def work(world: Group) -> None:
        found[world.rank] = open_checkpoint(root, world=world)

    def read(world: Group) -> None:
        model, checkpoint = Model(size // TP, world.rank % TP), found[world.rank]
        for part in (part for layout, _ in model.buckets for part in layout.segments(world.rank // TP)):
            local = TPSlice(part.slot.shape, part.slot.partition, model.tp_rank, TP)
            for kind in KINDS:
                out = torch.full((part.count,), torch.nan)
                checkpoint.read_slice(kind, part.slot.name, local, part.slot_offset, out)
                assert not out.any(), part.slot.name
        assert checkpoint.rank_state(world.rank) == {"seed": world.rank}

    opening.run(work)
    reading.run(read)
    return opening.costs, reading.costs
