"""Perplexity of any text: JSON lines, a text file, a corpus, or a folder that is made into one as training does.

    megatron   documents in a row, the end of a document between two of them, in windows that may overlap
    lm-eval    each document for itself, after the end of another

Text is taken as it is. Words are what is between white space.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import numpy as np

from data.cached import cached_corpus
from data.indexed import IndexedCorpus
from data.sampling import parse_split, split_documents
from data.storage import DataError
from megatron.config.tree import require
from megatron.evaluate import reading
from megatron.evaluate.pieces import Ids
from megatron.evaluate.request import PARTS, Asked, is_corpus
from megatron.evaluate.stream import Stream, Text, ending, in_a_row, one_by_one
from megatron.evaluate.task import Subject

WORD = re.compile(r"\S+")


def prepare(asked: Asked, subject: Subject) -> Stream:
    texts = [text for text in _texts(asked, subject) if len(text.ids)]
    if not texts:
        raise DataError(f"{asked.data}: no token to score")
    words, size = sum(text.words for text in texts), sum(text.bytes for text in texts)
    if asked.protocol == "lm-eval":
        return Stream(one_by_one((text.ids for text in texts), subject), words, size, examples=len(texts))
    end = ending(subject, texts[0].ids)
    tokens = np.concatenate([part for text in texts for part in (text.ids, end)][:-1])
    stride = asked.stride_in(subject.length)
    return Stream(in_a_row(tokens, subject, stride, asked.data), words, size, stride, examples=len(texts))


def _texts(asked: Asked, subject: Subject) -> Iterator[Text]:
    if is_corpus(asked.data):
        yield from _of_corpus(asked.data, asked, subject)
        return
    if os.path.isdir(asked.data):
        prefix, _ = cached_corpus(asked.data, subject.tokenizer, subject.reading, subject.cache_path)
        yield from _of_corpus(prefix, asked, subject)
        return
    whole = asked.part is None
    meant = range(0) if whole else _part(asked, subject, sum(1 for _ in _documents(asked.data, subject)))
    for number, text in enumerate(_documents(asked.data, subject)):
        if whole or number in meant:
            yield _measured(subject.encode(text), text)


def _documents(path: str, subject: Subject) -> Iterator[str]:
    """One by one: none is kept. Of an object it is what training took, or else its `text`."""
    if not reading.is_lines(path):
        yield reading.whole_text(path)
        return
    for line in reading.lines(path):
        yield line.text(*dict.fromkeys((subject.reading.json_key, "text")))


def _of_corpus(prefix: str, asked: Asked, subject: Subject) -> Iterator[Text]:
    """Of a corpus the text is what its tokens mean."""
    corpus, tokenizer = IndexedCorpus(prefix), subject.tokenizer
    made_by = corpus.facts.tokenizer if corpus.facts else None
    if made_by is not None and made_by.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{asked.data}: made with another tokenizer ({made_by.name}) than the model's "
                        f"({tokenizer.name}); give the text itself")
    corpus.check_vocabulary(tokenizer.vocab_size)
    for number in _part(asked, subject, corpus.num_documents):
        ids = corpus.document(number)
        if len(ids) and ids[-1] == tokenizer.eod:
            ids = ids[:-1]
        yield _measured(ids, tokenizer.decode(ids.tolist()))


def _measured(ids: Ids, text: str) -> Text:
    return Text(ids, sum(1 for _ in WORD.finditer(text)), len(text.encode()))


def _part(asked: Asked, subject: Subject, documents: int) -> range:
    """Numbers of the documents that are meant."""
    if asked.part is None:
        return range(documents)
    require(subject.split is not None, f"--part {asked.part}: the model does not say how its text was split: --load "
            "a run of ours")
    require(asked.part not in subject.apart, f"--part {asked.part}: the run took other data for it than its --split, "
            f"--{asked.part}-data {' '.join(subject.apart.get(asked.part, ()))}: give that as --data, without --part")
    found = split_documents(parse_split(str(subject.split)), documents)[PARTS.index(asked.part)]
    if not found:
        raise DataError(f"--part {asked.part}: --split {subject.split} leaves it no document of the {documents} in "
                        f"{asked.data}")
    return found
