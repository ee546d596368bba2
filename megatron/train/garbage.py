"""When Python looks for garbage that only refers to itself: of its own accord, or at steps that all ranks know.

A look at everything stops a rank for some 100 ms, and the others with it, at their next exchange. Left alone each rank
looks when it has made so many objects; together they lose that time once. What is there when the loop begins lasts as
long as it, and need not be looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def periodic_gc(steps: int) -> Iterator[Callable[[int], None]]:
    """Inside, garbage is looked for when this is called with a multiple of `steps`; 0: whenever Python wants to."""
    if not steps or not gc.isenabled():
        yield lambda step: None
        return
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0  # by the program around this one, and for longer
    gc.freeze()
    gc.disable()
    try:
        yield lambda step: None if step % steps else _collect_garbage()
    finally:
        gc.enable()
        if not was_frozen:
            gc.unfreeze()


def _collect_garbage() -> None:
    gc.collect()
