"""A quality classifier: logistic regression over hashed words and pairs of words (GPT-3 and DCLM chose pages so).

A text's features are its distinct words and pairs of neighbouring words (minhash.py), hashed to `FEATURES` numbers and
scaled to length 1, so that a long text weighs no more than a short one. The score is the estimated probability that
the text is good. `train` gives both classes the same weight, whatever their numbers, and says how well the result tells
apart the tenth of the texts that it has not learnt from. The same texts and seed give the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.compressed import read_errors_for
from data.input_files import check_sha256
from data.storage import DataError, check_outputs_are_not_inputs, staged_file
from data.webtext.documents import Document, DocumentFunction, DroppedDocument
from data.webtext.minhash import hash_words, ngram_hashes
from data.webtext.readers import WebReadOptions, find_source_files, plan_units, read_unit

FEATURE_BITS = 20
FEATURES = 1 << FEATURE_BITS
EPOCHS, LEARNING_RATE = 5, 4.0
HELD_OUT = 10  # each tenth text is kept for the test
MIN_TEXTS = 2 * HELD_OUT

Features = NDArray[np.uint32]  # of one text: distinct and sorted


def features_of(text: str) -> Features:
    words = hash_words(text).hashes
    hashes = np.concatenate([words, ngram_hashes(words, 2)])
    return np.unique(hashes >> np.uint64(64 - FEATURE_BITS)).astype(np.uint32)


def score(weights: NDArray[np.float32], features: Features) -> float:
    """The probability that the text is good; `weights` [FEATURES + 1] ends with the bias."""
    logit = weights[-1] + weights[features].sum(dtype=np.float64) / max(1, len(features)) ** 0.5
    return float(1 / (1 + np.exp(-logit)))


def fit(texts: Sequence[Features], is_good: Sequence[bool], seed: int) -> NDArray[np.float32]:
    """Stochastic gradient descent, a text at a time, with a rate that falls to 0."""
    weights, share_of_good = np.zeros(FEATURES + 1, np.float32), sum(is_good) / len(is_good)
    importance = {True: 0.5 / share_of_good, False: 0.5 / (1 - share_of_good)}  # both classes count the same in all
    random = np.random.RandomState(seed)  # its numbers are the same in all versions of numpy
    order = np.concatenate([random.permutation(len(texts)) for _ in range(EPOCHS)])
    for step, number in enumerate(order):
        features, good = texts[number], is_good[number]
        rate = LEARNING_RATE * (1 - step / len(order))
        change = rate * importance[good] * (good - score(weights, features))
        weights[features] += change / max(1, len(features)) ** 0.5
        weights[-1] += change
    return weights


def texts_of(inputs: Iterable[str], options: WebReadOptions) -> Iterator[str]:
    sources, _ = find_source_files([*inputs], options.format)
    for unit in plan_units(sources, shard_bytes=1 << 30):  # units do not matter here: texts are read one by one
        for result in read_unit(unit, options):
            if isinstance(result.value, Document) and not result.drop_reason:
                yield result.value.text
            elif isinstance(result.value, Exception) and options.on_error == "strict":
                raise DataError(f"{result.location()} {result.value}")


def train(good: Sequence[str], bad: Sequence[str], output: Path, options: WebReadOptions, seed: int) -> str:
    """Write the classifier; returns a line on the held-out texts."""
    sources, _ = find_source_files([*good, *bad], options.format)
    check_outputs_are_not_inputs([source.path for source in sources], [output])
    check_sha256({source.path: source.sha256 for source in sources})
    texts, is_good = list[Features](), list[bool]()
    for inputs, label in ((good, True), (bad, False)):
        found = [features_of(text) for text in texts_of(inputs, options)]
        if len(found) < MIN_TEXTS:
            raise DataError(f"{' '.join(inputs)}: expected at least {MIN_TEXTS} texts, found {len(found)}")
        texts += found
        is_good += [label] * len(found)
    training = [number for number in range(len(texts)) if number % HELD_OUT]
    weights = fit([texts[number] for number in training], [is_good[number] for number in training], seed)
    tested = [(score(weights, texts[number]), is_good[number]) for number in range(0, len(texts), HELD_OUT)]
    right = {label: [(value >= 0.5) == label for value, kind in tested if kind == label] for label in (True, False)}
    with staged_file(output) as file:
        np.save(file, weights, allow_pickle=False)
    shares = ", ".join(f"{sum(right[label]) / len(right[label]):.1%} of {len(right[label])} {name}"
                       for label, name in ((True, "good"), (False, "bad")))
    return f"classifier: {output}: of held-out texts it recognises {shares} (a score of 0.5 divides them)"


def load_weights(path: str) -> NDArray[np.float32]:
    with read_errors_for(path):
        try:
            weights: NDArray[np.float32] = np.load(path, allow_pickle=False)
        except ValueError as error:
            raise DataError(f"{path}: not a classifier of train-classifier ({error})") from error
    if weights.shape != (FEATURES + 1,) or weights.dtype != np.float32:
        raise DataError(f"{path}: not a classifier of this version; train it again")
    return weights


def make_classifier(path: str, min_score: float) -> DocumentFunction:
    return partial(classify, weights=load_weights(path), min_score=min_score)


def classify(document: Document, weights: NDArray[np.float32], min_score: float) -> Document | DroppedDocument:
    """The document with its score in `meta`, if it is good enough."""
    value = round(score(weights, features_of(document.text)), 4)
    if value < min_score:
        return DroppedDocument("low score")
    return Document(document.text, document.url, {**document.meta, "quality_score": value})
