"""Format ranks ("ranks 0-2, 5") and the values in which ranks differ, in bounded length even for thousands of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

# what one message shows at most: differences, values per difference, ranges of ranks, characters per value
MAX_DIFFERENCES, MAX_VALUES, MAX_RANGES, MAX_VALUE_LENGTH = 12, 8, 16, 300


def format_ranks(numbers: Iterable[int], word: str = "rank") -> str:
    """"rank 3", or "ranks 0-2, 5", or "ranks 0, 2, 4 and 1497 others"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    plural = "" if len(ranges) == 1 and len(ranges[0]) == 1 else "s"
    others = sum(one[-1] - one[0] + 1 for one in ranges[MAX_RANGES:])
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"{word}{plural} {', '.join('-'.join(map(str, one)) for one in ranges[:MAX_RANGES])}{more}"


def join_limited(items: Sequence[str], what: str = "values") -> str:
    """The first MAX_VALUES items, then the number of the others."""
    others = len(items) - MAX_VALUES
    if others <= 0:
        return ", ".join(items)
    return f"{', '.join(items[:MAX_VALUES])} and {others} other {what.removesuffix('s') if others == 1 else what}"


def describe_differences(values_by_ranks: Sequence[tuple[Mapping[str, Any], Iterable[int]]]) -> str:
    """Each setting that differs, its values and their ranks; "" if all are equal."""
    lines = []
    for name in dict.fromkeys(name for settings, _ in values_by_ranks for name in settings):
        ranks_of: dict[str, list[int]] = {}
        for settings, ranks in values_by_ranks:
            value = settings.get(name, "not there")
            ranks_of.setdefault(value if isinstance(value, str) else json.dumps(value), []).extend(ranks)
        if len(ranks_of) > 1:
            lines.append(f"{_truncate(name)} is " + join_limited([f"{_truncate(text)} on {format_ranks(ranks)}"
                                                                  for text, ranks in ranks_of.items()]))
    more = f"; and {len(lines) - MAX_DIFFERENCES} more" if len(lines) > MAX_DIFFERENCES else ""
    return "; ".join(lines[:MAX_DIFFERENCES]) + more


def _truncate(text: str) -> str:
    """Cut a long text; a checksum of the full text keeps different values apart."""
    if len(text) <= MAX_VALUE_LENGTH:
        return text
    return f"{text[:MAX_VALUE_LENGTH]}... ({len(text)} characters, checksum {crc32(text.encode()):08x})"
