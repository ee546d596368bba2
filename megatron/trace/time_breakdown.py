"""The time breakdown of traced steps: the share of products, attention, loss, optimizer, exposed communication, data,
other.

On a CPU each moment belongs to what the training thread does. On a GPU it belongs to the running kernel;
communication counts only where no other kernel runs. A backward operation has the kind of the operation that it
differentiates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron.distributed.rank_status import ACTIVITY, OPTIMIZER_STEP, PHASE, READING, TRAINING
from megatron.trace.recorder import Interval, TimeSpan, TraceRecorder, time_by_kind

PRODUCTS, ATTENTION, LOSS, EXCHANGE, COPIES, OTHER = "products", "attention", "loss", "exchange", "copies", ""

KINDS = {
    LOSS: re.compile(r"^(_LinearCrossEntropyMean|_LinearCrossEntropyPerToken|_VocabParallelCrossEntropy)(Backward)?$"
                     r"|cross_entropy|nll_loss|log_softmax", re.IGNORECASE),
    ATTENTION: re.compile("scaled_dot_product|flash_attention|efficient_attention|flex_attention"),
    PRODUCTS: re.compile(r"^aten::(mm|bmm|addmm|addbmm|baddbmm|linear|_scaled_mm|mkldnn_linear|addmv|mv)(_|$|\b)"
                         r"|^mkl(dnn)?::")}
"""Of operations. The first are those of mpu/cross_entropy.py, which have the output layer inside."""
KERNELS = {
    ATTENTION: re.compile(r"flash|fmha|sdpa", re.IGNORECASE),
    PRODUCTS: re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.IGNORECASE),
}
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories: what the host asks for, and what the device does."""
TraceEvent = Mapping[str, Any]


def operation_kind(name: str) -> str:
    """Of an operation; "" of what is none of these."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHER)


def operations(events: Iterable[TraceEvent], thread: int | None) -> list[TraceEvent]:
    """On the host, in order, those around others first; of one thread, or (None) of all."""
    found = [event for event in events if event.get("cat") == "cpu_op" and thread in (None, event["tid"])]
    return sorted(found, key=lambda event: (event["tid"], event["ts"], -event["dur"]))


def outermost(ordered: Sequence[TraceEvent]) -> Iterator[tuple[TraceEvent, str]]:
    """Each operation, with the kind of the outermost around it that has one."""
    of_forward = {sequence: kind for event, kind in _with_kinds(ordered, {}) if (sequence := _forward_sequence(event))}
    yield from _with_kinds(ordered, of_forward)


def _with_kinds(ordered: Sequence[TraceEvent], of_forward: Mapping[int, str]) -> Iterator[tuple[TraceEvent, str]]:
    kind, until, thread = OTHER, 0.0, None
    for event in ordered:
        if thread != event["tid"] or event["ts"] >= until:
            thread, kind = event["tid"], operation_kind(event["name"]) or of_forward.get(
                _backward_sequence(event), OTHER)
            until = 0.0 if kind == OTHER else event["ts"] + event["dur"]  # what is inside may have one
        yield event, kind


def _forward_sequence(event: TraceEvent) -> int:
    """The number of the step backward that an operation may have made; of several with one number the last has."""
    its = event.get("args", {})
    return 0 if its.get("Fwd thread id") else max(0, its.get("Sequence number", 0))


def _backward_sequence(event: TraceEvent) -> int:
    """The number of a step backward; 0 of what is none."""
    its = event.get("args", {})
    return its.get("Sequence number", 0) if its.get("Fwd thread id") else 0


def thread_intervals(events: Iterable[TraceEvent], thread: int) -> dict[str, list[Interval]]:
    """What the thread that trains worked at."""
    found: dict[str, list[Interval]] = {}
    for event, kind in outermost(operations(events, thread)):
        if kind != OTHER:
            found.setdefault(kind, []).append(Interval(event["ts"], event["ts"] + event["dur"]))
    return found


def device_intervals(events: Sequence[TraceEvent]) -> list[tuple[Interval, str, float]]:
    """What the accelerator worked at: when, of which kind, and when it was launched by the host."""
    kinds = {event["args"]["External id"]: kind for event, kind in outermost(operations(events, None))
             if "External id" in event.get("args", {})}
    launches = {event["args"]["correlation"]: float(event["ts"]) for event in events
                if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})}
    found = []
    for event in events:
        if event.get("cat") in DEVICE_CATEGORIES:
            its = event.get("args", {})
            kind = kinds.get(its.get("External id"), OTHER)
            stretch = Interval(event["ts"], event["ts"] + event["dur"], event["name"])
            found.append((stretch, _kernel_kind(event, kind), launches.get(its.get("correlation", -1), stretch.start)))
    return found


def _kernel_kind(event: TraceEvent, kind: str) -> str:
    """What a kernel's name adds: one that is replayed from a graph, or launched by Python, belongs to no operation."""
    name = event["name"]
    if "nccl" in name.lower():
        return EXCHANGE
    if kind == OTHER and event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
        return COPIES
    if kind == OTHER and event["cat"] == "kernel":
        return next((its for its, pattern in KERNELS.items() if pattern.search(name)), OTHER)
    return kind


