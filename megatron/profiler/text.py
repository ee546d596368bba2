"""The three blocks that a profile is printed as: a summary, the largest modules of each depth, the tree of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.profiler.numbers import lasted, share, short
from megatron.profiler.profile import FLOPS_PER_MAC, Layout, Profile, Row, walk

WIDTH = 100


def report(profile: Profile, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
    blocks = [_titled("Flops Profiler", [*summary(profile), "", *aggregated(profile, module_depth, top_modules)])]
    if detailed:
        blocks.append(_titled("Profile of each module", tree(profile)))
    return "\n".join((*blocks, "-" * WIDTH))


def _titled(title: str, lines: Iterator[str] | list[str]) -> str:
    return "\n".join([f" {title} ".center(WIDTH, "-"), *lines])


# ---- the summary -------------------------------------------------------------------------------------------------


def summary(profile: Profile) -> Iterator[str]:
    yield "Profile summary" if profile.step is None else f"Profile summary of step {profile.step}"
    yield "MACs: multiply-accumulates of matrix products, attention and convolutions, as they ran; FLOPs: 2 x MACs"
    yield "per rank: on this rank, in a whole step; latency, FLOPS, samples: with the profiler at work"
    yield ""
    for name, value in facts(profile):
        yield f"{name + ':':<70}{value}"


def facts(profile: Profile) -> Iterator[tuple[str, str]]:
    """Name, value: the lines of a summary."""
    yield from _of_layout(profile.layout)
    yield "parameters of the model", short(profile.root.parameters)
    kept = profile.layout.parameters_kept or profile.root.parameters_here
    if kept != profile.root.parameters:
        yield "parameters kept by this rank, with padding", short(kept)
    yield from _of_flops(profile)
    yield from _of_time(profile)
    for name, times in profile.unknown.items():
        yield f"not counted, for want of a formula: {name}", f"{times} calls"


def _of_layout(layout: Layout) -> Iterator[tuple[str, str]]:
    yield "world size", str(layout.world)
    yield "data parallel size", str(layout.dp)
    yield "tensor parallel size", str(layout.tp)
    if layout.zero_stage is not None:
        yield "ZeRO stage", str(layout.zero_stage)
    if layout.micro_batch is not None:
        yield "batch size per rank (micro-batch)", str(layout.micro_batch)
    if layout.global_batch is not None:
        yield "batch size of a step", str(layout.global_batch)


def _of_flops(profile: Profile) -> Iterator[tuple[str, str]]:
    here = profile.macs_here
    yield "forward MACs per rank", short(here.forward, "MACs")
    yield "forward FLOPs per rank", _flops(here.forward)
    if not profile.backward_is_estimated:
        yield "backward FLOPs per rank", _flops(here.backward)
        yield "FLOPs of recomputation per rank", _flops(here.recomputation)
    else:
        times = profile.backward_in_forwards
        yield f"backward FLOPs per rank, estimated as {times:g} x forward", _flops(times * here.forward)
    if profile.outside.all:
        yield "FLOPs outside of modules per rank, which are part of these", _flops(profile.outside.all)
    if profile.layout.tp > 1:
        yield "forward FLOPs of the model, on all tensor parallel ranks", _flops(profile.macs.forward)
    if profile.layout.world > 1 and not profile.backward_is_estimated:
        yield "FLOPs of the step, on all ranks", _flops(profile.macs.all * profile.layout.dp)


def _of_time(profile: Profile) -> Iterator[tuple[str, str]]:
    here, parts = profile.macs_here, profile.parts
    forward = parts.get("forward", profile.root.seconds)
    yield "forward latency", lasted(forward)
    if "backward" in parts and "step" in parts:
        whole = sum(parts.values())
        yield "backward latency", lasted(parts["backward"])
        yield "step latency (the optimizer)", lasted(parts["step"])
        yield "iteration latency, forward + backward + step", lasted(whole)
        if profile.step_before is not None:
            yield "iteration latency of the step before, without the profiler", lasted(profile.step_before)
        yield "forward FLOPS per rank", _speed(here.forward, forward)
        yield "backward FLOPS per rank, with recomputation", _speed(here.backward + here.recomputation,
                                                                    parts["backward"])
        yield "FLOPS per rank", _speed(here.all, whole)
        if profile.layout.global_batch is not None and whole:
            yield "samples per second, on all ranks", f"{profile.layout.global_batch / whole:.2f}"
        if profile.step_before:
            yield from _without_profiler(profile, profile.step_before)
    else:
        yield "forward FLOPS per rank", _speed(here.forward, forward)


def _without_profiler(profile: Profile, seconds: float) -> Iterator[tuple[str, str]]:
    """The profiler slows the step that it counts; the step before did the same work."""
    yield "FLOPS per rank in the time of the step before", _speed(profile.macs_here.all, seconds)
    if profile.layout.global_batch is not None:
        yield "samples per second of the step before, on all ranks", f"{profile.layout.global_batch / seconds:.2f}"


def _flops(macs: float) -> str:
    return short(FLOPS_PER_MAC * macs, "FLOPs")


def _speed(macs: int, seconds: float) -> str:
    return short(FLOPS_PER_MAC * macs / seconds if seconds else 0.0, "FLOPS")


# ---- by depth ----------------------------------------------------------------------------------------------------


def aggregated(profile: Profile, module_depth: int = -1, top_modules: int = 1) -> Iterator[str]:
    """Sums over the modules of a class, at each depth down to `module_depth` (-1: the last)."""
    levels: dict[int, list[Row]] = {}
    for depth, row in walk(profile.root):
        levels.setdefault(depth, []).append(row)
    last = max(levels) if module_depth < 0 else min(module_depth, max(levels))
    yield f"Top {top_modules} modules in terms of parameters, MACs and forward latency at each depth"
    for depth in range(last + 1):
        yield f"depth {depth}:"
        yield f"    parameters      - {_top(levels[depth], top_modules, lambda row: row.parameters, short)}"
        yield (f"    forward MACs    - "
               f"{_top(levels[depth], top_modules, lambda row: row.macs.forward, lambda n: short(n, 'MACs'))}")
        yield f"    forward latency - {_top(levels[depth], top_modules, lambda row: row.seconds, lasted)}"


def _top(rows: list[Row], count: int, key: Callable[[Row], float], shown: Callable[[float], str]) -> str:
    sums: dict[str, float] = {}
    for row in rows:
        sums[row.kind] = sums.get(row.kind, 0) + key(row)
    best = sorted(sums.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{kind}: {shown(total)}" for kind, total in best)


# ---- the tree ----------------------------------------------------------------------------------------------------


def tree(profile: Profile) -> Iterator[str]:
    yield "Of each module, with those inside it: parameters, their share, forward MACs, their share,"
    yield "forward latency, its share, forward FLOPS per rank"
    yield ""
    yield from _branch(profile.root, profile.root, "", row_name=profile.root.kind)


def _branch(row: Row, root: Row, indent: str, row_name: str) -> Iterator[str]:
    said = ", ".join((
        short(row.parameters), f"{share(row.parameters, root.parameters)} params",
        short(row.macs.forward, "MACs"), f"{share(row.macs.forward, root.macs.forward)} MACs",
        lasted(row.seconds), f"{share(row.seconds, root.seconds)} latency", short(row.flops_per_second, "FLOPS")))
    if not row.rows:
        yield f"{indent}{row_name}({said})"
        return
    yield f"{indent}{row_name}("
    yield f"{indent}  {said}"
    for inner in row.rows:
        yield from _branch(inner, root, indent + "  ", row_name=f"({inner.name}): {inner.kind}")
    yield f"{indent})"
