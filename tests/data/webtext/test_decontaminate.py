"""Evaluation text is found in any disguise that keeps its words, and nothing else is touched."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from data.storage import DataError
from data.webtext.decontaminate import (CUT_MARGIN, MIN_PART_CHARACTERS, NGRAM_WORDS, DecontaminateOptions,
                                        make_decontaminate, read_evaluation_ngrams, read_passages, shared_ngrams)
from data.webtext.documents import Document, DroppedDocument
from data.webtext.minhash import hash_words
from tests.data.webtext.planted import EVALUATION, babble, plant


@pytest.fixture
def evaluation(tmp_path: Path) -> str:
    (tmp_path / "eval.jsonl").write_text(json.dumps({"id": 7, "passages": ["short one", EVALUATION]}) + "\n\n")
    return str(tmp_path / "eval.jsonl")


def test_cutting_takes_the_passage_and_its_margin_and_leaves_the_rest(evaluation: str) -> None:
    stage = make_decontaminate(DecontaminateOptions((evaluation,), "cut"))
    for page in plant(1, originals=10, words=150):
        result = stage(Document(page.text, "u", {"k": 1}))
        if page.kind == "contaminated":
            assert isinstance(result, Document) and result.url == "u"
            assert result.meta == {"k": 1, "evaluation_runs_cut": len(EVALUATION.split()) - NGRAM_WORDS + 1}
            assert not shared_ngrams(hash_words(result.text), read_evaluation_ngrams([evaluation]))
            parts = result.text.split(" " + EVALUATION.upper()[:5])[0].split("\n\n")
            assert page.text.startswith(parts[0]) and page.text.endswith(parts[-1])
            lost = len(page.text) - len(result.text) - len(EVALUATION)
            assert 2 * CUT_MARGIN - 4 <= lost <= 2 * CUT_MARGIN + 60  # to the next whole word on either side
        else:
            assert isinstance(result, Document) and result.text == page.text and result.meta == {"k": 1}


def test_what_is_shared_is_what_a_search_over_strings_finds(tmp_path: Path) -> None:
    rng = random.Random(2)
    texts = [" ".join(rng.choices("abcd", k=rng.randint(0, 60))) for _ in range(40)]
    texts += [babble(rng, 15), babble(rng, 10), babble(rng, 7)]
    (tmp_path / "e.json").write_text(json.dumps(texts))
    looked_for = set()
    for text in texts:
        plain = re.findall(r"\w+", text.lower())
        length = min(NGRAM_WORDS, len(plain))
        looked_for |= {tuple(plain[k:k + length]) for k in range(len(plain) - length + 1) if length >= 8}
    runs = read_evaluation_ngrams([str(tmp_path / "e.json")])
    assert sum(map(len, runs.values())) == len(looked_for)
    for _ in range(200):
        text = " ".join([*rng.choices("abcd", k=30), rng.choice(texts), *rng.choices("ab", k=5)])
        plain = re.findall(r"\w+", text.lower())
        expected = [(first, length) for first in range(len(plain)) for length in range(8, NGRAM_WORDS + 1)
                    if first + length <= len(plain) and tuple(plain[first:first + length]) in looked_for]
        assert shared_ngrams(hash_words(text), runs) == expected


@pytest.mark.parametrize("change, found", [
    (str.upper, True), (lambda text: text.replace(" ", "\n\t"), True), (lambda text: text.replace(",", " ,;- "), True),
    (lambda text: " ".join(text.split()[:NGRAM_WORDS]), True),
    (lambda text: " ".join(text.split()[:NGRAM_WORDS - 1]), False),
    (lambda text: " ".join(word if k % NGRAM_WORDS else "other" for k, word in enumerate(text.split())), False),
])
def test_disguises(change, found: bool, evaluation: str) -> None:  # type: ignore[no-untyped-def]
    stage = make_decontaminate(DecontaminateOptions((evaluation,)))
    result = stage(Document("Before it. " + change(EVALUATION) + " After it."))
    assert isinstance(result, DroppedDocument) == found


def test_scraps_are_not_kept(evaluation: str) -> None:
    stage, rng = make_decontaminate(DecontaminateOptions((evaluation,), "cut")), random.Random(3)
    for text in (EVALUATION, "x " * (CUT_MARGIN // 2) + EVALUATION,
                 f"{'y' * (CUT_MARGIN + MIN_PART_CHARACTERS - 20)} {EVALUATION}"):
        assert stage(Document(text)) == DroppedDocument("evaluation text: 10 runs or more, too little left")
    many = " ".join(f"{babble(rng, 200)} {EVALUATION}" for _ in range(11))
    assert isinstance(stage(Document(many)), DroppedDocument)
    assert isinstance(stage(Document(many[:-len(EVALUATION)])), Document)


def test_evaluation_files_of_every_kind_hold_the_same_passages(tmp_path: Path) -> None:
    contents = {"a.jsonl": json.dumps({"q": EVALUATION}), "b.json": json.dumps([[{"x": [EVALUATION]}]]),
                "c.txt": "\ufeff" + EVALUATION, "d.json.gz": json.dumps(EVALUATION)}
    for name, content in contents.items():
        raw = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        assert list(read_passages(str(tmp_path / name))) == [EVALUATION]


def test_a_file_that_would_protect_nothing_is_an_error(tmp_path: Path) -> None:
    for name, content, message in [("a.txt", b"too short", "no passage of 8 words"), ("b.jsonl", b"", "no passage"),
                                   ("c.jsonl", b'{}\n{"a"', "c.jsonl:2: not JSON"), ("d.txt", b"\xff", "cannot read"),
                                   ("e.gz", b"no gzip", "cannot read")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_evaluation_ngrams([str(tmp_path / name)])
    with pytest.raises(DataError, match="missing.txt: cannot read"):
        make_decontaminate(DecontaminateOptions((str(tmp_path / "missing.txt"),)))
