"""Incremental detokenization: the text of a growing token list, the offset of each token, stop strings, and the prefix
of the text that later tokens cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final
from weakref import WeakKeyDictionary

from data.tokenizer_base import REPLACEMENT_CHARACTER, Tokenizer
from megatron.inference.generation import GeneratedSequence

DecodeFn = Callable[[Iterable[int]], str]


DECODE_WINDOW = 16
"""Tokens that are decoded once more with those that follow them."""
UNSTABLE_CHARACTERS = 4
"""Characters at the beginning of a window that may look otherwise in the whole text: it may begin within a character of
up to 4 bytes, and SentencePiece leaves out a space at the beginning of a text."""


@final
class Detokenizer:
    """The text of a growing list of tokens. Each is decoded with its neighbours alone, so the work is linear: a token
    changes no more than the character before it, and UTF-8 can be read from any character on."""

    def __init__(self, decode: DecodeFn, ids: Iterable[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._stable_characters = 0  # characters of the text that stay
        self._overlap_characters = 0  # characters of the window's text that are among those
        self.text = ""
        self.offsets: list[int] = []
        """Of each token: the length of the text of those before it, where U+FFFD stands for a character's part."""
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        for token in ids:
            self.offsets.append(len(self.text))
            if len(self._window) == 2 * DECODE_WINDOW:
                self._window = self._window[-DECODE_WINDOW:]
                length = len(self._decode(self._window))
                self._overlap_characters = min(UNSTABLE_CHARACTERS, length)
                self._stable_characters = len(self.text) - length + self._overlap_characters
            self._window.append(token)
            self.text = self.text[: self._stable_characters] + self._decode(self._window)[self._overlap_characters:]


@final
class SequenceDetokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizers: WeakKeyDictionary[GeneratedSequence, Detokenizer] = WeakKeyDictionary()

    def _detokenizer_of(self, sequence: GeneratedSequence) -> Detokenizer:
        found = self._detokenizers.setdefault(sequence, Detokenizer(self._tokenizer.decode))
        found.extend(sequence.tokens[len(found.offsets):])
        return found

    def has_stop_string(self, sequence: GeneratedSequence) -> bool:
        """With one of the texts that it is to end before."""
        stops = sequence.request.stops
        return bool(stops) and any(stop in self._detokenizer_of(sequence).text for stop in stops)

    def decode(self, sequence: GeneratedSequence) -> str:
        """Without what stopped it, and what came with that in one token."""
        found = self._detokenizer_of(sequence).text
        ends = [place for stop in sequence.request.stops if (place := found.find(stop)) >= 0]
        return found[: min(ends)] if ends else found

    def token_offsets(self, sequence: GeneratedSequence) -> Sequence[int]:
        """Where each of its tokens begins."""
        return self._detokenizer_of(sequence).offsets

    def stable_text(self, sequence: GeneratedSequence) -> str:
        """What will stay, whatever comes: while a text runs, its last bytes may be the beginning of a character, and
        its last characters of what stops it."""
        found = self.decode(sequence)
        if sequence.finish_reason is not None:
            return found
        held = max(map(len, sequence.request.stops), default=1) - 1
        return found[: max(0, len(found) - held)].rstrip(REPLACEMENT_CHARACTER)
