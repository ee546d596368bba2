"""Which cases of a matrix a test needs, and which of them are quick."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def cells(*axes: Sequence[Any], each: int = 1) -> list[Any]:
    """Those of a matrix, for `parametrize`. Any `each` values of different axes meet in a quick one: every value of
    every axis, or every pair of them."""
    numbers = list(product(*(range(len(axis)) for axis in axes)))
    quick = set(_cover(numbers, each))
    return [pytest.param(*(axis[number] for axis, number in zip(axes, cell, strict=True)), id=_name(axes, cell),
                         marks=[] if cell in quick else pytest.mark.slow) for cell in numbers]


def pairs(*axes: Sequence[Any], each: int = 2) -> list[Any]:
    """The cases of a matrix, for `parametrize`, in which any `each` values of different axes meet; no others."""
    return [cell for cell in cells(*axes, each=each) if not cell.marks]


def spread_out(cases: Sequence[Any], number: int) -> tuple[list[Any], list[Any]]:
    """So many of them, from all over the list and the last one among them, and the others."""
    chosen = {max(1, len(cases) * part // number) - 1 for part in range(1, number + 1)}
    return ([case for at, case in enumerate(cases) if at in chosen],
            [case for at, case in enumerate(cases) if at not in chosen])


def _cover(cells: Sequence[tuple[int, ...]], each: int) -> Iterator[tuple[int, ...]]:
    """One after the other the cell that has most of what is missing; among equals the first."""
    missing = {one for cell in cells for one in combinations(enumerate(cell), each)}
    while missing:
        best = max(cells, key=lambda cell: len(missing.intersection(combinations(enumerate(cell), each))))
        missing.difference_update(combinations(enumerate(best), each))
        yield best


def _name(axes: Iterable[Sequence[Any]], cell: Iterable[int]) -> str:
    """Values that are short, and the numbers of others."""
    told = (str(axis[number]) for axis, number in zip(axes, cell, strict=True))
    return "-".join(one if len(one) < 25 else str(number) for one, number in zip(told, cell, strict=True))
