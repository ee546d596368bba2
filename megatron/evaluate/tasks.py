"""The evaluation tasks: the pieces that are scored, and the metrics that follow from the scores.

    wikitext     perplexity of a WikiText file       lambada      predicts the last word of a passage
    perplexity   perplexity of any text or corpus

How a task reads its data and counts words is said by its protocol (TASKS in cli.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.indexed import IndexedCorpus
from data.input_files import JSON_LINES, kind_of
from data.text_files import Separator
from data.preprocess import TextReadOptions
from data.sampling import parse_split, split_documents
from data.sources import cached_corpus
from data.storage import DataError
from data.tokenizer import Tokenizer
from megatron.config.tree import require
from megatron.evaluate.cli import PARTS, EvalRequest, Protocol, is_corpus_prefix
from megatron.inference.prompts import read_lines, text_from_json


# ---- what is scored -----------------------------------------------------------------------------------------------


TokenIds = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class EvalModelInfo:
    """What tasks need to know of the model."""

    tokenizer: Tokenizer
    max_positions: int
    # How training read and split its text: the section `data` of its configuration.
    data_settings: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> TokenIds:
        """Token ids in the smallest integer type, because all data is in memory."""
        return self.tokenizer.encode_array(text).astype(np.min_scalar_type(self.tokenizer.vocab_size - 1))


@dataclass(frozen=True, eq=False)
class ScoringRequest:
    tokens: TokenIds
    first_target: int  # tokens from here on are targets; the model reads all tokens but the last
    is_truncated: bool = False  # the beginning of the context does not fit and is not read

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - self.first_target


@dataclass(frozen=True)
class TargetScore:
    logprob: float  # sum over the targets
    is_greedy: bool  # every target is the argmax


def overlapping_windows(tokens: TokenIds, length: int, stride: int) -> Iterator[ScoringRequest]:
    """Megatron's: a window begins every `stride` tokens. The first scores all its tokens, each later one its last
    `stride`, so that a token has at least `length - stride` tokens before it. With `stride` = `length` none overlap."""
    assert 1 <= stride <= length
    start, first = 0, 1
    while first < len(tokens):
        stop = min(start + length + 1, len(tokens))
        yield ScoringRequest(tokens[start:stop], first - start)
        start, first = start + stride, stop


def document_requests(document: TokenIds, length: int, eod: int) -> Iterator[ScoringRequest]:
    """lm-eval's, of a document after an end-of-document token: each window scores `length` tokens; the last one scores
    fewer but reads `length` too."""
    tokens = np.concatenate([np.array([eod], np.min_scalar_type(eod)), document])
    first = 1
    while first < len(tokens):
        stop = min(first + length, len(tokens))
        start = max(0, stop - 1 - length)
        yield ScoringRequest(tokens[start:stop], first - start)
        first = stop


def continuation_request(context: Sequence[int], targets: Sequence[int], length: int, location: str) -> ScoringRequest:
    """The targets after the end of the context, as much as a model of `length` positions reads."""
    if not 0 < len(targets) <= length:
        count = "no token" if not targets else f"{len(targets)} tokens"
        raise DataError(f"{location}: {count} to score, and the model has {length} positions: expected 1 to {length}")
    whole = np.array([*context, *targets])
    tokens = whole[-(length + 1):]
    return ScoringRequest(tokens, len(tokens) - len(targets), is_truncated=len(tokens) < len(whole))


# ---- tasks and metrics -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """Scoring requests, and what the metrics divide by."""

    requests: Sequence[ScoringRequest]
    rules: Protocol
    words: int  # words of the original text, before any preparation
    bytes: int  # bytes of the original text in UTF-8
    stride: int | None = None  # tokens between the starts of windows; None: the task has no overlapping windows
    examples: int | None = None

    @property
    def num_truncated(self) -> int | None:
        """Examples whose beginning is not read; None: the text continues from window to window."""
        return sum(request.is_truncated for request in self.requests) if self.rules.target else None

    def metrics(self, scores: Sequence[TargetScore]) -> dict[str, float | int | None]:
        """By name, in the order of the report.

            loss                  nats per scored token
            perplexity            exp(loss): depends on the tokenizer
            adjusted_perplexity   exp(loss x tokens / words): comparable across tokenizers; None without words
            bits_per_byte         of the original text: independent of tokenizer and word definition
        """
        logprob = math.fsum(score.logprob for score in scores)
        tokens = sum(request.num_targets for request in self.requests)
        correct = sum(score.is_greedy for score in scores)
        accuracies = {"acc": correct / len(scores), "correct": correct} if self.rules.target else {}
        words = self.words - self.rules.unscored_words
        return {**accuracies, **({} if self.examples is None else {"examples": self.examples}), "tokens": tokens,
                "original_words": self.words, "original_bytes": self.bytes, "loss": -logprob / tokens,
                "perplexity": self._exp(-logprob / tokens),
                "adjusted_perplexity": self._exp(-logprob / words) if words else None,
                "bits_per_byte": -logprob / math.log(2) / self.bytes if self.bytes else None}

    def _exp(self, loss: float) -> float:
        try:
            return math.exp(min(loss, self.rules.max_loss))
        except OverflowError:
            return math.inf


def prepare_task(request: EvalRequest, model_info: EvalModelInfo) -> EvalTask:
    """Read and tokenize the data. Raises DataError if it is unusable."""
    if request.task == "lambada":
        return _lambada_task(request, model_info)
    length, eod, rules = model_info.max_positions, model_info.tokenizer.eod, request.rules
    documents, words, size = list[TokenIds](), 0, 0
    for ids, text in (_articles if request.task == "wikitext" else _selected_documents)(request, model_info):
        if len(ids):
            documents.append(ids)
            words += rules.count_words(text)
            size += len(text.encode())
    if not documents:
        raise DataError(f"{request.data}: no token to score")
    stride, requests = None, list[ScoringRequest]()
    if rules.stride is None:
        requests = [one for ids in documents for one in document_requests(ids, length, eod)]
    else:
        stride = request.stride or min(rules.stride or length, length)
        require(stride <= length, f"--stride is {stride}, and the model has {length} positions: tokens between two "
                f"windows would not be scored; expected 1 to {length}")
        end = np.array([eod], np.min_scalar_type(eod))
        tokens = np.concatenate([part for ids in documents for part in (end, ids)][not rules.starts_with_eod:])
        if len(tokens) < 2:
            raise DataError(f"{request.data}: {len(tokens)} token: the first one is not scored; expected two or more")
        requests = [*overlapping_windows(tokens, length, stride)]
    return EvalTask(requests=requests, rules=rules, words=words, bytes=size, stride=stride,
                    examples=None if request.task == "wikitext" and stride is not None else len(documents))


# ---- files -------------------------------------------------------------------------------------------------------


def read_text(path: str) -> str:
    """The content of a text file, with its line ends."""
    text = "".join(line for line, _ in read_lines(path))
    if not text.strip():
        raise DataError(f"{path}: the file is empty; expected text")
    return text


def read_json_texts(path: str, *keys: str) -> Iterator[tuple[str, str]]:
    """(text, location) of each line of a JSON lines file: the value of the first of `keys` that its object has."""
    is_empty = True
    for line, where in read_lines(path):
        if not line.strip():
            continue
        is_empty = False
        yield text_from_json(line, where, *keys), where
    if is_empty:
        raise DataError(f"{path}: the file is empty; expected a JSON object on each line")


# ---- WikiText ----------------------------------------------------------------------------------------------------

# The rules of Megatron-LM and lm-eval, letter by letter and in their order: each one changes the results.
DETOKENIZER_RULES: tuple[tuple[str | re.Pattern[str], str], ...] = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), r"/'[0-9]/"), *((f" @{mark}@ ", mark) for mark in "-,."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    *((re.compile(rf"{mark}\s*([^{mark}]*?)\s*{mark}"), rf"{mark}\1{mark}") for mark in "\"'"),
    *((" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"))


def detokenize(text: str) -> str:
    for old, new in DETOKENIZER_RULES:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def split_articles(text: str) -> Iterator[str]:
    """The documents of a WikiText file, which are those of lm-eval's data set: each begins at a heading of the first
    level. Joined by line ends they are the file again."""
    article: list[str] = []
    for line in text.split("\n"):
        title = line.replace("= = =", "===").replace("= =", "==").strip()
        if title.startswith("= ") and title.endswith(" =") and "".join(article).strip():
            yield "\n".join(article)
            article = []
        article.append(line)
    yield "\n".join(article)


def _articles(request: EvalRequest, model_info: EvalModelInfo) -> Iterator[tuple[TokenIds, str]]:
    """(token ids, original text) of each article, or of all of them as one document."""
    pages = ([text for text, _ in read_json_texts(request.data, "page", "text")] if kind_of(request.data) == JSON_LINES
             else [*split_articles(read_text(request.data))])
    for text in pages if request.rules.stride is None else ["\n".join(pages)]:
        yield model_info.encode(detokenize(text)), text


# ---- LAMBADA -----------------------------------------------------------------------------------------------------


def _lambada_task(request: EvalRequest, model_info: EvalModelInfo) -> EvalTask:
    """A passage is correct if every target token is the argmax. megatron and openai: the last token, or (strict) the
    last word with a space before it. lm-eval: the last word, tokenized together with its context."""
    requests, size, tokenizer = list[ScoringRequest](), 0, model_info.tokenizer
    for text, where in read_json_texts(request.data, "text"):
        if not text.strip():
            raise DataError(f"{where}: 'text': expected a passage, found nothing but white space")
        if request.protocol == "lm-eval":  # splits at the last space
            before, _, word = text.rpartition(" ")
            context = tokenizer.encode(before.rstrip())
            targets = tokenizer.encode(f"{before} {word}")[len(context):]
        elif request.strict:
            word = text.split()[-1]
            context, targets = tokenizer.encode(text[: text.rfind(word)].strip()), tokenizer.encode(f" {word}")
        else:
            ids = tokenizer.encode(text)
            context, targets = ids[:-1], ids[-1:]
        requests.append(continuation_request(context or [tokenizer.eod], targets, model_info.max_positions, where))
        size += len(tokenizer.decode(targets).encode())
    return EvalTask(requests=requests, rules=request.rules, words=len(requests), bytes=size, examples=len(requests))


# ---- perplexity of any text --------------------------------------------------------------------------------------


def _selected_documents(request: EvalRequest, model_info: EvalModelInfo) -> Iterator[tuple[TokenIds, str]]:
    """(token ids, text) of the documents of --part; the text of a tokenized corpus is decoded."""
    settings, tokenizer = model_info.data_settings, model_info.tokenizer
    prefix = request.data if is_corpus_prefix(request.data) else None
    if prefix is None and os.path.isdir(request.data):  # tokenized into a cached corpus, as in training
        reading = TextReadOptions(settings.get("text_key", TextReadOptions.json_key),
                                  Separator.parse(settings.get("document_separator")))
        prefix, _ = cached_corpus(request.data, tokenizer, reading, settings.get("data_cache_path"))
    if prefix is not None:
        corpus = IndexedCorpus(prefix)
        made_by = corpus.facts.tokenizer if corpus.facts else None
        if made_by is not None and made_by.fingerprint != tokenizer.fingerprint:
            raise DataError(f"{request.data}: made with another tokenizer ({made_by.name}) than the model's "
                            f"({tokenizer.name}); give the text itself")
        corpus.check_vocabulary(tokenizer.vocab_size)
        for number in _part_range(request, model_info, corpus.num_documents):
            ids = corpus.document(number)
            if len(ids) and ids[-1] == tokenizer.eod:
                ids = ids[:-1]
            yield ids, tokenizer.decode(ids.tolist())
        return

    def texts() -> Iterator[str]:
        if kind_of(request.data) == JSON_LINES:  # of an object the key that training used, or else `text`
            keys = dict.fromkeys((settings.get("text_key", "text"), "text"))
            return (text for text, _ in read_json_texts(request.data, *keys))
        return iter([read_text(request.data)])

    # all of them need not be counted
    selected = None if request.part is None else _part_range(request, model_info, sum(1 for _ in texts()))
    for number, text in enumerate(texts()):
        if selected is None or number in selected:
            yield model_info.encode(text), text


def _part_range(request: EvalRequest, model_info: EvalModelInfo, documents: int) -> range:
    """Numbers of the documents of --part, out of `documents`."""
    if request.part is None:
        return range(documents)
    split, files = model_info.data_settings.get("split"), None
    require(split is not None,
            f"--part {request.part}: the model does not say how its text was split: --load a run of ours")
    if request.part != "train":
        files = model_info.data_settings.get(f"{request.part}_data")
    require(not files, f"--part {request.part}: the run took other data for it than its --split, --{request.part}-data "
            f"{' '.join(files or ())}: give that as --data, without --part")
    part = split_documents(parse_split(str(split)), documents)[PARTS.index(request.part)]
    if not part:
        raise DataError(f"--part {request.part}: --split {split} leaves it no document of the {documents} "
                        f"in {request.data}")
    return part
