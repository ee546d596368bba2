"""Nothing of an axis is slow in all its cells, and of long lists a few cases are quick."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import cells, spread_out

AXES = (("a", "b"), (1, 2, 3), (True, False, None), ("x", "y"))


@pytest.mark.parametrize("each, most", [(1, 3), (2, 12)])
def test_quick_cells_have_every_value_or_pair(each: int, most: int) -> None:
    found = cells(*AXES, each=each)
    assert [cell.values for cell in found] == list(product(*AXES))
    quick = [cell.values for cell in found if not cell.marks]
    assert len(quick) <= most
    for places in combinations(range(len(AXES)), each):
        wanted = set(product(*(AXES[place] for place in places)))
        assert {tuple(cell[place] for place in places) for cell in quick} == wanted


@pytest.mark.parametrize("number, quick", [(1, [4]), (2, [1, 4]), (3, [0, 2, 4]), (5, [0, 1, 2, 3, 4]),
                                           (9, [0, 1, 2, 3, 4])])
def test_a_few_are_from_all_over_the_list(number: int, quick: list[int]) -> None:
    chosen, others = spread_out(range(5), number)
    assert chosen == quick and sorted(chosen + others) == list(range(5))
