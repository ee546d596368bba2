"""Where prompts come from: all are at hand, or one comes after the other while texts are made. No torch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, final

SILENCE = 0.05
"""Seconds without a line after which what has come is begun with."""


class Prompt(NamedTuple):
    text: str
    where: str
    """Its place, for what is said of it."""


class Prompts(Protocol):
    lasts: bool
    """More may come at any time, or none for hours."""

    @property
    def ahead(self) -> Sequence[Prompt]:
        """Those that are known already, to be looked at before the first is answered."""

    def take(self, most: int, wait: bool) -> list[Prompt] | None:
        """Up to `most` of them, none if there is none yet; None: no more will come. With `wait` at least one."""


@final
class Given:
    """All are at hand."""

    lasts = False

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.ahead: Sequence[Prompt] = list(prompts)
        self._taken = 0

    def take(self, most: int, wait: bool) -> list[Prompt] | None:
        found = list(self.ahead[self._taken : self._taken + most])
        self._taken += len(found)
        return found or None


@final
class Arriving:
    """Lines that another program writes, and may wait for an answer to each. They are read beside the texts."""

    lasts = True
    ahead: Sequence[Prompt] = ()

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._arrived: queue.Queue[Prompt | BaseException | None] = queue.Queue()
        threading.Thread(target=self._read, args=(prompts,), daemon=True).start()
        self._over = False

    def _read(self, prompts: Iterable[Prompt]) -> None:
        end: BaseException | None = None
        try:
            for prompt in prompts:
                self._arrived.put(prompt)
        except BaseException as error:  # raised where prompts are taken
            end = error
        self._arrived.put(end)

    def take(self, most: int, wait: bool) -> list[Prompt] | None:
        found: list[Prompt] = []
        while len(found) < most and not self._over:
            try:
                one = self._arrived.get(wait, None if not found else SILENCE)
            except queue.Empty:
                break
            if isinstance(one, BaseException):
                raise one
            if one is None:
                self._over = True
            else:
                found.append(one)
        return None if self._over and not found else found