CPU_KINDS = PRODUCTS, ATTENTION, LOSS, "optimizer", "exchange not hidden", "data", "evaluation and saves", "other"
"""On a CPU."""
GPU_KINDS = COPIES, "idle"
"""On an accelerator as well."""


def time_breakdown(events: Sequence[TraceEvent], recorder: TraceRecorder, thread: int, within: TimeSpan, *,
                   on_host: bool) -> dict[str, float]:
    """Microseconds of each kind; nothing where the profiler has seen nothing of the device."""
    activities, end = recorder.timelines[ACTIVITY].intervals(within[1]), within[1]
    interrupted = {"data": [one for one in activities if one.name == READING],
                   "evaluation and saves": [one for one in activities if one.name not in (READING, TRAINING)]}
    steps = [one for one in recorder.timelines[PHASE].intervals(end) if one.name == OPTIMIZER_STEP]
    if not on_host:
        is_seen = any(event.get("cat") in DEVICE_CATEGORIES for event in events)
        return _device_breakdown(events, steps, interrupted, within) if is_seen else {}
    work = thread_intervals(events, thread)
    kinds = {**interrupted, "exchange not hidden": recorder.exchange_intervals(end), "optimizer": steps,
             **{kind: work.get(kind, []) for kind in (LOSS, ATTENTION, PRODUCTS)}}
    return _order_kinds(time_by_kind(kinds, within), CPU_KINDS, rest="other")


def _device_breakdown(events: Sequence[TraceEvent], steps: Sequence[Interval], interrupted: dict[str, list[Interval]],
                      within: TimeSpan) -> dict[str, float]:
    work: dict[str, list[Interval]] = {kind: [] for kind in (LOSS, ATTENTION, PRODUCTS, "optimizer", "other", COPIES,
                                                             EXCHANGE)}
    for stretch, kind, launched_at in device_intervals(events):
        if kind not in (EXCHANGE, COPIES) and _contains(steps, launched_at):
            kind = "optimizer"
        work[kind or "other"].append(stretch)
    exchange = work.pop(EXCHANGE)
    found = time_by_kind({**work, "exchange not hidden": exchange, **interrupted}, within)
    return _order_kinds(found, (*CPU_KINDS, *GPU_KINDS), rest="idle")


def _contains(intervals: Iterable[Interval], moment: float) -> bool:
    return any(one.start <= moment < one.stop for one in intervals)


def _order_kinds(found: dict[str, float], order: Sequence[str], rest: str) -> dict[str, float]:
    found[rest] = found.get(rest, 0.0) + found.pop("")
    return {kind: found[kind] for kind in order}


def format_breakdown(found: dict[str, float]) -> str:
    """In shares of a hundred; of what there was."""
    total = sum(found.values())
    if not found:
        return "the profiler has seen nothing of the device, which another one (nsys, ncu) may hold"
    return ", ".join(f"{kind} {100 * part / total:.0f} %" for kind, part in found.items()
                     if part > 0 or kind in CPU_KINDS and kind != "evaluation and saves")
