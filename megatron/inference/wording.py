"""Text from tokens, as they come: where each token begins in it, what stops it, and what of it can no longer change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final
from weakref import WeakKeyDictionary

from data.tokenizer_base import REPLACEMENT_CHARACTER, Tokenizer
from megatron.inference.generation import Text

Decode = Callable[[Iterable[int]], str]


WINDOW = 16
"""Tokens that are decoded once more with those that follow them."""
UNSURE = 4
"""Characters at the beginning of a window that may look otherwise in the whole text: it may begin within a character of
up to 4 bytes, and SentencePiece leaves out a space at the beginning of a text."""


@final
class Detokenizer:
    """The text of a growing list of tokens. Each is decoded with its neighbours alone, so the work is linear: a token
    changes no more than the character before it, and UTF-8 can be read from any character on."""

    def __init__(self, decode: Decode, ids: Iterable[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._fixed = 0  # characters of the text that stay
        self._skipped = 0  # characters of the window's text that are among those
        self.text = ""
        self.starts: list[int] = []
        """Of each token: the length of the text of those before it, where U+FFFD stands for a character's part."""
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        for token in ids:
            self.starts.append(len(self.text))
            if len(self._window) == 2 * WINDOW:
                self._window = self._window[-WINDOW:]
                length = len(self._decode(self._window))
                self._skipped = min(UNSURE, length)
                self._fixed = len(self.text) - length + self._skipped
            self._window.append(token)
            self.text = self.text[: self._fixed] + self._decode(self._window)[self._skipped:]


@final
class Wording:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._read: WeakKeyDictionary[Text, Detokenizer] = WeakKeyDictionary()

    def _all_of(self, text: Text) -> Detokenizer:
        found = self._read.setdefault(text, Detokenizer(self._tokenizer.decode))
        found.extend(text.tokens[len(found.starts):])
        return found

    def is_over(self, text: Text) -> bool:
        """With one of the texts that it is to end before."""
        stops = text.request.stops
        return bool(stops) and any(stop in self._all_of(text).text for stop in stops)

    def of(self, text: Text) -> str:
        """Without what stopped it, and what came with that in one token."""
        found = self._all_of(text).text
        ends = [place for stop in text.request.stops if (place := found.find(stop)) >= 0]
        return found[: min(ends)] if ends else found

    def starts_of(self, text: Text) -> Sequence[int]:
        """Where each of its tokens begins."""
        return self._all_of(text).starts

    def settled(self, text: Text) -> str:
        """What will stay, whatever comes: while a text runs, its last bytes may be the beginning of a character, and
        its last characters of what stops it."""
        found = self.of(text)
        if text.ended is not None:
            return found
        held = max(map(len, text.request.stops), default=1) - 1
        return found[: max(0, len(found) - held)].rstrip(REPLACEMENT_CHARACTER)
