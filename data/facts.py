"""`PREFIX.json`: what a corpus of ours knows about itself beyond Megatron's two files.

All of it could be computed from the tokens, or is the name of what made them. Corpora without this file work too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from data.storage import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer a corpus was made with."""

    name: str
    fingerprint: str
    vocab_size: int
    eod: int

    @property
    def description(self) -> str:
        return f"{self.name} {self.fingerprint} ({self.vocab_size} ids)"


@dataclass(frozen=True)
class CorpusFacts:
    """Counts, checksum and origin of the tokens."""

    documents: int
    tokens: int
    crc32: str
    """Of the whole .bin, 8 hexadecimal digits."""
    max_token: int
    tokenizer: TokenizerFacts | None = None
    """None: not known."""
    identity: str | None = None
    """Of both files (`identity`). None: written before there was one."""


def read_corpus_facts(path: str) -> CorpusFacts | None:
    """The facts in a file, or None when there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        origin = value["tokenizer"]
        facts = CorpusFacts(_typed_value(value, "documents", int), _typed_value(value, "tokens", int),
                            _typed_value(value, "crc32", str), _typed_value(value, "max_token", int), origin
                            and _tokenizer_facts(origin),
                            _typed_value(value, "identity", str) if value.get("identity") is not None else None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not the facts of a corpus ({error}); remove it or preprocess again") from error
    return facts


def tokenizer_facts_of_state(state: Mapping[str, Any]) -> TokenizerFacts | None:
    """What a saved state says under `tokenizer`; None where that is nothing, or something of another's."""
    try:
        return _tokenizer_facts(state["tokenizer"])
    except (KeyError, TypeError):
        return None


def _tokenizer_facts(value: dict[str, object]) -> TokenizerFacts:
    return TokenizerFacts(_typed_value(value, "name", str), _typed_value(value, "fingerprint", str),
                          _typed_value(value, "vocab_size", int), _typed_value(value, "eod", int))


def _typed_value(value: dict[str, object], key: str, kind: type[T]) -> T:
    found = value[key]
    if type(found) is not kind:
        raise TypeError(f"{key}: expected {kind.__name__}, found {found!r}")
    return found
