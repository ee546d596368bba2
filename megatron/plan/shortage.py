"""Lack of memory, explained: what this run needs, and the two cheapest changes that make it smaller.

`explained(...)` encloses the building and the training of a run. When memory runs out inside, it writes the plan
of memory.py to stderr and raises `ExplainedMemoryError`, whose text names the remedies; `launch/exits.py` makes the `error:`
line and the exit code of it. The arithmetic is imported when it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron.launch.exits import ExplainedMemoryError, is_out_of_memory

if TYPE_CHECKING:
    from megatron.config.tree import Config
    from megatron.plan.activations import Device
    from megatron.plan.footprint import PlannedRun

MAX_SUGGESTIONS = 2


@contextmanager
def oom_hint(config: Config, rank: int, ranks: int, device: Device) -> Iterator[None]:
    """Lack of memory inside becomes ExplainedMemoryError; `config` knows its vocabulary."""
    from megatron.plan.footprint import PlannedRun, configured_placement  # now: importing takes memory too
    from megatron.plan.memory import peak_memory
    from megatron.plan.remedies import format_breakdown

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
    from megatron.plan.remedies import format_bytes, suggest_changes

    chosen = suggest_changes(run)[:MAX_SUGGESTIONS]
    if not chosen:
        return "no flag makes this run much smaller: use a smaller model, or more ranks with a higher --zero-stage"
    return "try " + " or ".join(f"{remedy.flags} (saves {format_bytes(remedy.saved_bytes)})" for remedy in chosen)
