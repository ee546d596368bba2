"""What is said between the thread of the model and that of the clients: nothing else is shared."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.inference.generation import End
from megatron.inference.request import Request


@dataclass(frozen=True)
class Begin:
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Read:
    """A text that has ended, once more, for a verdict (judge.py)."""

    number: int
    ids: tuple[int, ...]
    top: int
    """How many of the likeliest tokens are wanted in each place."""


@dataclass(frozen=True)
class Drop:
    """Texts that nobody waits for any longer."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Closed:
    """No more will be asked for."""


@dataclass(frozen=True)
class Broken:
    """The thread of the clients has failed."""

    error: BaseException


Order = Begin | Read | Drop | Closed | Broken


@dataclass(frozen=True)
class News:
    """Of a text: it has so many tokens now, and this is the last of them; or it has ended."""

    number: int
    count: int
    token: int
    logprob: float
    ended: End | None
