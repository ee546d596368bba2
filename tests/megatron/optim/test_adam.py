"""Adam on a CPU, tile by tile: no bit differs from torch's kernel over whole spans, and 16-bit weights are written. The
fused kernel of a GPU, without one: its numbers in Triton's interpreter, its compilation for Hopper, the bytes it moves.
That needs Triton, which comes with requirements-test.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optim import adam
from megatron.optim.adam import AdamW
from megatron.optim.rule import StepScalars, UpdateSegment
from tests.covering import pairs
from tests.kernels import compiled, interpreted
from tests.megatron.counting import Launches
from tests.megatron.optim.test_rules import segments_of

TILE = 256
LENGTHS = [3 * TILE, 5, 2 * TILE + 37, TILE]
"""Of the spans: whole tiles, less than a vector, an odd tail, one tile."""
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
STATES = ("exp_avg", "exp_avg_sq")
STEPS = 3

Flat = dict[str, Tensor]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "CACHE_TILE_NUMEL", TILE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def made() -> Flat:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(sum(LENGTHS), generator=generator).square() for name in ("master", *STATES)}


def grad_of(step: int, kind: torch.dtype) -> Tensor:
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(step)).to(kind)


def spans_of(flat: Flat, grad: Tensor, narrow: Tensor | None) -> Iterator[UpdateSegment]:
    """Odd lengths: only the first is aligned."""
    return segments_of(flat["master"], grad, {name: flat[name] for name in STATES}, LENGTHS, narrow)


def by_torch(flat: Flat, grad: Tensor, rule: AdamW, at: StepScalars) -> None:
    """Each span whole, by torch's kernel."""
    kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    count = at.count if rule.bias_correction else torch.tensor(torch.inf)
    for span in spans_of(flat, grad.float(), None):
        kernel([span.master], [span.grad], *([span.states[name]] for name in STATES), [], [count], lr=HYPER["lr"],
               beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
               grad_scale=at.divisor, found_inf=at.skip)


@pytest.mark.parametrize("kind, narrow_kind, rule, divided, skip", pairs(
    [torch.float32, torch.bfloat16, torch.float16], [None, torch.bfloat16, torch.float16],
    [AdamW(), AdamW(decoupled=False), AdamW(bias_correction=False)], [False, True], [None, False, True]))
def test_tiles_equal_whole_spans_to_the_bit(
    kind: torch.dtype, narrow_kind: torch.dtype | None, rule: AdamW, divided: bool, skip: bool | None
) -> None:
    found, expected = made(), made()
    narrow = None if narrow_kind is None else torch.zeros(sum(LENGTHS), dtype=narrow_kind)
    for step in range(1, STEPS + 1):
        at = StepScalars(torch.tensor(float(step)), torch.tensor(3.7) if divided else None,
                         None if skip is None else torch.tensor(float(skip)))
        assert rule.step([*spans_of(found, grad_of(step, kind), narrow)], HYPER, at)
        by_torch(expected, grad_of(step, kind), rule, at)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(value, made()[name]) == bool(skip)
    assert narrow is None or torch.equal(narrow, found["master"].to(narrow_kind))


def test_a_weight_is_narrowed_before_the_next_tile_is_updated_and_wide_spans_are_not_cut() -> None:
    names: list[str] = []

    class Order(Launches):
        def __torch_dispatch__(self, func: Any, *rest: Any, **kwargs: Any) -> Any:
            names.append(func._schema.name.partition("::")[2])
            return super().__torch_dispatch__(func, *rest, **kwargs)

    at, grad = StepScalars(torch.tensor(1.0)), grad_of(1, torch.bfloat16)
    span, *_ = spans_of(made(), grad, torch.zeros_like(grad))
    with Order() as counted:
        AdamW().step([span], HYPER, at)
    tile = ["copy_", "_fused_adamw_", "copy_"]
    assert [name for name in names if name in tile] == tile * 3
    assert counted.by_name["empty"] == 1, "one buffer for all tiles"
    wide = [*spans_of(made(), grad_of(1, torch.float32), None)]
    with Launches() as counted:
        AdamW().step(wide, HYPER, at)
    assert counted.kernels == {"_fused_adamw_": len(LENGTHS)}


# ---- the fused kernel ------------------------------------------------------------------------------------------------


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
