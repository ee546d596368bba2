"""The quality classifier: it learns what divides two folders, and its file is the same for the same texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data.storage import DataError
from data.webtext.__main__ import main
from data.webtext.classifier import FEATURES, features_of, fit, load_weights, score
from data.webtext.documents import Document
from tests.data.webtext.planted import babble

WORDS = "casino bonus click here buy now free shipping discount best price offer online".split()


def good(rng: random.Random) -> str:
    return babble(rng, rng.randint(30, 200))


def bad(rng: random.Random) -> str:
    """Prose with a few words of advertisements."""
    words = good(rng).split(" ")
    for _ in range(len(words) // 8):
        words.insert(rng.randrange(len(words)), rng.choice(WORDS))
    return " ".join(words)


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(Document(text, f"http://x.org/{number}").to_line() for number, text in enumerate(texts)))
    return path


def test_a_trained_classifier_divides_new_texts_and_is_the_same_each_time(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(3)
    write(tmp_path / "good/a.jsonl", [good(rng) for _ in range(200)])
    write(tmp_path / "bad/a.jsonl", [bad(rng) for _ in range(60)])  # fewer: both count the same
    for name in ("one", "two"):
        main(["train-classifier", "--good", str(tmp_path / "good"), "--bad", str(tmp_path / "bad"),
              "--output", str(tmp_path / name)])
    assert "% of 20 good" in capsys.readouterr().err
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    texts = [*(good(rng) for _ in range(100)), *(bad(rng) for _ in range(100))]
    main(["classify", str(write(tmp_path / "new.jsonl", texts)), "--classifier", str(tmp_path / "one"),
          "--output", str(tmp_path / "out")])
    kept = [json.loads(line) for path in (tmp_path / "out").glob("part-*") for line in path.read_text().splitlines()]
    right = sum(document["text"] in texts[:100] for document in kept) + 200 - 100 - sum(
        document["text"] in texts[100:] for document in kept)
    assert right >= 180
    assert all(document["meta"]["quality_score"] >= 0.5 for document in kept)
    record = json.loads((tmp_path / "out/stage.json").read_text())
    assert record["counts"]["dropped"]["low score"]["documents"] == 200 - len(kept)
    main(["classify", str(tmp_path / "new.jsonl"), "--classifier", str(tmp_path / "one"), "--min-score", "0",
          "--output", str(tmp_path / "all")])
    assert sum(len(path.read_bytes().splitlines()) for path in (tmp_path / "all").glob("part-*")) == 200


def test_a_step_is_that_of_logistic_regression() -> None:
    """One text of each class, against the formula."""
    texts = [features_of("the river runs to the sea"), features_of("buy now buy now")]
    assert len(texts[1]) == 4, "two words, and two pairs; each once"
    weights = fit(texts, [True, False], seed=0)
    assert score(weights, texts[0]) > 0.8 and score(weights, texts[1]) < 0.2
    assert not weights[np.setdiff1d(np.arange(FEATURES), np.concatenate(texts))].any(), "other features are untouched"
    logit = weights[-1] + weights[texts[0]].astype(float).sum() / len(texts[0]) ** 0.5
    assert score(weights, texts[0]) == pytest.approx(1 / (1 + np.exp(-logit)))
    assert score(weights, features_of("")) == pytest.approx(1 / (1 + np.exp(-float(weights[-1]))))


def test_what_is_no_classifier_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "small.npy", np.zeros(3, np.float32))
    (tmp_path / "text").write_text("no")
    for name, said in (("small.npy", "not a classifier of this version"), ("text", "not a classifier"),
                       ("none", "cannot read")):
        with pytest.raises(DataError, match=said):
            load_weights(str(tmp_path / name))
    few = write(tmp_path / "few.jsonl", ["one"] * 5)
    with pytest.raises(DataError, match="expected at least 20 texts, found 5"):
        main(["train-classifier", "--good", str(few), "--bad", str(few), "--output", str(tmp_path / "out")])
