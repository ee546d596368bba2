"""Numbers of ranks and of nodes, as people write them; and in what ranks differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_FACTS = 12
"""Differences that are named."""


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


def differences(told: Sequence[tuple[Mapping[str, Any], Iterable[int]]]) -> str:
    """What some ranks were told and others not: each fact, its values and their ranks. Empty where all is alike."""
    lines = []
    for name in dict.fromkeys(name for facts, _ in told for name in facts):
        values: dict[str, list[int]] = {}
        for facts, ranks in told:
            values.setdefault(_shown(facts[name]) if name in facts else "not there", []).extend(ranks)
        if len(values) > 1:
            lines.append(f"{name} is " + ", ".join(f"{value} on {ranges(who)}" for value, who in values.items()))
    more = f"; and {len(lines) - MOST_FACTS} more" if len(lines) > MOST_FACTS else ""
    return "; ".join(lines[:MOST_FACTS]) + more


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
