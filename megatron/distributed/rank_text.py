"""Format ranks ("ranks 0-2, 5") and the values in which ranks differ, in bounded length even for thousands of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

MAX_DIFFERENCES = 12
"""Differences shown."""
MAX_VALUES = 8
"""Values shown per difference."""
MAX_RANGES = 16
"""Ranges of ranks shown."""
MAX_VALUE_LENGTH = 300
"""Characters shown per value."""


def format_ranks(numbers: Iterable[int], word: str = "rank") -> str:
    """"rank 3", or "ranks 0-2, 5", or "ranks 0, 2, 4 and 1497 others"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    plural = "" if len(runs) == 1 and len(runs[0]) == 1 else "s"
    others = sum(run[-1] - run[0] + 1 for run in runs[MAX_RANGES:])
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"{word}{plural} {', '.join('-'.join(map(str, run)) for run in runs[:MAX_RANGES])}{more}"


def join_limited(items: Sequence[str], what: str = "values") -> str:
    """The first MAX_VALUES items, then the number of the others."""
    others = len(items) - MAX_VALUES
    if others <= 0:
        return ", ".join(items)
    return f"{', '.join(items[:MAX_VALUES])} and {others} other {what.removesuffix('s') if others == 1 else what}"


def describe_differences(values_by_ranks: Sequence[tuple[Mapping[str, Any], Iterable[int]]]) -> str:
    """Each setting that differs, its values and their ranks; "" if all are equal."""
    lines = []
    for name in dict.fromkeys(name for facts, _ in values_by_ranks for name in facts):
        values: dict[str, list[int]] = {}
        for facts, ranks in values_by_ranks:
            values.setdefault(_value_text(facts[name]) if name in facts else "not there", []).extend(ranks)
        if len(values) > 1:
            lines.append(f"{_truncate(name)} is " + join_limited([f"{_truncate(value)} on {format_ranks(who)}"
                                                                  for value, who in values.items()]))
    more = f"; and {len(lines) - MAX_DIFFERENCES} more" if len(lines) > MAX_DIFFERENCES else ""
    return "; ".join(lines[:MAX_DIFFERENCES]) + more


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _truncate(text: str) -> str:
    """Cut a long text; a checksum of the full text keeps different values apart."""
    if len(text) <= MAX_VALUE_LENGTH:
        return text
    return f"{text[:MAX_VALUE_LENGTH]}... ({len(text)} characters, checksum {crc32(text.encode()):08x})"
