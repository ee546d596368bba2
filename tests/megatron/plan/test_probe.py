"""What the probe measures on GPUs, as far as a CPU shows: sizes, looks at the clock, and bytes on the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.plan import probe
from megatron.plan.memory import peak_memory
from megatron.plan.probe import Probe, ProbeTimer
from megatron.plan.probe_fit import SIZES
from mpu import groups
from mpu.groups import SOLO, Groups
from tests.distributed import run_ranks
from tests.wires import accelerator_side, counted

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PEAK = 1e15
"""FLOP/s that no GPU of today exceeds by far in 16 bits."""
A_LOOK = 20e-6
"""Seconds that launching and waiting take."""


class FakeGpu:
    """A clock that moves by what is done: a call and a look each take their time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: float) -> None:
        self.seconds, self.calls, self.looks, self._work = 0.0, 0, 0, work
        monkeypatch.setattr("torch.cuda.synchronize", self.look)
        monkeypatch.setattr("time.perf_counter", lambda: self.seconds)

    def look(self, device: torch.device) -> None:
        self.looks += 1
        self.seconds += A_LOOK

    def call(self) -> None:
        self.calls += 1
        self.seconds += self._work


@pytest.mark.parametrize("work", [2e-6, 1e-5, 1e-3, 0.3])
@pytest.mark.parametrize("kind", ["seconds", "collective_seconds"])
def test_looks_at_the_clock_of_a_gpu_do_not_count(kind: str, work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, work)
    assert getattr(ProbeTimer(CUDA, SOLO), kind)(gpu.call) == pytest.approx(work, rel=0.06)
    assert gpu.seconds < 5


def test_on_a_cpu_every_call_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, 1e-5)
    taken = list[int]()
    real = ProbeTimer.once
    monkeypatch.setattr(ProbeTimer, "once", lambda self, work, calls=1: taken.append(calls) or real(self, work, calls))
    assert ProbeTimer(CPU, SOLO).seconds(gpu.call) == pytest.approx(1e-5)
    assert ProbeTimer(CPU, SOLO).collective_seconds(gpu.call) == pytest.approx(1e-5)
    assert set(taken) == {1}


def test_the_largest_sizes_keep_a_gpu_busy() -> None:
    sizes = SIZES["cuda"]
    assert 2 * sizes.rows[-1] * sizes.widths[-1]**2 / PEAK > 50 * A_LOOK
    assert all(heads >= 128 for _, heads in sizes.lengths)  # as many as there are multiprocessors
    assert sizes.rows[-1] >= 16384 and sizes.widths[-1] >= 8192 and sizes.bytes[-1] == 2**30
    largest = sizes.shapes[-1]
    assert 6 * largest.batch * largest.sequence * 12 * largest.hidden**2 / PEAK > 50 * A_LOOK
    assert Probe(ProbeTimer(CUDA, SOLO), "bf16", Groups(), Groups()).sizes is sizes
    assert Probe(ProbeTimer(CPU, SOLO), "bf16", Groups(), Groups()).sizes is SIZES["cpu"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_its_models_fit_a_card_of_16_gb_side_by_side(precision: str) -> None:
    for shape in SIZES["cuda"].shapes:
        both = (shape, shape.larger)
        assert sum(peak_memory(one.run(precision, "cuda")).total for one in both) < 12 * 2**30
    assert peak_memory(SIZES["cuda"].largest.run(precision, "cuda")).total < 12 * 2**30


@pytest.mark.parametrize("kind, ranks, hidden", [
    ("cpu", 1, None), ("cpu", 2, 128), ("cpu", 3, 384), ("cpu", 5, None),
    ("cuda", 2, 256), ("cuda", 8, 1024), ("cuda", 3, None)])
def test_tensor_parallel_ranks_share_the_smallest_model_that_they_can(
        kind: Any, ranks: int, hidden: int | None) -> None:
    shape = SIZES[kind].cut(ranks)
    assert (shape and shape.hidden) == hidden
    if shape:
        run = shape.run("fp32", kind, ranks)
        assert (run.tp, run.dp) == (ranks, 1) and shape.heads % ranks == 0


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_grow(kind: Any) -> None:
    sizes = SIZES[kind]
    for several in (sizes.rows, sizes.widths, sizes.lengths, sizes.elements, sizes.bytes, sizes.logits,
                    [shape.batch * shape.sequence * shape.hidden for shape in sizes.shapes]):
        assert list(several) == sorted(several)
    assert 2 * sizes.bytes[-2] <= sizes.bytes[-1]


def test_no_small_model_is_compiled_and_products_are_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(shape.config("bf16").train.compile is False for sizes in SIZES.values() for shape in sizes.shapes)
    found = list[str]()

    def products(_: Probe) -> None:
        found.append(torch.get_float32_matmul_precision())
        raise InterruptedError

    monkeypatch.setattr(Probe, "sweep", products)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    before = torch.get_float32_matmul_precision()
    try:
        for device in (CUDA, CPU):
            with pytest.raises(InterruptedError):
                Probe(ProbeTimer(device, SOLO), "fp32", Groups(), Groups()).rates("made up")
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == ["high", "highest"]


def sizes_of_exchanges(rank: int, world: int, on_gpu: bool) -> list[tuple[str, int]]:
    """(kind, bytes that travel)"""
    probe.SIZES["cpu"] = replace(SIZES["cpu"], bytes=(2**12, 2**16))
    with accelerator_side(on_gpu), counted() as sent:
        found = Probe(ProbeTimer(CPU, groups.build(1).world), "bf16", Groups(), Groups())
        for size in found.sizes.bytes:
            found._exchange(size)
    return [(kind, numel * dtype.itemsize) for kind, numel, dtype in sent]


def test_exchanges_are_measured_by_the_bytes_that_travel() -> None:
    for found in run_ranks(sizes_of_exchanges, 2, True):
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            assert {size for one, size in found if one == kind and size >= 2**12} == {2**12, 2**16}, kind


def test_a_probe_of_gpus_measures_no_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="finds no cuda here: .* --device cpu"):
        probe.main([str(tmp_path / "rates.json"), "made up", "fp32", "cuda"])
