"""The kernel of norms without a GPU: its numbers in Triton's interpreter, its compilation for Hopper. It needs Triton,
which comes with requirements-test.txt."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.kernels import compiled, interpreted


@pytest.fixture
def triton() -> Any:
    return pytest.importorskip("triton", reason="Triton is not installed: it comes with requirements-test.txt")


def test_the_kernel_computes_the_norms_in_the_interpreter(triton: Any) -> None:
    told = interpreted("--accelerator-side", "-rA", "tests/mpu/norm_kernel_cases.py")
    assert "PASSED tests/mpu/norm_kernel_cases.py::test_the_kernel_is_what_runs" in told


@pytest.mark.slow
def test_the_norms_of_gradients_pass_with_the_interpreted_kernel(triton: Any) -> None:
    interpreted("--accelerator-side", "tests/mpu/test_grads.py")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles_for_hopper_and_reads_16_bytes_at_once_without_fp64(triton: Any, dtype: str) -> None:
    from mpu import norm_kernel
    made = compiled(norm_kernel.row_norms_kernel, {"flat": f"*{dtype}", "norms": "*fp32", "count": "i64"},
                    {"WIDTH": 128, "ROWS": norm_kernel._ROWS}, {"flat", "norms", "count"}, norm_kernel._WARPS)
    assert len(made.asm["cubin"]) > 1000
    wide = Counter(re.findall(r"(ld|st)\.global[.\w:]*\.v4\.b32", made.asm["ptx"]))
    assert wide["ld"] == {"fp32": 4, "bf16": 2, "fp16": 2}[dtype] and wide["st"] <= 1, "each element is read once"
    assert ".f64" not in made.asm["ptx"]
