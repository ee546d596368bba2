"""Remove evaluation text from training text: documents that share 13 consecutive words with an evaluation file.

Words are those of ngram_hashes.py: case, punctuation and white space do not hide a copy. A *passage* is one string of a
JSON file, or a whole text file; a passage of 8 to 12 words is one n-gram of that length, shorter ones are ignored.
N-grams are held as 8-byte hashes, since evaluation sets are small.

`drop` drops such a document. `cut` removes the shared words with `CUT_MARGIN` characters on both sides, where the rest
of the evaluation text or its answer may be, and joins the rest; it drops a document of which too little is left.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from data.compressed import open_decompressed, strip_compression_suffix
from data.storage import DataError, check_is_file, parse_error_text
from data.webtext.documents import Document, DroppedDocument
from data.webtext.minhash import HashArray, HashedWords, hash_words, ngram_hashes, word_hashes

NGRAM_WORDS = 13
MIN_NGRAM_WORDS = 8
CUT_MARGIN = 200
MIN_PART_CHARACTERS = 200
"""Minimum characters of a part kept beside a cut."""
MAX_CUTS = 10
MODES = ("drop", "cut")

EvaluationNgrams = Mapping[int, HashArray]
"""N-gram length -> sorted hashes."""


@dataclass(frozen=True)
class DecontaminateOptions:
    files: tuple[str, ...]
    mode: str = MODES[0]


def make_decontaminate(options: DecontaminateOptions) -> Callable[[Document], Document | DroppedDocument]:
    return partial(decontaminate, evaluation=read_evaluation_ngrams(options.files), mode=options.mode)


def decontaminate(document: Document, evaluation: EvaluationNgrams, mode: str) -> Document | DroppedDocument:
    """The document, its remaining parts, or a DroppedDocument."""
    words = hash_words(document.text)
    shared = shared_ngrams(words, evaluation)
    if not shared:
        return document
    amount = "1 run" if len(shared) == 1 else "2 to 9 runs" if len(shared) < 10 else "10 runs or more"
    if mode == "drop":
        return DroppedDocument(f"evaluation text: {amount}")
    cuts: list[tuple[int, int]] = []  # character ranges: shared n-grams with margins, merged if they overlap
    for first, length in shared:
        start, stop = int(words.starts[first]) - CUT_MARGIN, int(words.stops[first + length - 1]) + CUT_MARGIN
        if cuts and start <= cuts[-1][1]:
            cuts[-1] = cuts[-1][0], max(stop, cuts[-1][1])
        else:
            cuts.append((start, stop))
    # Parts go from the first word after a cut to the last word before the next.
    after = np.searchsorted(words.starts, [stop for _, stop in cuts])
    before = np.searchsorted(words.stops, [start for start, _ in cuts], "right")
    starts = [0, *np.append(words.starts, len(document.text))[after]]
    stops = [*np.append(0, words.stops)[before], len(document.text)]
    parts = [document.text[start:stop].strip() for start, stop in zip(starts, stops)
             if stop - start >= MIN_PART_CHARACTERS]
    if len(cuts) > MAX_CUTS or not parts:
        return DroppedDocument(f"evaluation text: {amount}, too little left")
    return Document("\n\n".join(parts), document.url, {**document.meta, "evaluation_runs_cut": len(shared)})


def shared_ngrams(words: HashedWords, evaluation: EvaluationNgrams) -> list[tuple[int, int]]:
    """(first word, length) of the document's n-grams that are in an evaluation file, in order."""
    shared = []
    for length, numbers in evaluation.items():
        own = ngram_hashes(words.hashes, length)
        place = np.searchsorted(numbers, own)
        place[place == len(numbers)] = 0
        shared += [(first, length) for first in np.flatnonzero(numbers[place] == own).tolist()]
    return sorted(shared)


def read_evaluation_ngrams(files: Sequence[str]) -> EvaluationNgrams:
    """N-gram hashes of all passages. DataError for a file without a usable passage, since it would protect nothing."""
    hashes: dict[int, list[HashArray]] = defaultdict(list)
    for file in files:
        before = sum(map(len, hashes.values()))
        for passage in read_passages(file):
            numbers = word_hashes(passage)
            length = min(NGRAM_WORDS, len(numbers))
            if length >= MIN_NGRAM_WORDS:
                hashes[length].append(ngram_hashes(numbers, length))
        if sum(map(len, hashes.values())) == before:
            raise DataError(f"{file}: no passage of {MIN_NGRAM_WORDS} words or more in it; is it the right file?")
    return {length: np.unique(np.concatenate(numbers)) for length, numbers in sorted(hashes.items())}


def read_passages(path: str) -> Iterator[str]:
    """Every string of a .json or .jsonl file, or the text of any other file, compressed or not."""
    check_is_file(path)  # every process reads it
    try:
        with open_decompressed(path) as file:
            content = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from error
    name = strip_compression_suffix(path)
    values: Iterable[tuple[str, str]] = [(path, content)] if name.endswith(".json") else []
    if name.endswith(".jsonl"):
        values = ((f"{path}:{k}", line) for k, line in enumerate(content.split("\n"), start=1) if line.strip())
    elif not values:
        yield content
    for location, text in values:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: not JSON: {parse_error_text(error)}") from error
        yield from _strings_in(value)


def _strings_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(item)
