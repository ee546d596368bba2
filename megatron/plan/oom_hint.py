"""Turns an out-of-memory error of a run into a plan of its memory and the two cheapest flag changes that reduce it.

`oom_hint(...)` encloses building and training. On out-of-memory it prints the memory of this rank to stderr and
raises `ExplainedMemoryError`. The planner is imported only then: importing it takes memory too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron.distributed.exit_codes import ExplainedMemoryError, is_out_of_memory

if TYPE_CHECKING:
    from megatron.config.tree import Config
    from megatron.plan.activations import Device
    from megatron.plan.footprint import PlannedRun

MAX_SUGGESTIONS = 2


@contextmanager
def oom_hint(config: Config, rank: int, ranks: int, device: Device) -> Iterator[None]:
    """Lack of memory inside becomes ExplainedMemoryError; `config` knows its vocabulary."""
    from megatron.plan.alternatives import format_breakdown
    from megatron.plan.footprint import PlannedRun, configured_placement  # now: importing takes memory too
    from megatron.plan.memory import peak_memory

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or isinstance(error, ExplainedMemoryError):
            raise
        run = PlannedRun(config, ranks, device, configured_placement(config))
        print(f" rank {rank} needs {format_breakdown(peak_memory(run))}", file=sys.stderr, flush=True)
        reason = (str(error).strip() or "no more memory").splitlines()[0]
        raise ExplainedMemoryError(f"{reason}; {describe_suggestions(run)}") from error


def describe_suggestions(run: PlannedRun) -> str:
    from megatron.plan.alternatives import format_bytes, suggest_changes

    chosen = suggest_changes(run)[:MAX_SUGGESTIONS]
    if not chosen:
        return "no flag makes this run much smaller: use a smaller model, or more ranks with a higher --zero-stage"
    return "try " + " or ".join(f"{remedy.flags} (saves {format_bytes(remedy.saved_bytes)})" for remedy in chosen)
