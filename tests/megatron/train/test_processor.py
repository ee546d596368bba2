"""Who trains in a precision that his processor only emulates is told so."""

from __future__ import annotations

import pytest
import torch

from megatron.train import processor

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def slower(monkeypatch: pytest.MonkeyPatch):
    """Make 16-bit products take `times` as long as those of fp32."""
    def pretend(times: float) -> None:
        monkeypatch.setattr(processor, "seconds_of_products", lambda dtype: 1.0 if dtype == torch.float32 else times)
    return pretend


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_emulated_products_are_told_with_the_flag_that_takes_them_back(slower, precision: str):
    slower(37.0)
    note, = processor.notes(precision, CPU)
    assert "about 37 times" in note and f"--no-{precision}" in note and "\n" not in note


@pytest.mark.parametrize(("precision", "device", "times"), [
    pytest.param("bf16", CPU, 0.4, id="fast bf16"),
    pytest.param("bf16", CPU, 1.5, id="bf16 that is no burden"),
    pytest.param("fp32", CPU, 50.0, id="fp32"),
    pytest.param("bf16", GPU, 50.0, id="a GPU"),
])
def test_silent_where_nothing_is_lost(slower, precision: str, device: torch.device, times: float):
    slower(times)
    assert processor.notes(precision, device) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_precision_is_measured(dtype: torch.dtype):
    assert 0 < processor.seconds_of_products(dtype) < 5
