"""`PREFIX.json`: what a corpus of ours knows about itself beyond Megatron's two files.

All of it could be computed from the tokens, or is the name of what made them. Corpora without this file work too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from data.storage import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer a corpus was made with."""

    name: str
    fingerprint: str
    vocab_size: int
    eod: int


@dataclass(frozen=True)
class Facts:
    """Counts, checksum and origin of the tokens."""

    documents: int
    tokens: int
    crc32: str
    """Of the whole .bin, 8 hexadecimal digits."""
    max_token: int
    tokenizer: TokenizerFacts | None = None
    """None: not known."""


def read_facts(path: str) -> Facts | None:
    """The facts in a file, or None when there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        origin = value["tokenizer"]
        facts = Facts(_typed(value, "documents", int), _typed(value, "tokens", int), _typed(value, "crc32", str),
                      _typed(value, "max_token", int), origin and TokenizerFacts(
                          _typed(origin, "name", str), _typed(origin, "fingerprint", str),
                          _typed(origin, "vocab_size", int), _typed(origin, "eod", int)))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not the facts of a corpus ({error}); remove it or preprocess again") from error
    return facts


def _typed(value: dict[str, object], key: str, kind: type[T]) -> T:
    found = value[key]
    if type(found) is not kind:
        raise TypeError(f"{key}: expected {kind.__name__}, found {found!r}")
    return found
