"""The words of a text that is being made: its tokens decoded, what stops it, and what of it can no longer change."""

from __future__ import annotations

from typing import final

from data.tokenizer_base import REPLACEMENT, Tokenizer
from megatron.inference.generation import Text


@final
class Wording:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def is_over(self, text: Text) -> bool:
        """With one of the texts that it is to end before."""
        stops = text.request.stops
        return bool(stops) and any(stop in self._tokenizer.decode(text.tokens) for stop in stops)

    def of(self, text: Text) -> str:
        """Without what stopped it, and what came with that in one token."""
        found = self._tokenizer.decode(text.tokens)
        ends = [place for stop in text.request.stops if (place := found.find(stop)) >= 0]
        return found[: min(ends)] if ends else found

    def settled(self, text: Text) -> str:
        """What will stay, whatever comes: while a text runs, its last bytes may be the beginning of a character, and
        its last characters of what stops it."""
        found = self.of(text)
        if text.ended is not None:
            return found
        held = max(map(len, text.request.stops), default=1) - 1
        return found[: max(0, len(found) - held)].rstrip(REPLACEMENT)
