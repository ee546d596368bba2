"""Numbers as people read them: 124.44 M, 3.84 TMACs, 1.27 ms."""

from __future__ import annotations

_SIZES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_count(number: float, unit: str = "") -> str:
    """With a letter for its size; one below 1000 as it is."""
    for size, letter in _SIZES:
        if number >= size:
            return f"{number / size:.2f} {letter}{unit}"
    return f"{number:.4g} {unit}".rstrip()


def format_seconds(seconds: float) -> str:
    scale, unit = next(((scale, unit) for scale, unit in _TIMES if seconds >= scale), _TIMES[-1])
    return f"{seconds / scale:.2f} {unit}"


def format_share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.2%}"
