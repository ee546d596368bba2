"""Nothing of an axis is slow in all its cells."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import cells

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


def test_names_tell_the_values() -> None:
    assert [cell.id for cell in cells([{}, {"initial_loss_scale": 256.0}], [0, 1])] == ["{}-0", "{}-1", "1-0", "1-1"]
