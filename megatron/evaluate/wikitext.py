"""WikiText: perplexity of a text that was cut into words, under one of three protocols.

    megatron   the whole file is one sequence; windows begin every `stride` tokens (32)
    openai     the same, after the end of a document, without overlap: docs/decisions/020
    lm-eval    each article for itself, after the end of a document

What a word is differs as well: see `words_of`.
"""

from __future__ import annotations

import re

from megatron.evaluate import reading
from megatron.evaluate.detokenise import articles, detokenised
from megatron.evaluate.request import Asked
from megatron.evaluate.stream import Stream, in_a_row, one_by_one, with_start
from megatron.evaluate.task import Subject

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
