"""Perplexity of any text: JSON lines, a text file, a corpus, or a folder (tokenized into a cached corpus as in
training).

    megatron   documents joined by end-of-document tokens, in windows that may overlap
    lm-eval    each document by itself, after an end-of-document token
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.indexed import IndexedCorpus
from data.sampling import parse_split, split_documents
from data.sources import cached_corpus
from data.storage import DataError
from megatron.config.tree import require
from megatron.evaluate import task_files
from megatron.evaluate.eval_args import PARTS, EvalRequest, is_corpus_prefix
from megatron.evaluate.scoring import TokenIds
from megatron.evaluate.task import EvalModelInfo, TextTask, document_requests, eod_array, sequence_requests

WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class EvalDocument:
    ids: TokenIds
    words: int
    bytes: int


def prepare(request: EvalRequest, model_info: EvalModelInfo) -> TextTask:
    texts = [text for text in _selected_documents(request, model_info) if len(text.ids)]
    if not texts:
        raise DataError(f"{request.data}: no token to score")
    words, size = sum(text.words for text in texts), sum(text.bytes for text in texts)
    if request.protocol == "lm-eval":
        return TextTask(document_requests((text.ids for text in texts), model_info), words, size, examples=len(texts))
    end = eod_array(model_info, texts[0].ids)
    tokens = np.concatenate([part for text in texts for part in (text.ids, end)][:-1])
    stride = request.window_stride(model_info.max_positions)
    return TextTask(sequence_requests(tokens, model_info, stride, request.data), words, size, stride,
                    examples=len(texts))


def _selected_documents(request: EvalRequest, model_info: EvalModelInfo) -> Iterator[EvalDocument]:
    prefix = request.data if is_corpus_prefix(request.data) else None
    if prefix is None and os.path.isdir(request.data):
        prefix, _ = cached_corpus(request.data, model_info.tokenizer, model_info.text_reading, model_info.cache_path)
    if prefix is not None:
        yield from _corpus_documents(prefix, request, model_info)
        return
    selected = None  # all, which need not be counted
    if request.part is not None:
        selected = _part_range(request, model_info, sum(1 for _ in _document_texts(request.data, model_info)))
    for number, text in enumerate(_document_texts(request.data, model_info)):
        if selected is None or number in selected:
            yield _make_document(model_info.encode(text), text)


def _document_texts(path: str, model_info: EvalModelInfo) -> Iterator[str]:
    """The text of each document; of a JSON object the key that training used, or else `text`."""
    if not task_files.is_json_lines(path):
        yield task_files.read_text(path)
        return
    for line in task_files.read_json_lines(path):
        yield line.get_text(*dict.fromkeys((model_info.text_reading.json_key, "text")))


def _corpus_documents(prefix: str, request: EvalRequest, model_info: EvalModelInfo) -> Iterator[EvalDocument]:
    """The documents of a tokenized corpus, with decoded text."""
    corpus, tokenizer = IndexedCorpus(prefix), model_info.tokenizer
    made_by = corpus.facts.tokenizer if corpus.facts else None
    if made_by is not None and made_by.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{request.data}: made with another tokenizer ({made_by.name}) than the model's "
                        f"({tokenizer.name}); give the text itself")
    corpus.check_vocabulary(tokenizer.vocab_size)
    for number in _part_range(request, model_info, corpus.num_documents):
        ids = corpus.document(number)
        if len(ids) and ids[-1] == tokenizer.eod:
            ids = ids[:-1]
        yield _make_document(ids, tokenizer.decode(ids.tolist()))


def _make_document(ids: TokenIds, text: str) -> EvalDocument:
    return EvalDocument(ids, sum(1 for _ in WORD.finditer(text)), len(text.encode()))


def _part_range(request: EvalRequest, model_info: EvalModelInfo, documents: int) -> range:
    """Numbers of the documents of --part, out of `documents`."""
    if request.part is None:
        return range(documents)
    require(model_info.split is not None,
            f"--part {request.part}: the model does not say how its text was split: --load a run of ours")
    require(request.part not in model_info.split_data_files,
            f"--part {request.part}: the run took other data for it than its --split, --{request.part}-data "
            f"{' '.join(model_info.split_data_files.get(request.part, ()))}: give that as --data, without --part")
    part = split_documents(parse_split(str(model_info.split)), documents)[PARTS.index(request.part)]
    if not part:
        raise DataError(f"--part {request.part}: --split {model_info.split} leaves it no document of the {documents} "
                        f"in {request.data}")
    return part
