"""The kernel of norms in numbers: run by test_norm_kernel.py in Triton's interpreter, and on a GPU as it is."""

from __future__ import annotations

import math

import pytest
import torch

from mpu.device import load_kernels
from mpu.grads import NORM_ROW, row_norms

norm_kernel = pytest.importorskip("mpu.norm_kernel",
                                  reason="Triton is not installed: it comes with requirements-test.txt")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_kernel_is_what_runs() -> None:
    assert load_kernels("mpu.norm_kernel", DEVICE, "") is norm_kernel


@pytest.mark.parametrize("dtype", norm_kernel.DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 1e25])
def test_norms_are_those_of_fp64(dtype: torch.dtype, rows: int, scale: float) -> None:
    x = (torch.randn(rows, NORM_ROW, generator=torch.Generator().manual_seed(rows)) * scale).to(dtype)
    x = x.where(x.isfinite(), 60000.0).to(DEVICE)
    out = torch.full((rows + 1,), 7.0, device=DEVICE)
    norm_kernel.norms_into(out[:rows], x)
    torch.testing.assert_close(out[:rows], x.double().norm(dim=1).float(), rtol=1e-6, atol=0)
    assert out[rows] == 7, "nothing is written beside them"


@pytest.mark.parametrize("dtype", norm_kernel.DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 64, 127])
def test_what_is_not_finite_makes_its_row_so(dtype: torch.dtype, value: float, place: int) -> None:
    x = torch.ones(40, NORM_ROW, dtype=dtype, device=DEVICE)
    x[5], x[21, place] = value, value
    bad = [row for row, finite in enumerate(row_norms(x.flatten()).isfinite().tolist()) if not finite]
    assert bad == [5, 21]


def test_the_largest_and_the_smallest_number_of_fp32() -> None:
    x = torch.zeros(3, NORM_ROW, device=DEVICE)
    x[0, 3], x[1, 9] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    assert row_norms(x.flatten()).tolist() == x.amax(1).tolist()
