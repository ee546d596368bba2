"""Whether this process is in an exchange with others now, and how many it has begun: two numbers for somebody who looks
from outside, when the ranks stand still (megatron/whereabouts.py).

They say what the code cannot say itself any more: a rank that waits is a victim, one that does not is what the others
wait for. An exchange that ends with an error leaves the mark: the error came out of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SENDING, WAITING = 1, 2


class Numbers(Protocol):
    def __getitem__(self, place: int) -> int: ...

    def __setitem__(self, place: int, number: int) -> None: ...


_NUMBERS: list[Numbers] = [memoryview(array("Q", [0, 0]))]
"""Of the process."""


def show_in(numbers: Numbers) -> None:
    """From now on they are written here."""
    numbers[0], numbers[1] = _NUMBERS[0][0], _NUMBERS[0][1]
    _NUMBERS[0] = numbers


def shown() -> Numbers:
    """Where they are written."""
    return _NUMBERS[0]


def begin() -> None:
    """To wait for others."""
    _NUMBERS[0][0] = WAITING


def end() -> None:
    _NUMBERS[0][0] = 0


def is_waiting() -> bool:
    return bool(_NUMBERS[0][0] == WAITING)


def exchanging(send: Callable[P, T], mark: int = WAITING) -> Callable[P, T]:
    """A function that is one exchange, or (`sending`) begins one and does not wait for it."""
    @wraps(send)
    def marked(*args: P.args, **kwargs: P.kwargs) -> T:
        numbers = _NUMBERS[0]
        numbers[1] += 1
        numbers[0] = mark
        result = send(*args, **kwargs)
        numbers[0] = 0
        return result
    return marked


def sending(send: Callable[P, T]) -> Callable[P, T]:
    return exchanging(send, SENDING)
