"""The time breakdown of traced steps: products, attention, loss, optimizer, exposed communication, data, other.

On a CPU each moment belongs to what the training thread does. On a GPU it belongs to the running kernel;
communication counts only where no other kernel runs. A backward operation has the kind of the operation that it
differentiates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron.distributed.rank_status import ACTIVITY, OPTIMIZER_STEP, PHASE, READING, TRAINING
from megatron.trace.recorder import Interval, TimeRange, TraceRecorder, time_by_kind

PRODUCTS, ATTENTION, LOSS, EXCHANGE, COPIES, OTHER = "products", "attention", "loss", "exchange", "copies", ""

KINDS = {
    LOSS: re.compile(r"^(_LinearCrossEntropyMean|_LinearCrossEntropyPerToken|_VocabParallelCrossEntropy)(Backward)?$"
                     r"|cross_entropy|nll_loss|log_softmax", re.IGNORECASE),
    ATTENTION: re.compile("scaled_dot_product|flash_attention|efficient_attention|flex_attention"),
    PRODUCTS: re.compile(r"^aten::(mm|bmm|addmm|addbmm|baddbmm|linear|_scaled_mm|mkldnn_linear|addmv|mv)(_|$|\b)"
                         r"|^mkl(dnn)?::")}
"""Patterns of operation names. Those of mpu/cross_entropy.py come first, because they contain the output layer."""
KERNELS = {
    ATTENTION: re.compile(r"flash|fmha|sdpa", re.IGNORECASE),
    PRODUCTS: re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.IGNORECASE),
}
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Event categories of kernel launches on the host, and of work on the device."""
TraceEvent = Mapping[str, Any]


def operation_kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHER)


def operations_with_kinds(events: Iterable[TraceEvent], thread: int | None = None) -> Iterator[tuple[TraceEvent, str]]:
    """The host's operations of a thread, or of all, with the kind of the outermost enclosing one that has a kind."""
    # enclosing operations come before those inside them
    ordered = sorted((event for event in events if event.get("cat") == "cpu_op" and thread in (None, event["tid"])),
                     key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    # autograd sequence number -> kind of the forward operation; the last one with a number created the backward node
    of_forward: dict[int, str] = {}
    for event, kind in _with_kinds(ordered, {}):
        args = event.get("args", {})
        if not args.get("Fwd thread id") and args.get("Sequence number", 0) > 0:
            of_forward[args["Sequence number"]] = kind
    yield from _with_kinds(ordered, of_forward)


def _with_kinds(ordered: Sequence[TraceEvent], of_forward: Mapping[int, str]) -> Iterator[tuple[TraceEvent, str]]:
    kind, until, thread = OTHER, 0.0, None
    for event in ordered:
        if thread != event["tid"] or event["ts"] >= until:
            args = event.get("args", {})
            backward_of = args.get("Sequence number", 0) if args.get("Fwd thread id") else 0
            thread, kind = event["tid"], operation_kind(event["name"]) or of_forward.get(backward_of, OTHER)
            until = 0.0 if kind == OTHER else event["ts"] + event["dur"]  # without one, operations inside may have it
        yield event, kind


def device_intervals(events: Sequence[TraceEvent]) -> Iterator[tuple[Interval, str, float]]:
    """The accelerator's work: (interval, kind, time of its launch on the host)."""
    kinds = {event["args"]["External id"]: kind for event, kind in operations_with_kinds(events)
             if "External id" in event.get("args", {})}
    launches = {event["args"]["correlation"]: float(event["ts"]) for event in events
                if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})}
    for event in events:
        if event.get("cat") in DEVICE_CATEGORIES:
            args = event.get("args", {})
            interval = Interval(event["ts"], event["ts"] + event["dur"], event["name"])
            kind = _kernel_kind(event, kinds.get(args.get("External id"), OTHER))
            yield interval, kind, launches.get(args.get("correlation", -1), interval.start)


def _kernel_kind(event: TraceEvent, kind: str) -> str:
    """`kind` is the operation's. A kernel replayed from a graph or launched by Python has none: its name tells more."""
    name = event["name"]
    if "nccl" in name.lower():
        return EXCHANGE
    if kind == OTHER and event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
        return COPIES
    if kind == OTHER and event["cat"] == "kernel":
        return next((of_name for of_name, pattern in KERNELS.items() if pattern.search(name)), OTHER)
    return kind


CPU_KINDS = PRODUCTS, ATTENTION, LOSS, "optimizer", "exchange not hidden", "data", "evaluation and saves", "other"
GPU_KINDS = COPIES, "idle"
"""Additional kinds on an accelerator."""


def time_breakdown(events: Sequence[TraceEvent], recorder: TraceRecorder, thread: int, within: TimeRange, *,
                   on_host: bool) -> dict[str, float]:
    """Microseconds of each kind; empty if the profiler has recorded nothing on the device."""
    end = within[1]
    activities = recorder.timelines[ACTIVITY].intervals(end)
    interrupted = {"data": [one for one in activities if one.name == READING],
                   "evaluation and saves": [one for one in activities if one.name not in (READING, TRAINING)]}
    steps = [one for one in recorder.timelines[PHASE].intervals(end) if one.name == OPTIMIZER_STEP]
    work: dict[str, list[Interval]] = {kind: [] for kind in (LOSS, ATTENTION, PRODUCTS)}
    if on_host:
        for event, kind in operations_with_kinds(events, thread):
            if kind != OTHER:
                work[kind].append(Interval(event["ts"], event["ts"] + event["dur"]))
        times = time_by_kind({**interrupted, "exchange not hidden": recorder.exchange_intervals(end),
                              "optimizer": steps, **work}, within)
        times["other"] = times.pop("")
        return {kind: times[kind] for kind in CPU_KINDS}
    if not any(event.get("cat") in DEVICE_CATEGORIES for event in events):
        return {}
    work |= {"optimizer": [], "other": [], COPIES: [], "exchange not hidden": []}
    for interval, kind, launched_at in device_intervals(events):
        if kind == EXCHANGE:
            kind = "exchange not hidden"
        elif kind != COPIES and any(step.start <= launched_at < step.stop for step in steps):
            kind = "optimizer"
        work[kind or "other"].append(interval)
    times = time_by_kind(work | interrupted, within)
    times["idle"] = times.pop("")
    return {kind: times[kind] for kind in (*CPU_KINDS, *GPU_KINDS)}


def format_breakdown(times: dict[str, float]) -> str:
    """In percent of the total."""
    total = sum(times.values())
    if not times:
        return "the profiler has seen nothing of the device, which another one (nsys, ncu) may hold"
    return ", ".join(f"{kind} {100 * part / total:.0f} %" for kind, part in times.items()
                     if part > 0 or kind in CPU_KINDS and kind != "evaluation and saves")
