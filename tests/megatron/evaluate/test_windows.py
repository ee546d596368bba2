"""Every token but the first is scored once, from the context that a protocol gives it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import ceil

import pytest

from megatron.evaluate.scoring import TokenWindow, overlapping_windows, rolling_windows

SHAPES = [(tokens, length) for tokens, length in product((0, 1, 2, 3, 7, 8, 9, 16, 17, 40), (1, 2, 3, 8))]


def contexts(windows: Iterable[TokenWindow]) -> list[tuple[int, int]]:
    """(token, first token that is read before it), in the order in which they are scored."""
    return [(token, window.start) for window in windows for token in range(window.first, window.stop)]


@pytest.mark.parametrize(("tokens", "length"), SHAPES)
def test_overlapping_windows_score_each_token_from_the_first_that_reaches_it(tokens: int, length: int) -> None:
    for stride in range(1, length + 1):
        expected = [(token, 0 if token <= length else ceil((token - length) / stride) * stride)
                    for token in range(1, tokens)]
        assert contexts(overlapping_windows(tokens, length, stride)) == expected


@pytest.mark.parametrize(("tokens", "length"), SHAPES)
def test_rolling_windows_score_each_token_once_and_the_last_one_reads_as_much_as_any(tokens: int, length: int) -> None:
    found = list(rolling_windows(tokens, length))
    assert [token for token, _ in contexts(found)] == list(range(1, tokens))
    for window in found:
        reads = window.stop - 1 - window.start
        assert reads == min(length, tokens - 1) or window is found[0]
        assert window.first > window.start


@pytest.mark.parametrize(("tokens", "length"), SHAPES)
def test_no_window_is_longer_than_the_position_table(tokens: int, length: int) -> None:
    for stride in range(1, length + 1):
        for window in (*overlapping_windows(tokens, length, stride), *rolling_windows(tokens, length)):
            assert 1 <= window.stop - 1 - window.start <= length
