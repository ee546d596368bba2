"""A model whose gradients are its input: what is compared is the optimizer alone. (Where gradients depend on weights,
the rounding of one turns a sign some steps later.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron.zero.api.engine import Engine
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, gpt2_loss, weights

WIDTH = 12
Batch = Callable[[int, int], Tensor]
"""(step, rank) -> the gradients of all parameters of one rank, in their order."""


class Net(nn.Module):
    """One parameter has no numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, WIDTH)
        self.body = nn.Linear(WIDTH, 30)
        self.head = nn.Linear(30, 5)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, gradient: Tensor) -> Tensor:
        flat = torch.cat([parameter.flatten() for parameter in self.parameters()])
        return (flat * gradient.to(flat.dtype)).sum()


NUMBERS = {name: parameter.numel() for name, parameter in Net().named_parameters()}  # of each parameter


def by_name(flat: Tensor) -> dict[str, Tensor]:
    return dict(zip(NUMBERS, flat.split(list(NUMBERS.values()))))


def with_numbers(found: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in found.items() if tensor.numel()]


def noisy(step: int, rank: int) -> Tensor:
    """Some of the numbers of a parameter large, others small, and two rows of none."""
    sizes = torch.randn(sum(NUMBERS.values()), generator=torch.Generator().manual_seed(1))
    by_name(sizes)["table.weight"][7 * WIDTH : 9 * WIDTH] = 0.0
    noise = torch.randn(len(sizes), generator=torch.Generator().manual_seed(100 * step + rank))
    return sizes * (0.3 + noise) / 10


def train(engine: Engine, first: int, last: int, batch: Batch = noisy) -> list[float]:
    """The norms that its steps report."""
    norms = []
    accumulation, rank = engine.gradient_accumulation_steps(), engine.groups.dp.rank
    for step in range(first, last):
        for micro in range(accumulation):
            report = None
            engine.backward(engine(batch(accumulation * step + micro, rank)))
            report = engine.step() or engine.core.last_report
        norms.append(report.grad_norm if report is not None else 0.0)
    return norms


def same(found: Sequence[dict[str, Tensor]], wanted: Sequence[dict[str, Tensor]]) -> bool:
    """On all ranks."""
    return all(torch.equal(one[name], other[name]) for one, other in zip(found, wanted, strict=True) for name in one)


def all_state(engine: Engine) -> list[Tensor]:
    """Of this rank: masters, states, and what is owed."""
    kept = [bucket.master_state.view(kind) for bucket in engine.core.buckets for kind in bucket.master_state.kinds]
    owed = [owed for line in engine.core.compressed_exchanges
            for owed in (line.one_bit_mean.worker_error, line.one_bit_mean.server_error)]
    return [tensor.clone() for tensor in (*kept, *owed)]


# ---- what both compressed optimizers are asked, by an engine of theirs and batches -----------------------------------

Make = Callable[[int], Engine]  # stage -> an engine


def gpt2_trained(rank: int, world: int, tp: int, settings: dict[str, Any], steps: int) -> tuple[Any, ...]:
    """Weights, those of them that every tensor parallel rank has, this rank's place among them, and the rule's
    scalars."""
    grid = groups.build(tp)
    engine = gpt2_engine(configure_gpt2(**{**settings, "model_parallel_size": tp, "clip_grad": 0.5, "batch_size": 2,
                                           "global_batch_size": 4}), grid)
    for step in range(steps):
        rows = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(step))
        engine.backward(gpt2_loss(engine, rows.chunk(2)[grid.dp.rank]))
        engine.step()
    assert engine.compressed_exchanges
    slots = [slot for line in engine.compressed_exchanges for slot in line.layout.slots]
    replicated = [slot.name for slot in slots if slot.partition is None]
    return weights(engine), replicated, grid.tp.rank, engine.rule.scalars()


def saved(rank: int, world: int, make: Make, batch: Batch, folder: str, stage: int, at: int) -> tuple[Any, Any]:
    engine = make(stage)
    train(engine, 0, at, batch)
    engine.save_checkpoint(folder, tag="kept")
    train(engine, at, at + 4, batch)
    return all_state(engine), engine.core.rule.scalars()


