"""Which kind of work each moment of a trace belongs to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron.distributed.rank_status import EVALUATION, FORWARD, OPTIMIZER_STEP, READING, TRAINING
from megatron.trace.trace_window import (ATTENTION, LOSS, PRODUCTS, Interval, format_breakdown, operations_with_kinds,
                                         time_breakdown, time_by_kind)


def moments(stretches: list[Interval], moment: int) -> bool:
    return any(start <= moment < stop for start, stop, _ in stretches)


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_belongs_to_the_first_kind_that_has_it(seed: int) -> None:
    draw = random.Random(seed)
    kinds = {name: [Interval(start, start + draw.randrange(12))
                    for start in draw.choices(range(-5, 95), k=draw.randrange(9))] for name in "abcd"}
    wanted = dict.fromkeys([*kinds, ""], 0)
    for moment in range(80):
        wanted[next((name for name, its in kinds.items() if moments(its, moment)), "")] += 1
    assert time_by_kind(kinds, (0, 80)) == wanted


@pytest.mark.parametrize("kind, names", [
    (PRODUCTS, "aten::mm aten::addmm aten::bmm aten::linear mkldnn::_linear_pointwise aten::_scaled_mm"),
    (ATTENTION, "aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention_for_cpu_backward "
     "aten::_flash_attention_forward aten::_efficient_attention_backward"),
    (LOSS, "_LinearCrossEntropyMean _LinearCrossEntropyMeanBackward _VocabParallelCrossEntropyBackward "
     "aten::cross_entropy_loss aten::_log_softmax"),
    ("", "aten::add aten::native_layer_norm aten::gelu aten::mmean aten::addcmul_ aten::t aten::copy_ aten::_softmax"),
])
def test_operations_are_known_by_name(kind: str, names: str) -> None:
    events = [op(name, start, 1) for start, name in enumerate(names.split())]
    assert [found for _, found in operations_with_kinds(events)] == [kind] * len(events)


def ranges(place: str, *changes: tuple[float, str]) -> list[dict[str, Any]]:
    """The engine's successive states at one place, each from its time to the next one's; "" is none."""
    return [{"cat": "user_annotation", "name": f"{place}: {name}", "ts": start, "dur": stop - start, "tid": 7}
            for (start, name), (stop, _) in zip(changes, [*changes[1:], (100, "")]) if name]


def op(name: str, start: float, length: float, thread: int = 7, number: int = 0) -> dict[str, Any]:
    return {"cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": thread, "args": {"External id": number}}


def test_on_a_cpu_the_thread_that_trains_is_looked_at() -> None:
    said = [*ranges("activity", (0, READING), (10, TRAINING)),
            *ranges("phase", (10, FORWARD), (60, OPTIMIZER_STEP), (80, "")),
            *ranges("exchange", (20, "blocks.0, forward"), (26, ""), (70, "collective"), (75, ""))]
    events = [op("AddmmBackward0", 29, 11), op("aten::linear", 30, 10), op("aten::mm", 31, 5),
              op("_LinearCrossEntropyMean", 40, 10), op("aten::mm", 41, 8), op("aten::add", 50, 5),
              op("aten::scaled_dot_product_attention", 11, 12), op("aten::bmm", 12, 3),
              op("aten::mm", 61, 4), op("aten::mm", 82, 10, thread=8)]
    found = time_breakdown([*said, *events], 7, (0, 100), on_host=True)
    assert found == {"products": 10, "attention": 9, "loss": 10, "optimizer": 15, "exchange not hidden": 11, "data": 10,
                     "evaluation and saves": 0, "other": 35}
    assert format_breakdown(found) == (
        "products 10 %, attention 9 %, loss 10 %, optimizer 15 %, exchange not hidden 11 %, "
        "data 10 %, other 35 %")


def numbered(event: dict[str, Any], sequence: int, backward: bool = False) -> dict[str, Any]:
    return {**event, "args": {**event["args"], "Sequence number": sequence, "Fwd thread id": int(backward)}}


def test_a_step_backward_is_of_what_it_differentiates() -> None:
    """Attention with dropout is written out: its gradient is made of products, a softmax and so on. What comes before
    it has the same number as its first operation, and makes no step backward of its own."""
    events = [numbered(op("aten::detach", 0, 1), 4), numbered(op("aten::scaled_dot_product_attention", 1, 9), 4),
              numbered(op("aten::bmm", 2, 2), 4), numbered(op("aten::bmm", 5, 2), 5),
              numbered(op("aten::mm", 10, 5), 6),
              numbered(op("aten::gelu", 15, 1), 7), op("aten::bmm", 31, 4), op("aten::bmm", 41, 4),
              numbered(op("BmmBackward0", 30, 6), 5, True), numbered(op("BmmBackward0", 40, 6), 4, True),
              numbered(op("MmBackward0", 50, 7), 6, True), numbered(op("GeluBackward0", 60, 3), 7, True)]
    found = time_breakdown(events, 7, (0, 100), on_host=True)
    assert (found["attention"], found["products"], found["other"]) == (9 + 6 + 6, 5 + 7, 67)


def test_what_an_evaluation_exchanges_is_its_own() -> None:
    said = [*ranges("activity", (0, TRAINING), (50, EVALUATION), (90, TRAINING)),
            *ranges("exchange", (40, "collective"), (60, ""), (95, "collective"))]
    found = time_breakdown(said, 7, (0, 100), on_host=True)
    assert (found["evaluation and saves"], found["exchange not hidden"]) == (40, 15)


def kernel(name: str, start: float, length: float, launch: int, operation: int | None = None,
           cat: str = "kernel") -> dict[str, Any]:
    known = {} if operation is None else {"External id": operation}
    return {"cat": cat, "name": name, "ts": start, "dur": length, "tid": 100, "args": {"correlation": launch, **known}}


def launch(start: float, number: int) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start, "dur": 0.1, "tid": 7,
            "args": {"correlation": number}}


def test_on_an_accelerator_the_device_is_looked_at() -> None:
    """The host launches ahead; backwards are in a thread of their own, and Adam's kernel is launched by Python."""
    said = [*ranges("activity", (0, READING), (5, TRAINING)),
            *ranges("phase", (5, FORWARD), (30, OPTIMIZER_STEP), (40, "")),
            *ranges("exchange", (6, "collective"), (9, ""))]
    events = [op("aten::linear", 6, 2), op("aten::addmm", 6.5, 1, number=1),
              op("_LinearCrossEntropyMeanBackward", 8, 4, thread=9),
              op("aten::mm", 9, 1, thread=9, number=2), op("aten::add", 12, 1, number=3),
              {**op("detached", 3, 1), "args": {}},
              op("aten::copy_", 34, 1, number=5), op("c10d::_allgather_base_", 32, 1, number=77),
              *(launch(at, number) for number, at in enumerate((7, 9, 12, 32, 33, 35, 20, 36), 1)),
              kernel("generated_3", 10, 20, 1, 1), kernel("gemm", 30, 10, 2, 2), kernel("elementwise", 40, 5, 3, 3),
              kernel("ncclDevKernel_AllGather", 20, 40, 4, 77), kernel("_adam", 60, 10, 5),
              kernel("Memcpy HtoD (Pinned -> Device)", 65, 15, 6, 5, cat="gpu_memcpy"),
              kernel("sm90_xmma_gemm_bf16", 82, 4, 7), kernel("Memset (Device)", 86, 1, 8, cat="gpu_memset")]
    found = time_breakdown([*said, *events], 7, (0, 100), on_host=False)
    assert found == {"products": 24, "attention": 0, "loss": 10, "optimizer": 11, "exchange not hidden": 15, "data": 5,
                     "evaluation and saves": 0, "other": 5, "copies": 10, "idle": 20}
    assert sum(found.values()) == 100


def test_a_device_that_the_profiler_does_not_see_is_told() -> None:
    found = time_breakdown([op("aten::mm", 1, 5)], 7, (0, 10), on_host=False)
    assert found == {} and format_breakdown(found).startswith("the profiler has seen nothing of the device")
