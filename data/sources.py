"""What a value of `--train-data` names: `parse_sources`, and `check_sources`, which checks that it is there.

A name is the prefix of a corpus, a file, a folder, or one of the words in `NAMED`. Not here: opening it (`corpora`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from data.default_corpus import DEFAULT_FOLDER
from data.sampling import parse_number
from data.storage import DataError, check_is_rereadable, prefix_data_errors

MAX_SUGGESTIONS = 3
"""Names that are offered for a mistyped one."""


@dataclass(frozen=True)
class WeightedSource:
    """One corpus of a list and its weight, None when none was given."""

    name: str
    weight: Fraction | None = None


def parse_sources(words: Sequence[str], flag: str) -> list[WeightedSource]:
    """`weight name weight name ...` or names alone."""
    weights = [parse_number(word) for word in words[::2]]
    if len(words) < 2 or not any(weight is not None for weight in weights):
        return [WeightedSource(word) for word in words]
    for word, weight in zip(words[::2], weights):
        if weight is not None and _source_exists(word):
            raise DataError(f"{flag} {' '.join(words)}: {word} is a weight here, but something of this name is there; "
                            f"write ./{word} for what is there, or +{word} for the weight")
    if len(words) % 2 or not all(weight is not None and weight > 0 for weight in weights):
        raise DataError(f"{flag} {' '.join(words)}: expected weight and name in turn, every weight greater than 0")
    return [WeightedSource(name, weight) for name, weight in zip(words[1::2], weights)]


def check_sources(words: Sequence[str], flag: str) -> None:
    """Refuse a name behind which there is nothing; no file is opened."""
    for source in parse_sources(words, flag):
        name = source.name
        if name in NAMED_CORPORA:
            NAMED_CORPORA[name]()
        elif not _source_exists(name):
            raise DataError(f"{flag} {name}: no file or folder of this name{_suggestion(name)}")
        elif not os.path.lexists(f"{name}.idx"):
            with prefix_data_errors(flag):
                check_is_rereadable(name)


def _source_exists(name: str) -> bool:
    return any(os.path.lexists(path) for path in (name, f"{name}.idx", f"{name}.bin"))


def _suggestion(name: str) -> str:
    """What may be meant instead: what is in that folder and has nearly this name, or the first part of it."""
    folder, word = os.path.split(name.rstrip("/"))
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        return f", nor a folder {folder}"
    corpora = {entry.removesuffix(".idx") for entry in entries if entry.endswith(".idx")}
    parts = {corpus + suffix for corpus in corpora for suffix in (".bin", ".idx", ".json")}
    known = sorted(corpora | {entry for entry in entries if not entry.startswith(".")} - parts)
    near = [entry for entry in known if entry.split(".")[0] == word.split(".")[0]]
    near = (near or difflib.get_close_matches(word, known, MAX_SUGGESTIONS))[:MAX_SUGGESTIONS]
    if near:
        return f"; did you mean {' or '.join(os.path.join(folder, entry) for entry in near)}?"
    return "; give a text file, a folder of them, or the PREFIX of a corpus (PREFIX.bin and PREFIX.idx)"


def default_prefix() -> str:
    prefix = DEFAULT_FOLDER / "corpus"
    if not prefix.with_suffix(".idx").exists():
        raise DataError(f"default corpus: {prefix}.idx is missing; build it (10 seconds, no download): "
                        "python -m data.default_corpus")
    return str(prefix)


def webtext_prefix() -> str:
    prefix = os.environ.get("WEBTEXT_PREFIX") or str(Path(__file__).resolve().parent / "webtext" / "corpus")
    if not os.path.exists(prefix + ".idx"):
        raise DataError(f"webtext: {prefix}.idx is missing; set WEBTEXT_PREFIX, or build it: "
                        "bash scripts/preprocess_webtext.sh")
    return prefix


NAMED_CORPORA: dict[str, Callable[[], str]] = {"default": default_prefix, "webtext": webtext_prefix}
"""Word -> the prefix of the corpus it stands for."""
