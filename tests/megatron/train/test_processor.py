"""Whoever trains in a precision that the CPU only emulates reads a warning, and nobody else does: not on a busy
machine, and not where a script chose the precision."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.train import processor
from megatron.train.processor import MAX_SLOWDOWN, ROUNDS, has_native_products, slowdown
from tests.megatron.helpers import ROOT

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Load = Callable[[int], float]
"""Number of the measurement, warm-up included -> by how much the other processes stretch it."""
FIRST = 2
"""Measurements that only warm up."""


class Machine:
    """Products that take 1 in fp32 and `times` in 16 bits, stretched by a load."""

    def __init__(self, times: float, load: Load = lambda number: 1.0) -> None:
        self.times, self.load, self.asked = times, load, list[str]()

    def __call__(self, precision: str) -> float:
        self.asked.append(precision)
        return (1.0 if precision == "fp32" else self.times) * self.load(len(self.asked) - 1)


def test_emulated_products_are_found_idle_and_under_load() -> None:
    assert slowdown("bf16", Machine(37.0)) == 37.0
    for seed in range(200):
        rng = random.Random(seed)
        found = slowdown("bf16", Machine(37.0, lambda number: rng.uniform(1, 10)))
        assert found is not None and found > MAX_SLOWDOWN


@pytest.mark.parametrize("times", [0.1, 0.5, 1.0, 1.5, MAX_SLOWDOWN])
def test_a_load_never_looks_like_a_slow_precision(times: float) -> None:
    """Steady, coming or going at any moment and by any factor, or restless."""
    measurements = FIRST + 2 * ROUNDS
    for factor in (1.0, 1.3, 3.0, 16.0, 1000.0):
        for moment in range(measurements + 1):
            assert slowdown("bf16", Machine(times, lambda number: factor if number >= moment else 1.0)) is None
            assert slowdown("bf16", Machine(times, lambda number: factor if number < moment else 1.0)) is None


@pytest.mark.parametrize("times", [0.5, 1.0, 1.5])
def test_a_restless_load_is_mistaken_less_than_once_in_a_thousand_starts(times: float) -> None:
    """Even one that stretches every measurement by a factor of its own, from 1 to 100."""
    rng = random.Random(7)
    found = [slowdown("bf16", Machine(times, lambda number: 100 ** rng.random())) for _ in range(5000)]
    assert sum(value is not None for value in found) < 5


def test_the_two_precisions_are_measured_in_turn_and_a_fast_one_only_once() -> None:
    slow, fast = Machine(37.0), Machine(0.5)
    slowdown("fp16", slow)
    assert slow.asked == ["fp32", "fp16"] * (1 + ROUNDS)
    slowdown("fp16", fast)
    assert fast.asked == ["fp32", "fp16"] * 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], None]:
    """A processor whose 16-bit products take `times` as long, and that lists them or does not."""
    def pretend(times: float, native: bool) -> None:
        monkeypatch.setattr(processor, "slowdown", lambda precision: times if times > MAX_SLOWDOWN else None)
        monkeypatch.setattr(processor, "has_native_products", lambda precision: native)
    return pretend


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_warning_names_the_flag_that_takes_the_precision_back(machine, precision: str) -> None:
    machine(37.0, False)
    note, = processor.precision_notes(precision, CPU)
    assert "about 37 times" in note and f"--no-{precision}" in note and "\n" not in note


@pytest.mark.parametrize(("precision", "device", "times", "native"), [
    pytest.param("bf16", CPU, 1.5, False, id="bf16 that is not a burden"),
    pytest.param("bf16", CPU, 50.0, True, id="bf16 that the scripts choose"),
    pytest.param("fp32", CPU, 50.0, False, id="fp32"),
    pytest.param("bf16", GPU, 50.0, False, id="a GPU"),
])
def test_silent_where_nothing_is_lost(machine, precision: str, device: torch.device, times: float,
                                      native: bool) -> None:
    machine(times, native)
    assert processor.precision_notes(precision, device) == ()


@pytest.mark.parametrize(("line", "bf16", "fp16"), [
    ("flags\t\t: fpu avx512f avx512_bf16 avx512_fp16 amx_bf16", True, True),
    ("flags\t\t: fpu amx_bf16 amx_tile", True, False),
    ("flags\t\t: fpu avx2 avx512f avx512_vnni", False, False),
    ("flags\t\t: fpu not_avx512_bf16", False, False),
    ("", False, False),
])
def test_the_processors_own_list_is_read(line: str, bf16: bool, fp16: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbogomips: 1\n")
    assert (has_native_products("bf16",
                                tmp_path / "cpuinfo"), has_native_products("fp16",
                                                                           tmp_path / "cpuinfo")) == (bf16, fp16)


def test_an_unknown_processor_lists_nothing(tmp_path: Path) -> None:
    assert not has_native_products("bf16", tmp_path / "absent")


def test_the_scripts_ask_this_module_and_nobody_else() -> None:
    """So a script never starts a run that is then warned of its precision."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "megatron.train.processor"], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["--bf16"] if has_native_products("bf16") else [])
    assert "torch" not in done.stderr, "they ask before every run"
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").glob("*.sh"))
    assert "megatron.train.processor" in scripts and "cpuinfo" not in scripts


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_is_measured_in_processor_time(precision: str) -> None:
    assert 0 < processor.time_matmuls(precision) < 5


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        processor.precision_notes("bf16", CPU)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
