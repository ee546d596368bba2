"""The time breakdown of traced steps: products, attention, loss, optimizer, exposed communication, data, other.

On a CPU each moment belongs to what the training thread does. On a GPU it belongs to the running kernel;
communication counts only where no other kernel runs. A backward operation has the kind of the operation that it
differentiates.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.distributed.rank_status import OPTIMIZER_STEP, READING, TRAINING

PRODUCTS, ATTENTION, LOSS, OPTIMIZER, EXCHANGE = "products", "attention", "loss", "optimizer", "exchange not hidden"
COPIES, OTHER = "copies", ""
CPU_KINDS = PRODUCTS, ATTENTION, LOSS, OPTIMIZER, EXCHANGE, "data", "evaluation and saves", "other"
GPU_KINDS = COPIES, "idle"
"""Additional kinds on an accelerator."""

KINDS = {
    LOSS: re.compile(r"^(_LinearCrossEntropyMean|_LinearCrossEntropyPerToken|_VocabParallelCrossEntropy)(Backward)?$"
                     r"|cross_entropy|nll_loss|log_softmax", re.IGNORECASE),
    ATTENTION: re.compile("scaled_dot_product|flash_attention|efficient_attention|flex_attention"),
    PRODUCTS: re.compile(r"^aten::(mm|bmm|addmm|addbmm|baddbmm|linear|_scaled_mm|mkldnn_linear|addmv|mv)(_|$|\b)"
                         r"|^mkl(dnn)?::")}
"""Patterns of operation names. Those of mpu/cross_entropy.py come first, because they contain the output layer."""
KERNELS = {
    ATTENTION: re.compile(r"flash|fmha|sdpa", re.IGNORECASE),
    PRODUCTS: re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.IGNORECASE)}
TraceEvent = Mapping[str, Any]


class Interval(NamedTuple):
    start: float
    stop: float
    name: str = ""


def time_by_kind(kinds: Mapping[str, Iterable[Interval]], within: tuple[float, float]) -> dict[str, float]:
    """The time of each kind; a moment counts for the first kind that has it, or for ""."""
    times, intervals, before = dict[str, float](), list[Interval](), 0.0
    for kind, added in kinds.items():
        intervals += added
        total, end = 0.0, within[0]
        for start, stop, _ in sorted(intervals):  # their union
            total += max(0.0, min(stop, within[1]) - max(start, end))
            end = max(end, stop)
        times[kind], before = total - before, total
    return times | {"": within[1] - within[0] - before}


def operations_with_kinds(events: Iterable[TraceEvent], thread: int | None = None) -> Iterator[tuple[TraceEvent, str]]:
    """The host's operations of a thread, or of all, with the kind of the outermost enclosing one that has a kind."""
    operations = [event for event in events if event.get("cat") == "cpu_op" and thread in (None, event["tid"])]
    kind_of_forward: dict[int, str] = {}  # by autograd sequence number; the last operation with one made its node
    outermost: dict[int, tuple[str, float]] = {}  # thread -> kind of the enclosing operation, and its end
    for event in sorted(operations, key=lambda event: (event["ts"], -event["dur"])):  # enclosing ones come first
        args = event.get("args", {})
        number, is_backward = args.get("Sequence number", 0), bool(args.get("Fwd thread id"))
        kind, until = outermost.get(event["tid"], (OTHER, 0.0))
        if event["ts"] >= until:
            inherited = kind_of_forward.get(number, OTHER) if is_backward else OTHER
            kind = next((kind for kind, pattern in KINDS.items() if pattern.search(event["name"])), inherited)
            # without a kind, operations inside may have one
            outermost[event["tid"]] = kind, 0.0 if kind == OTHER else event["ts"] + event["dur"]
        if number > 0 and not is_backward:
            kind_of_forward[number] = kind
        yield event, kind


def device_work(events: Sequence[TraceEvent], steps: Sequence[Interval]) -> dict[str, list[Interval]]:
    """The accelerator's work by kind. `steps`: the optimizer steps on the host, where their kernels are launched."""
    work: dict[str, list[Interval]] = {
        kind: [] for kind in (LOSS, ATTENTION, PRODUCTS, OPTIMIZER, "other", COPIES, EXCHANGE)}
    kinds = {event["args"]["External id"]: kind for event, kind in operations_with_kinds(events)
             if "External id" in event.get("args", {})}
    launches = {event["args"]["correlation"]: float(event["ts"]) for event in events
                if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        args, name = event.get("args", {}), event["name"]
        kind = kinds.get(args.get("External id"), OTHER)
        launched_at = launches.get(args.get("correlation", -1), float(event["ts"]))
        if "nccl" in name.lower():
            kind = EXCHANGE
        elif kind == OTHER and event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            kind = COPIES
        elif any(step.start <= launched_at < step.stop for step in steps):
            kind = OPTIMIZER
        elif kind == OTHER and event["cat"] == "kernel":  # replayed from a graph, or launched by Python
            kind = next((of_name for of_name, pattern in KERNELS.items() if pattern.search(name)), OTHER)
        work[kind or "other"].append(Interval(event["ts"], event["ts"] + event["dur"]))
    return work


def time_breakdown(events: Sequence[TraceEvent], thread: int, within: tuple[float, float], *,
                   on_host: bool) -> dict[str, float]:
    """Microseconds of each kind; empty if the profiler has recorded nothing on the device. `thread` trains."""
    ranges: defaultdict[str, list[Interval]] = defaultdict(list)  # of the engine (trace_window.py)
    for event in events:
        if event.get("cat") == "user_annotation":
            place, _, name = event["name"].partition(": ")
            ranges[place].append(Interval(event["ts"], event["ts"] + event["dur"], name))
    interrupted = {"data": [one for one in ranges["activity"] if one.name == READING],
                   "evaluation and saves": [one for one in ranges["activity"] if one.name not in (READING, TRAINING)]}
    steps = [one for one in ranges["phase"] if one.name == OPTIMIZER_STEP]
    if on_host:
        work = {EXCHANGE: ranges["exchange"], OPTIMIZER: steps, **{kind: [] for kind in KINDS}}
        for event, kind in operations_with_kinds(events, thread):
            if kind != OTHER:
                work[kind].append(Interval(event["ts"], event["ts"] + event["dur"]))
        times = time_by_kind(interrupted | work, within)
        times["other"] = times.pop("")
        return {kind: times[kind] for kind in CPU_KINDS}
    work = device_work(events, steps)
    times = time_by_kind(work | interrupted, within)
    times["idle"] = times.pop("")
    return {kind: times[kind] for kind in (*CPU_KINDS, *GPU_KINDS)} if any(work.values()) else {}


def format_breakdown(times: dict[str, float]) -> str:
    """In percent of the total."""
    total = sum(times.values())
    if not times:
        return "the profiler has seen nothing of the device, which another one (nsys, ncu) may hold"
    return ", ".join(f"{kind} {100 * part / total:.0f} %" for kind, part in times.items()
                     if part > 0 or kind in CPU_KINDS and kind != "evaluation and saves")