def resumed(rank: int, world: int, make: Make, batch: Batch, folder: str, stage: int, at: int) -> tuple[Any, Any]:
    engine = make(stage)
    engine.load_checkpoint(folder, tag="kept")
    engine.save_checkpoint(folder, tag="again")  # knows what it has not looked at yet
    engine = make(stage)
    engine.load_checkpoint(folder, tag="again")
    train(engine, at, at + 4, batch)
    return all_state(engine), engine.core.rule.scalars()


def assert_goes_on_bit_for_bit(make: Make, batch: Batch, folder: Path, stage: int, at: int) -> None:
    kept, again = (run_ranks(work, 3, make, batch, str(folder), stage, at) for work in (saved, resumed))
    for (one, knows), (other, knew) in zip(kept, again, strict=True):
        assert len(one) > 4 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert knows == knew


def owed(rank: int, world: int, make: Make, batch: Batch, folder: str, stage: int, at: int,
         saves: bool) -> tuple[dict[str, Tensor], Any]:
    """By parameter, what all ranks and servers owe: this rank's part of the mean; and what the rule knows."""
    engine = make(stage)
    if saves:
        train(engine, 0, at, batch)
        engine.save_checkpoint(folder, tag="kept")
    else:
        engine.load_checkpoint(folder, tag="kept")
    found: dict[str, Tensor] = {}
    for line in engine.core.compressed_exchanges:
        for slot in line.layout.slots:
            found[slot.name] = line.one_bit_mean.worker_error[slot.offset : slot.end] / world
        for segment in line.layout.segments(rank):
            own = line.one_bit_mean.server_error[segment.shard_offset : segment.shard_offset + segment.count]
            found[segment.slot.name][segment.slot_offset : segment.slot_offset + segment.count] += own
    knows = engine.core.rule.scalars()
    train(engine, at, at + 2, batch)
    assert all(weight.isfinite().all() for weight in weights(engine).values())
    return found, knows


def assert_mean_of_debts_stays(make: Make, batch: Batch, folder: Path, stages: tuple[int, int], at: int,
                               ranks: int) -> None:
    """Saved on two ranks, loaded on others at another stage."""
    kept = run_ranks(owed, 2, make, batch, str(folder), stages[0], at, True)
    again = run_ranks(owed, ranks, make, batch, str(folder), stages[1], at, False)
    assert all(knows == kept[0][1] for _, knows in (*kept, *again))
    for name, _ in with_numbers(kept[0][0]):
        wanted, found = (sum(debts[name].double() for debts, _ in by_rank) for by_rank in (kept, again))
        assert wanted.abs().max() > 0 and (found - wanted).abs().max() <= 1e-6 * wanted.abs().max(), name


class Flat:
    """Where parameters are in a buffer that ranks exchange: each begins at a multiple of 128, those that decay first,
    and every rank serves an equal chunk of such multiples."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        parameters = sorted(Net().named_parameters(), key=lambda named: named[1].dim() < 2)
        self.shapes, self.places, end = {name: parameter.shape for name, parameter in parameters}, {}, 0
        for name, parameter in parameters:
            self.places[name] = slice(end, end + parameter.numel())
            end += -(-parameter.numel() // 128) * 128
        chunk = -(--(-end // ranks) // 128) * 128
        self.numel = chunk * ranks
        cuts = [(max(place.start, low), min(place.stop, low + chunk)) for low in range(0, self.numel, chunk)
                for place in self.places.values()]
        self.segments = [slice(start, stop) for start, stop in cuts if start < stop]
        """Of one parameter in one chunk, which have one size together."""

    def say(self, x: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
        """One bit for each number that has a variance, times the typical size of its segment."""
        said = np.zeros_like(x)
        for part in self.segments:
            live = v[part] != 0
            size = np.sqrt((x[part][live] ** 2).sum() / max(1, live.sum()))
            said[part] = np.where(x[part] >= 0, size, -size) * live
        return said

    def forget_negligible(self, v: NDArray[np.float64]) -> None:
        """What is below a millionth of the mean of its parameter counts as none."""
        for place in self.places.values():
            if place.start < place.stop:
                v[place][v[place] <= 1e-6 * v[place].mean()] = 0
