"""WikiText: perplexity of a text that was cut into words, under one of three protocols.

    megatron   the whole file is one sequence; windows begin every `stride` tokens (32)
    openai     the same, after the end of a document, without overlap: docs/decisions/020
    lm-eval    each article for itself, after the end of a document

What a word is differs as well: see `words_of`. The rules that undo the cutting are applied in their order to the whole
text. They are those of Megatron-LM and of lm-eval, letter for letter, because every one moves the figures. `/' [0-9]/`
was meant for something else, and matches next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.evaluate import reading
from megatron.evaluate.request import Asked
from megatron.evaluate.stream import Stream, in_a_row, one_by_one, with_start
from megatron.evaluate.task import Subject

PLAIN, PATTERN = False, True

RULES: tuple[tuple[bool, str, str], ...] = (
    (PLAIN, "s '", "s'"),
    (PATTERN, r"/' [0-9]/", r"/'[0-9]/"),
    *((PLAIN, f" @{mark}@ ", mark) for mark in "-,."),
    *((PLAIN, f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (PATTERN, r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (PATTERN, r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (PATTERN, r"{\s*([^}]*?)\s*}", r"{\1}"),
    *((PATTERN, rf"{mark}\s*([^{mark}]*?)\s*{mark}", rf"{mark}\1{mark}") for mark in "\"'"),
    *((PLAIN, " ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (PLAIN, " ° ", "°"),
    (PLAIN, " \n", "\n"),
    (PLAIN, "\n ", "\n"),
    (PLAIN, " N ", " 1 "),
    (PLAIN, " 's", "'s"),
)


def detokenised(text: str) -> str:
    for is_pattern, old, new in RULES:
        text = re.sub(old, new, text) if is_pattern else text.replace(old, new)
    return text


def articles(text: str) -> Iterator[str]:
    """The documents of a WikiText file, joined by line ends the file again: each begins at a heading of the first
    level. They are those of lm-eval's data set."""
    held: list[str] = []
    for line in text.split("\n"):
        if _is_title(line) and "".join(held).strip():
            yield "\n".join(held)
            held = []
        held.append(line)
    yield "\n".join(held)


def _is_title(line: str) -> bool:
    line = line.replace("= = =", "===").replace("= =", "==").strip()
    return line.startswith("= ") and line.endswith(" =")


MOST = 20.0
"""Megatron shows no perplexity above that of this loss."""


def prepare(asked: Asked, subject: Subject) -> Stream:
    pages = pages_of(asked.data)
    original = "\n".join(pages)
    size = len(original.encode())
    if asked.protocol == "lm-eval":
        ids = [subject.encode(detokenised(page)) for page in pages]
        return Stream(one_by_one(ids, subject), sum(words_of(page, asked.protocol) for page in pages),
                      sum(len(page.encode()) for page in pages), examples=len(pages))
    stride, words = asked.stride_in(subject.length), words_of(original, asked.protocol)
    tokens = subject.encode(detokenised(original))
    if asked.protocol == "openai":
        return Stream(in_a_row(with_start(tokens, subject), subject, stride, asked.data), words, size, stride)
    return Stream(in_a_row(tokens, subject, stride, asked.data), words, size, stride,
                  words_scored=words - 1, most=MOST)


def pages_of(path: str) -> list[str]:
    """The articles of a file as WikiText comes, or of JSON lines with a `page` each."""
    if reading.is_lines(path):
        return [line.text("page", "text") for line in reading.lines(path)]
    return list(articles(reading.whole_text(path)))


def words_of(original: str, protocol: str) -> int:
    """Megatron cuts at single spaces, so that the end of a line between two spaces is a word, as in the published
    counts; lm-eval at any white space, and counts what is before the first and after the last."""
    if protocol == "megatron":
        return len(original.strip().split(" "))
    if protocol == "lm-eval":
        return len(re.split(r"\s+", original))
    return len(original.split())
