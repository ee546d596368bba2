"""Which kind of work each moment of a trace belongs to."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from megatron.distributed.rank_status import ACTIVITY, EVALUATION, FORWARD, OPTIMIZER_STEP, PHASE, READING, TRAINING
from megatron.trace.export import MemoryLevel, downsample_levels, memory_levels, trace_page
from megatron.trace.recorder import (CollectiveRecord, Interval, StateTimeline, TraceRecorder, merge_intervals,
                                     time_by_kind)
from megatron.trace.time_breakdown import ATTENTION, LOSS, PRODUCTS, format_breakdown, operation_kind, time_breakdown


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
    for its in kinds.values():
        merged = merge_intervals(its, (0, 80))
        assert all(stop < start for (_, stop), (start, _) in zip(merged, merged[1:]))


@pytest.mark.parametrize("kind, names", [
    (PRODUCTS, "aten::mm aten::addmm aten::bmm aten::linear mkldnn::_linear_pointwise aten::_scaled_mm"),
    (ATTENTION, "aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention_for_cpu_backward "
     "aten::_flash_attention_forward aten::_efficient_attention_backward"),
    (LOSS, "_LinearCrossEntropyMean _LinearCrossEntropyMeanBackward _VocabParallelCrossEntropyBackward "
     "aten::cross_entropy_loss aten::_log_softmax"),
    ("", "aten::add aten::native_layer_norm aten::gelu aten::mmean aten::addcmul_ aten::t aten::copy_ aten::_softmax"),
])
def test_operations_are_known_by_name(kind: str, names: str) -> None:
    assert {name: operation_kind(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def recorded(**lines: list[tuple[float, str]]) -> TraceRecorder:
    found = TraceRecorder()
    found.timelines[ACTIVITY].changes = lines["activity"]
    found.timelines[PHASE].changes = lines["phase"]
    found.exchange_timeline.changes = lines.get("exchanging", [])
    return found


def op(name: str, start: float, length: float, thread: int = 7, number: int = 0) -> dict[str, Any]:
    return {"cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": thread, "args": {"External id": number}}


def test_on_a_cpu_the_thread_that_trains_is_looked_at() -> None:
    said = recorded(activity=[(0, READING), (10, TRAINING)], phase=[(10, FORWARD), (60, OPTIMIZER_STEP), (80, "")],
                    exchanging=[(70, "exchange"), (75, "")])
    said.collectives["entry", 1] = CollectiveRecord("blocks.0, forward", 12, awaited=20, stop=26)
    events = [op("AddmmBackward0", 29, 11), op("aten::linear", 30, 10), op("aten::mm", 31, 5),
              op("_LinearCrossEntropyMean", 40, 10), op("aten::mm", 41, 8), op("aten::add", 50, 5),
              op("aten::scaled_dot_product_attention", 11, 12), op("aten::bmm", 12, 3),
              op("aten::mm", 61, 4), op("aten::mm", 82, 10, thread=8)]
    found = time_breakdown(events, said, 7, (0, 100), on_host=True)
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
    said = recorded(activity=[(0, TRAINING)], phase=[(0, FORWARD)])
    found = time_breakdown(events, said, 7, (0, 100), on_host=True)
    assert (found["attention"], found["products"], found["other"]) == (9 + 6 + 6, 5 + 7, 67)


def test_what_an_evaluation_exchanges_is_its_own() -> None:
    said = recorded(activity=[(0, TRAINING), (50, EVALUATION), (90, TRAINING)], phase=[],
                    exchanging=[(40, "exchange"), (60, ""), (95, "exchange")])
    found = time_breakdown([], said, 7, (0, 100), on_host=True)
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
    said = recorded(activity=[(0, READING), (5, TRAINING)], phase=[(5, FORWARD), (30, OPTIMIZER_STEP), (40, "")],
                    exchanging=[(6, "exchange"), (9, "")])
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
    found = time_breakdown(events, said, 7, (0, 100), on_host=False)
    assert found == {"products": 24, "attention": 0, "loss": 10, "optimizer": 11, "exchange not hidden": 15, "data": 5,
                     "evaluation and saves": 0, "other": 5, "copies": 10, "idle": 20}
    assert sum(found.values()) == 100


def test_a_device_that_the_profiler_does_not_see_is_told() -> None:
    said = recorded(activity=[], phase=[])
    found = time_breakdown([op("aten::mm", 1, 5)], said, 7, (0, 10), on_host=False)
    assert found == {} and format_breakdown(found).startswith("the profiler has seen nothing of the device")


def test_what_is_said_twice_is_one_stretch() -> None:
    line = StateTimeline([(0, "a"), (1, "a"), (3, ""), (5, "a"), (6, "b")])
    assert line.intervals(9) == [Interval(0, 3, "a"), Interval(5, 6, "a"), Interval(6, 9, "b")]


def test_the_memory_is_that_of_the_accelerator_where_there_is_one() -> None:
    def noted(kind: int, time: float, total: int) -> dict[str, Any]:
        return {"name": "[memory]", "ts": time, "args": {"Device Type": kind, "Total Allocated": total}}

    assert memory_levels([noted(0, 2, 20), noted(0, 1, 10)]) == [(1, 10, True), (2, 20, True)]
    assert memory_levels([noted(0, 1, 10), noted(1, 3, 30)]) == [(3, 30, False)]


def test_a_thinned_curve_keeps_its_extremes() -> None:
    draw = random.Random(0)
    curve = [MemoryLevel(float(time), draw.randrange(10**6)) for time in range(20_000)]
    curve[7777] = MemoryLevel(7777.0, 10**9)
    found = downsample_levels(curve, 100)
    assert len(found) <= 2 * 101 and max(found, key=lambda level: level.total).time == 7777.0
    assert found == sorted(found) and downsample_levels(curve[:50], 100) == curve[:50]


def test_memory_that_only_went_is_drawn() -> None:
    """On a CPU what was there before the trace may go in it."""
    said = recorded(activity=[(0, TRAINING)], phase=[(0, FORWARD)])
    for found in ([MemoryLevel(1.0, -5,
                               True)], [MemoryLevel(1.0, 0,
                                                    True)], [MemoryLevel(1.0, -9, True),
                                                             MemoryLevel(2.0, -5, True)]):
        drawn = trace_page("t", {"other": 10.0}, 1, found, (found[0], ""), said, (0, 10))
        assert "nan" not in drawn and "<polygon" in drawn


@pytest.mark.parametrize("is_since, begins", [(False, "high"), (True, "low")])
def test_what_an_accelerator_had_given_out_before_the_trace_is_drawn_from_its_left_edge(
        is_since: bool, begins: str) -> None:
    said, found = recorded(activity=[(0, TRAINING)], phase=[(0, FORWARD)]), [MemoryLevel(4.0, 100, is_since)]
    drawn = trace_page("t", {"other": 10.0}, 1, found, (found[0], ""), said, (0, 10))
    edges = [point.split(",") for point in re.search('polygon class="band" points="([^"]*)"', drawn)[1].split()]
    (left, bottom), (also_left, first), *_, (right, last), _ = edges
    assert left == also_left != right and float(last) < float(bottom)
    assert first == {"high": last, "low": bottom}[begins]


def test_what_was_there_when_the_window_began_is_drawn_from_its_left_edge() -> None:
    said = recorded(activity=[(0, TRAINING)], phase=[(0, FORWARD)])
    found = [MemoryLevel(0.0, 0), MemoryLevel(5.0, 100), MemoryLevel(20.0, 100)]
    drawn = trace_page("t", {"other": 10.0}, 1, found, (found[1], ""), said, (10, 30))
    heights = [point.split(",")[1] for point in re.search('polygon class="band" points="([^"]*)"', drawn)[1].split()]
    assert len(set(heights[1:-1])) == 1 != len(set(heights))
