"""Numbers of ranks and of nodes, as people write them."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int], word: str = "rank") -> str:
    """"rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    plural = "" if len(runs) == 1 and len(runs[0]) == 1 else "s"
    return f"{word}{plural} {', '.join('-'.join(map(str, run)) for run in runs)}"
