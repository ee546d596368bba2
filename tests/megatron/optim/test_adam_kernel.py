"""The fused kernel of the update, without a GPU: its numbers in Triton's interpreter, its compilation for Hopper, the
bytes it moves. Needs Triton, which comes with requirements-test.txt."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kernels import compiled, interpreted


@pytest.fixture
def triton() -> Any:
    return pytest.importorskip("triton", reason="Triton is not installed: it comes with requirements-test.txt")


def test_the_kernel_computes_what_it_should_in_the_interpreter(triton: Any) -> None:
    assert re.search(r"\b2\d passed", interpreted("tests/megatron/optim/adam_kernel_cases.py"))


@pytest.mark.slow
def test_it_does_so_in_every_case(triton: Any) -> None:
    assert re.search(r"\b2\d passed", interpreted("-m", "slow", "tests/megatron/optim/adam_kernel_cases.py"))


@pytest.mark.parametrize("grad, narrow, bytes_of_a_weight", [
    ("bfloat16", "bfloat16", 28), ("float16", "float16", 28), ("float32", "bfloat16", 30), ("float32", None, 28)])
def test_the_kernel_compiles_for_hopper_and_moves_each_number_once(
    triton: Any, grad: str, narrow: str | None, bytes_of_a_weight: int
) -> None:
    from megatron.optim import adam_kernel as ours
    tables = {"rows": "*i64", "row_of": "*i32", "count": "*fp32", "divisor": "*fp32", "skip": "*fp32"}
    kinds = {name: "fp32" for name in ours.update_block.arg_names} | tables
    constants = {"GRAD": getattr(triton.language, grad), "LP_DTYPE": narrow and getattr(triton.language, narrow),
                 "DECOUPLED": True, "LENGTH": ours._LENGTH, "FIRST": ours._FIRST, "ROW": ours._ROW,
                 "BLOCK": ours._BLOCK}
    made = compiled(ours.update_block, kinds, constants, set(tables), ours._WARPS)
    assert len(made.asm["cubin"]) > 1000 and "convert_layout" not in made.asm["ttgir"]
    moved = [4 * int(count) for count in re.findall(r"(?:ld|st)\.global[.\w:]*\.v([24])\.b32", made.asm["ptx"])]
    weights_of_a_thread = ours._BLOCK // (32 * ours._WARPS)
    assert sum(moved) / weights_of_a_thread == bytes_of_a_weight
    assert set(moved) <= {8, 16}, "four weights at once"
