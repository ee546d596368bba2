"""Incremental detokenization: the text of a growing token list, the offset of each token, stop strings, and the prefix
of the text that later tokens cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final
from weakref import WeakKeyDictionary

from data.tokenizer import REPLACEMENT_CHARACTER, Tokenizer
from megatron.inference.generation import GeneratedSequence

DecodeFn = Callable[[Iterable[int]], str]

DECODE_WINDOW = 16
"""Tokens that are decoded again with those that follow them."""
UNSTABLE_CHARACTERS = 4
"""Characters at the beginning of a window that may differ from the full text: it may begin within a character of up to
4 bytes, and SentencePiece leaves out a space at the beginning of a text."""


@final
class Detokenizer:
    """The text of a growing list of tokens. Each token is decoded with its neighbours only, so the work is linear: a
    token changes at most the character before it, and UTF-8 can be read from any character on."""

    def __init__(self, decode: DecodeFn, ids: Iterable[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._stable_characters = 0  # characters of the text that stay
        self._overlap_characters = 0  # characters of the window's text that are among those
        self.text = ""
        self.num_shown = 0
        """Characters that `new_text` has returned."""
        self.offsets: list[int] = []
        """Length of the text before each token, where U+FFFD stands for a part of a character."""
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
        detokenizer = self._detokenizers.setdefault(sequence, Detokenizer(self._tokenizer.decode))
        detokenizer.extend(sequence.tokens[len(detokenizer.offsets):])
        return detokenizer

    def has_stop_string(self, sequence: GeneratedSequence) -> bool:
        stops = sequence.request.stops
        return bool(stops) and any(stop in self._detokenizer_of(sequence).text for stop in stops)

    def decode(self, sequence: GeneratedSequence) -> str:
        """The text before the first stop string."""
        text = self._detokenizer_of(sequence).text
        ends = [place for stop in sequence.request.stops if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def token_offsets(self, sequence: GeneratedSequence) -> Sequence[int]:
        return self._detokenizer_of(sequence).offsets

    def stable_text(self, sequence: GeneratedSequence) -> str:
        """The prefix that later tokens cannot change: while a text runs, its last bytes may begin a character, and its
        last characters a stop string."""
        text = self.decode(sequence)
        if sequence.finish_reason is not None:
            return text
        held_back = max(map(len, sequence.request.stops), default=1) - 1
        return text[: max(0, len(text) - held_back)].rstrip(REPLACEMENT_CHARACTER)

    def new_text(self, sequence: GeneratedSequence) -> str:
        """What has become stable since the last call."""
        detokenizer, text = self._detokenizer_of(sequence), self.stable_text(sequence)
        start, detokenizer.num_shown = detokenizer.num_shown, max(detokenizer.num_shown, len(text))
        return text[start:]
