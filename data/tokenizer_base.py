"""The tokenizer interface: text to ids and back. Implementations: `gpt2_bpe`, `tokenizer`.

`eod` is the id that ends a document; `encode` never returns it. `decode` accepts any ids: unknown ids and invalid UTF-8
become U+FFFD. `fingerprint` is equal exactly if two tokenizers give equal ids for equal text; a corpus records it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.indexed import TokenizerFacts
from data.storage import DataError, UsageError

END_OF_TEXT = "<|endoftext|>"
REPLACEMENT_CHARACTER = "\ufffd"


class Tokenizer(ABC):
    """Maps text to ids and back."""

    name: str
    vocab_size: int
    """Ids are 0 to vocab_size - 1, `eod` included; the model adds padding for tensor parallelism."""
    eod: int
    fingerprint: str
    safe_split_characters: str = ""
    """White space characters before which, after a non-space, a text can be split without changing its ids."""

    @property
    def facts(self) -> TokenizerFacts:
        """What a corpus records of its tokenizer."""
        return TokenizerFacts(self.name, self.fingerprint, self.vocab_size, self.eod)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text; lone surrogates are replaced, everything else is restored by `decode`."""

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """The ids as an array; overridden by kinds that need no list for it."""
        return np.array(self.encode(text), np.uint32)

    def byte_lengths(self) -> NDArray[np.int64] | None:
        """[vocab_size]: bytes of text per id, 0 for end of document and unknown. None if they do not add up."""
        return None

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of any sequence of ids."""


def tokenizer_fingerprint(name: str, *parts: bytes) -> str:
    digest = hashlib.sha256(name.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def check_flag_file(path: str | Path, flag: str) -> None:
    """Raise if the path given with `flag` is no file."""
    if not Path(path).is_file():
        raise UsageError(f"{flag} {path}: {'a folder' if Path(path).is_dir() else 'no such file'}; give the path of a "
                         "file that exists")


def read_flag_file(path: str | Path, flag: str) -> bytes:
    """The content of the file given with `flag`."""
    check_flag_file(path, flag)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: cannot read: {error.strerror}") from error


def read_flag_text(path: str | Path, flag: str) -> str:
    try:
        return read_flag_file(path, flag).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: not UTF-8 text ({error})") from error
