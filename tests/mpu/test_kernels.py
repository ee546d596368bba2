"""Kernels are used where they work. Elsewhere torch's operators are, and a warning says what that costs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpu.device import load_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def broken(device: torch.device) -> None:
    raise RuntimeError("no C compiler")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Kernels that work, kernels that do not, and none."""
    made: dict[str, Any] = {"works": SimpleNamespace(try_out=lambda device: None),
                            "fails": SimpleNamespace(try_out=broken)}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    load_kernels.cache_clear()
    yield made
    load_kernels.cache_clear()


def test_kernels_that_work_are_used_on_a_gpu_and_in_the_interpreter(modules: dict[str, Any],
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels("works", GPU, "slow") is modules["works"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert load_kernels("works", CPU, "slow") is modules["works"]


@pytest.mark.parametrize("module", ["works", "fails", "missing"])
def test_a_cpu_needs_none(module: str, modules: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_kernels(module, CPU, "slow") is None


@pytest.mark.parametrize("module, why", [("missing", "No module named 'missing'"), ("fails", "no C compiler")])
def test_a_gpu_without_them_warns_of_what_is_lost_and_why(module: str, why: str, modules: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=f"twice the bytes: {why}"):
        assert load_kernels(module, GPU, "twice the bytes") is None
