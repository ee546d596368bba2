"""Kernels are used where they work. Elsewhere torch's operators are, and a warning says what that costs."""

from __future__ import annotations

import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mpu.device import load_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def missing() -> ModuleType:
    raise ImportError("No module named 'triton'")


def broken(device: torch.device) -> None:
    raise RuntimeError("no C compiler")


def of(runs: bool = True, try_out: Any = lambda device: None) -> Any:
    return SimpleNamespace(runs_on=lambda device: runs, try_out=try_out)


def test_kernels_that_work_are_used() -> None:
    kernels = of()
    assert load_kernels(lambda: kernels, GPU, "slow") is kernels


@pytest.mark.parametrize("load", [missing, lambda: of(runs=False)])
def test_a_cpu_needs_none(load: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_kernels(load, CPU, "slow") is None


@pytest.mark.parametrize("load, why", [(missing, "No module named 'triton'"),
                                       (lambda: of(try_out=broken), "no C compiler")])
def test_a_gpu_without_them_warns_of_what_is_lost_and_why(load: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=f"twice the bytes: {why}"):
        assert load_kernels(load, GPU, "twice the bytes") is None
