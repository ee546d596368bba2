"""Turns an out-of-memory error of a run into a plan of its memory and the two cheapest flag changes that reduce it.

`oom_hint(...)` encloses building and training. On out-of-memory it prints the memory of this rank to stderr and
raises `ExplainedMemoryError`.
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


@contextmanager
def oom_hint(config: Config, rank: int, ranks: int, device: Device) -> Iterator[None]:
    """Turn an out-of-memory error inside into an ExplainedMemoryError; `config` has its vocab_size."""
    from megatron.plan.alternatives import describe_suggestions, format_breakdown  # now: importing takes memory too
    from megatron.plan.footprint import PlannedRun
    from megatron.plan.memory import peak_memory

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or isinstance(error, ExplainedMemoryError):
            raise
        run = PlannedRun(config, ranks, device)
        print(f" rank {rank} needs {format_breakdown(peak_memory(run))}", file=sys.stderr, flush=True)
        reason = (str(error).strip() or "no more memory").splitlines()[0]
        suggestions = describe_suggestions(run)
        remedy = f"try {suggestions}" if suggestions else \
            "no flag makes this run much smaller: use a smaller model, or more ranks with a higher --zero-stage"
        raise ExplainedMemoryError(f"{reason}; {remedy}") from error
