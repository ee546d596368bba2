"""scripts/preprocess_webtext.sh: a sample where nothing is named, the user's files and flags as they are otherwise.

The whole chain on the sample, and a model trained on it, is a slow test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import test_scripts
from tests.scripts.test_scripts import ROOT, SAY, run

repository = test_scripts.repository

SCRIPT = "preprocess_webtext.sh"


@pytest.fixture(autouse=True)
def programs(repository: Path) -> None:
    """They only say what they got."""
    (repository / "data" / "webtext").mkdir()
    for name in ("__init__.py", "__main__.py", "sample.py"):
        (repository / "data" / "webtext" / name).write_text("" if name == "__init__.py" else SAY)


def asked(repository: Path, *arguments: str, **settings: str) -> list[list[str]]:
    return [json.loads(line)["argv"] for line in run(repository, SCRIPT, *arguments, **settings).stdout.splitlines()]


def test_a_sample_is_made_where_no_file_is_named(repository: Path) -> None:
    for arguments in ([], ["--workers", "3"]):
        runs, corpus = f"{repository}/runs/webtext", f"{repository}/data/webtext/corpus"
        assert asked(repository, *arguments) == [
            ["--output-dir", f"{runs}/sample"], ["run", "--output", f"{runs}/stages", "--output-prefix", corpus,
                                                 f"{runs}/sample", "--on-error", "replace", *arguments]]


def test_files_and_flags_of_the_user_go_through_unchanged(repository: Path) -> None:
    arguments = ["my crawl/", "$(touch x).jsonl", "--skip", "language", "--on-error", "strict"]
    (said,) = asked(repository, *arguments, RUNS="/some/runs", WEBTEXT_PREFIX="/some/corpus")
    assert said == ["run", "--output", "/some/runs/webtext/stages", "--output-prefix", "/some/corpus", *arguments]
    assert not list(repository.parent.rglob("x"))


def test_the_advice_at_the_end_finds_the_corpus_again(repository: Path) -> None:
    """The name `webtext` is the default prefix; another one is only known by its path once the variable is gone."""
    assert "--train-data webtext " in run(repository, SCRIPT).stderr
    assert "--train-data /some/corpus " in run(repository, SCRIPT, WEBTEXT_PREFIX="/some/corpus").stderr


@pytest.mark.slow
def test_a_model_trains_on_what_the_script_leaves(tmp_path: Path) -> None:
    settings = {"RUNS": str(tmp_path), "WEBTEXT_PREFIX": str(tmp_path / "corpus")}
    done = run(ROOT, SCRIPT, **settings)
    assert done.returncode == 0, done.stderr
    trained = subprocess.run(
        [sys.executable, "pretrain_gpt2.py", "--preset", "tiny", "--tokenizer-type", "GPT2BPETokenizer", "--train-data",
         "webtext", "--train-iters", "30", "--lr", "3e-3", "--metrics-file", str(tmp_path / "metrics")],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    losses = [line["lm_loss"] for line in map(json.loads, (tmp_path / "metrics").read_text().splitlines())
              if "iteration" in line and not line.get("eval")]
    assert losses[-1] < losses[0] - 1
