"""Lack of memory, explained: what this run was to hold, and the two cheapest changes that make it smaller.

`explained(...)` stands around the building and the training of a run. When memory runs out inside, it writes the plan
of memory.py to stderr and raises `MemoryShortage`, whose text names the remedies; `exits.py` makes the `error:` line
and the exit code of it. No torch import: torch's errors are told by class name and text; the
arithmetic, which stands on modules that need torch, is imported when the run has it anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.activations import Device
    from megatron.config import Config
    from megatron.footprint import Run

MEMORY_CLASSES = frozenset({"MemoryError", "OutOfMemoryError"})
MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "CUDA out of memory")
SHOWN_REMEDIES = 2


class MemoryShortage(MemoryError):
    """Memory ran out, and the text says what to do."""


def is_lack_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if MEMORY_CLASSES & names:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_TEXTS)


@contextmanager
def explained(config: Config, rank: int, ranks: int, device: Device) -> Iterator[None]:
    """Lack of memory inside becomes MemoryShortage; `config` knows its vocabulary."""
    from megatron.footprint import Run  # now: importing takes memory too
    from megatron.memory import peak
    from megatron.remedies import breakdown

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error) or isinstance(error, MemoryShortage):
            raise
        run = Run(config, ranks, device)
        print(f" rank {rank} was to hold {breakdown(peak(run))}", file=sys.stderr, flush=True)
        reason = (str(error).strip() or "no more memory").splitlines()[0]
        raise MemoryShortage(f"{reason}; {advice(run)}") from error


def advice(run: Run) -> str:
    from megatron.remedies import remedies, size

    chosen = remedies(run)[:SHOWN_REMEDIES]
    if not chosen:
        return "no flag makes this run much smaller: use a smaller model, or more ranks with a higher --zero-stage"
    return "try " + " or ".join(f"{remedy.flags} (saves {size(remedy.saves)})" for remedy in chosen)
