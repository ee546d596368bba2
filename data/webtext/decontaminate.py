"""Keep evaluation text out of training text: documents that share a run of 13 words with an evaluation file.

Words are those of `words`: case, punctuation and white space do not hide a copy. A *passage* is one string of a JSON
file, or a whole text file; one of 8 to 12 words counts as a run of its own length, a shorter one is not looked for.
The runs are held as hashes, 8 bytes each: evaluation sets are small.

`drop` drops such a document. `cut` removes the shared words with `MARGIN` characters on both sides, where the rest of
the evaluation text or its answer may be, and joins what is left; it drops a document that this leaves in scraps.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError, check_is_file, told
from data.webtext.document import Document, Drop
from data.webtext.words import Numbers, Words, numbers_of, runs, words

RUN = 13
SHORTEST = 8
MARGIN = 200
LEAST = 200
"""Characters that a part must have to be kept beside a cut."""
MOST_CUTS = 10
MODES = ("drop", "cut")

Evaluation = Mapping[int, Numbers]
"""Length of runs -> their numbers, sorted."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Options:
    files: tuple[str, ...]
    mode: str = MODES[0]


def make(options: Options) -> Callable[[Document], Document | Drop]:
    return partial(decontaminate, evaluation=evaluation_runs(options.files), mode=options.mode)


def decontaminate(document: Document, evaluation: Evaluation, mode: str) -> Document | Drop:
    """The document, or what is left of it, or how much it shares."""
    found = words(document.text)
    shared = shared_runs(found, evaluation)
    if not shared:
        return document
    amount = "1 run" if len(shared) == 1 else "2 to 9 runs" if len(shared) < 10 else "10 runs or more"
    if mode == "drop":
        return Drop(f"evaluation text: {amount}")
    spans = _spans(shared, found)
    parts = _parts(document.text, spans, found)
    if len(spans) > MOST_CUTS or not parts:
        return Drop(f"evaluation text: {amount}, too little left")
    return Document("\n\n".join(parts), document.url, {**document.meta, "evaluation_runs_cut": len(shared)})


def shared_runs(found: Words, evaluation: Evaluation) -> list[tuple[int, int]]:
    """(first word, length) of the runs of a text that are in an evaluation file, in order."""
    shared = []
    for length, numbers in evaluation.items():
        own = runs(found.numbers, length)
        place = np.searchsorted(numbers, own)
        place[place == len(numbers)] = 0
        shared += [(first, length) for first in np.flatnonzero(numbers[place] == own).tolist()]
    return sorted(shared)


def evaluation_runs(files: Sequence[str]) -> Evaluation:
    """What to look for. A file without any passage to look for is an error: it would protect nothing."""
    found: dict[int, list[Numbers]] = defaultdict(list)
    for file in files:
        before = sum(map(len, found.values()))
        for passage in passages(file):
            numbers = numbers_of(passage)
            length = min(RUN, len(numbers))
            if length >= SHORTEST:
                found[length].append(runs(numbers, length))
        if sum(map(len, found.values())) == before:
            raise DataError(f"{file}: no passage of {SHORTEST} words or more in it; is it the right file?")
    return {length: np.unique(np.concatenate(numbers)) for length, numbers in sorted(found.items())}


def passages(path: str) -> Iterator[str]:
    """Every string in a .json or .jsonl file, or the text of any other; also .gz."""
    check_is_file(path)  # each process reads it
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            content = file.read().decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from error
    name = path.removesuffix(".gz")
    if name.endswith(".json"):
        yield from _strings(_json(content, path))
    elif name.endswith(".jsonl"):
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                yield from _strings(_json(line, f"{path}:{number}"))
    else:
        yield content


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {told(error)}") from error


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _spans(shared: Sequence[tuple[int, int]], found: Words) -> list[Span]:
    """The characters to remove: each run with its margins, joined where they meet."""
    spans: list[Span] = []
    for first, length in shared:
        start, stop = int(found.starts[first]) - MARGIN, int(found.stops[first + length - 1]) + MARGIN
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
        else:
            spans.append((start, stop))
    return spans


def _parts(text: str, spans: Sequence[Span], found: Words) -> list[str]:
    """What is left between the spans, in whole words, where it is long enough."""
    starts = [0, *(_next(found.starts, stop, len(text)) for _, stop in spans)]
    stops = [*(_last(found.stops, start) for start, _ in spans), len(text)]
    return [text[start:stop].strip() for start, stop in zip(starts, stops) if stop - start >= LEAST]


def _next(places: NDArray[np.int64], least: int, otherwise: int) -> int:
    at = int(np.searchsorted(places, least))
    return int(places[at]) if at < len(places) else otherwise


def _last(places: NDArray[np.int64], most: int) -> int:
    at = int(np.searchsorted(places, most, "right"))
    return int(places[at - 1]) if at else 0
