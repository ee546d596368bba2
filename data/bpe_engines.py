"""What runs byte-level BPE: tiktoken, which is always there, and gigatoken, several times faster, if it is installed.

A *spelling* is the bytes of each token in rank order; `ranks` turns a text into ranks. Engines know nothing of
vocabulary files and ids, which are `gpt2_bpe`'s. They differ in speed alone: where gigatoken is known to differ from
tiktoken, tiktoken does the work.
"""

from __future__ import annotations

import base64
import importlib.metadata
import re
import tempfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gigatoken
    import tiktoken

# GPT-2's pattern in the possessive form: the same pieces, faster (40,452 awkward samples compared).
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")

TESTED_GIGATOKEN_VERSION = "0.10."
UNICODE_17_LETTERS = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479))
"""The letters and numbers that Unicode 17 added: gigatoken 0.10 knows them, tiktoken 0.14 sees symbols in them."""

REBUILD_AFTER_CHARACTERS = 1 << 28
"""Characters after which a gigatoken encoder is built anew (0.1 s): its cache of words only grows (in 0.10)."""


class BpeEngine(ABC):
    """Text to ranks. What runs it is loaded at the first text: many users of a tokenizer never encode."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    def __reduce__(self) -> tuple[type[BpeEngine], tuple[Sequence[bytes]]]:
        return type(self), (self._token_bytes,)  # encoders cannot be sent to a worker process; it builds its own

    @abstractmethod
    def encode_to_ranks(self, text: str) -> NDArray[np.uint32]:
        """The ranks of a text. Lone surrogates are read as U+FFFD."""


@final
class TiktokenEngine(BpeEngine):
    """tiktoken with GPT-2's pattern: any spelling."""

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(self._token_bytes)}
        return tiktoken.Encoding("data", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode_to_ranks(self, text: str) -> NDArray[np.uint32]:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encoding.encode_to_numpy(mended, disallowed_special=())


@final
class GigatokenEngine(BpeEngine):
    """gigatoken, for GPT-2's own spelling, where it was compared with tiktoken over every character."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        super().__init__(token_bytes)
        self._tiktoken = TiktokenEngine(token_bytes)
        self._differing_pattern = _utf8_pattern(UNICODE_17_LETTERS)
        self._encoded_characters = 0

    def encode_to_ranks(self, text: str) -> NDArray[np.uint32]:
        if not text.isascii() and self._needs_tiktoken(text):
            return self._tiktoken.encode_to_ranks(text)
        self._encoded_characters += len(text)
        if self._encoded_characters > REBUILD_AFTER_CHARACTERS:
            self.__dict__.pop("_encoder", None)  # the old one is gone before the new one is built
            self._encoded_characters = len(text)
        ranks: NDArray[np.uint32] = self._encoder.encode(text)
        return ranks

    def _needs_tiktoken(self, text: str) -> bool:
        """Whether the two differ: in a newer letter, or in a lone surrogate, which only one of them accepts."""
        try:
            raw = text.encode()
        except UnicodeEncodeError:
            return True
        # Looking for a byte is far faster than the pattern, and few texts have one of these three.
        return (b"\xf0" in raw or b"\xea" in raw or b"\xe0" in raw) and self._differing_pattern.search(raw) is not None

    @cached_property
    def _encoder(self) -> gigatoken.Tokenizer:
        import gigatoken

        # It reads ranks from a file only. No special tokens: `<|endoftext|>` in a text is text.
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.writelines(b"%s %d\n" % (base64.b64encode(token), rank)
                            for rank, token in enumerate(self._token_bytes))
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, "gpt2", {})


def _utf8_pattern(ranges: Iterable[tuple[int, int]]) -> re.Pattern[bytes]:
    """Matches UTF-8 that holds a character of the ranges, or a neighbour of one with the same first three bytes."""
    thirds: dict[bytes, dict[bytes, set[int]]] = defaultdict(lambda: defaultdict(set))  # by the first and the second
    for first, last in ranges:
        for character in range(first, last + 1):
            raw = chr(character).encode()
            thirds[raw[:1]][raw[1:2]].add(raw[2])
    # One branch for each first byte: `re` looks for those before anything else. All bytes are beyond ASCII: no escapes.
    return re.compile(b"|".join(
        lead + b"(?:" + b"|".join(second + b"[" + bytes(sorted(found)) + b"]"
                                  for second, found in by_second.items()) + b")"
        for lead, by_second in thirds.items()))


def fastest_engine(token_bytes: Sequence[bytes], *, is_gpt2: bool) -> BpeEngine:
    """The fastest one that is proven for this spelling."""
    return GigatokenEngine(token_bytes) if is_gpt2 and _gigatoken_is_tested() else TiktokenEngine(token_bytes)


def _gigatoken_is_tested() -> bool:
    """Whether the version that was compared is installed; another may know letters of a later Unicode."""
    try:
        return importlib.metadata.version("gigatoken").startswith(TESTED_GIGATOKEN_VERSION)
    except importlib.metadata.PackageNotFoundError:
        return False
