"""WikiText perplexity, under three protocols.

    megatron   the whole file as one sequence; a window begins every `stride` tokens (32)
    openai     the same, after an end-of-document token, without overlap: docs/decisions/020
    lm-eval    each article by itself, after an end-of-document token

The protocols also count words differently (`count_words`). The detokenizer rules are those of Megatron-LM and
lm-eval, letter by letter and in their order, because each one changes the results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.evaluate import task_files
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.task import EvalModelInfo, TextTask, document_requests, prepend_eod, sequence_requests

IS_LITERAL, IS_PATTERN = False, True

DETOKENIZER_RULES: tuple[tuple[bool, str, str], ...] = (
    (IS_LITERAL, "s '", "s'"),
    (IS_PATTERN, r"/' [0-9]/", r"/'[0-9]/"), *((IS_LITERAL, f" @{mark}@ ", mark) for mark in "-,."),
    *((IS_LITERAL, f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (IS_PATTERN, r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (IS_PATTERN, r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (IS_PATTERN, r"{\s*([^}]*?)\s*}", r"{\1}"),
    *((IS_PATTERN, rf"{mark}\s*([^{mark}]*?)\s*{mark}", rf"{mark}\1{mark}") for mark in "\"'"),
    *((IS_LITERAL, " ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (IS_LITERAL, " ° ", "°"),
    (IS_LITERAL, " \n", "\n"),
    (IS_LITERAL, "\n ", "\n"),
    (IS_LITERAL, " N ", " 1 "),
    (IS_LITERAL, " 's", "'s"))


def detokenize(text: str) -> str:
    for is_pattern, old, new in DETOKENIZER_RULES:
        text = re.sub(old, new, text) if is_pattern else text.replace(old, new)
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


MAX_LOSS = 20.0
"""Megatron caps perplexities at exp of this loss."""


def prepare(request: EvalRequest, model_info: EvalModelInfo) -> TextTask:
    if task_files.is_json_lines(request.data):
        pages = [line.get_text("page", "text") for line in task_files.read_json_lines(request.data)]
    else:
        pages = list(split_articles(task_files.read_text(request.data)))
    original = "\n".join(pages)
    size = len(original.encode())
    if request.protocol == "lm-eval":
        ids = [model_info.encode(detokenize(page)) for page in pages]
        return TextTask(document_requests(ids, model_info), sum(count_words(page, request.protocol) for page in pages),
                        sum(len(page.encode()) for page in pages), examples=len(pages))
    stride, words = request.window_stride(model_info.max_positions), count_words(original, request.protocol)
    tokens = model_info.encode(detokenize(original))
    if request.protocol == "openai":
        return TextTask(sequence_requests(prepend_eod(tokens, model_info), model_info, stride, request.data), words,
                        size, stride)
    return TextTask(sequence_requests(tokens, model_info, stride, request.data), words, size, stride,
                    words_scored=words - 1, max_loss=MAX_LOSS)


def count_words(original: str, protocol: str) -> int:
    """Megatron splits at single spaces, so that a line end between two spaces is a word, as in the published counts;
    lm-eval at any white space, and counts the empty strings before the first and after the last."""
    if protocol == "megatron":
        return len(original.strip().split(" "))
    if protocol == "lm-eval":
        return len(re.split(r"\s+", original))
    return len(original.split())
