"""scripts/preprocess_webtext.sh: a sample where nothing is named, the user's files and flags as they are otherwise.

The whole chain on the sample, and a model trained on it, is a slow test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAY = "import json, sys\nprint(json.dumps(sys.argv))\n"


def run(root: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RUNS", "WEBTEXT_PREFIX", "VIRTUAL_ENV")}
    command = ["bash", str(root / "scripts" / "preprocess_webtext.sh"), *arguments]
    return subprocess.run(command, cwd=root.parent, text=True,
                          env=kept | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"} | settings,
                          capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "a b; $(touch x)"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "data" / "webtext").mkdir(parents=True)
    (root / "pretrain_gpt2.py").touch()
    for name in ("__init__.py", "webtext/__init__.py"):
        (root / "data" / name).touch()
    for name in ("__main__.py", "sample.py"):
        (root / "data" / "webtext" / name).write_text(SAY)
    return root


def test_a_sample_is_made_where_no_file_is_named(repository: Path) -> None:
    for arguments in ([], ["--workers", "3"]):
        said = [json.loads(line)[1:] for line in run(repository, *arguments).stdout.splitlines()]
        runs = f"{repository}/runs/webtext"
        assert said == [["--output-dir", f"{runs}/sample"],
                        ["run", "--output", f"{runs}/stages", "--output-prefix", f"{repository}/data/webtext/corpus",
                         f"{runs}/sample", "--on-error", "replace", *arguments]]


def test_files_and_flags_of_the_user_go_through_unchanged(repository: Path) -> None:
    arguments = ["my crawl/", "$(touch x).jsonl", "--skip", "language", "--on-error", "strict"]
    done = run(repository, *arguments, RUNS="/some/runs", WEBTEXT_PREFIX="/some/corpus")
    (said,) = [json.loads(line)[1:] for line in done.stdout.splitlines()]
    assert said == ["run", "--output", "/some/runs/webtext/stages", "--output-prefix", "/some/corpus", *arguments]
    assert not list(repository.parent.rglob("x"))


def test_the_advice_at_the_end_finds_the_corpus_again(repository: Path) -> None:
    """The name `webtext` is the default prefix; another one is only known by its path once the variable is gone."""
    assert "--train-data webtext " in run(repository).stderr
    assert "--train-data /some/corpus " in run(repository, WEBTEXT_PREFIX="/some/corpus").stderr


@pytest.mark.slow
def test_a_model_trains_on_what_the_script_leaves(tmp_path: Path) -> None:
    settings = {"RUNS": str(tmp_path), "WEBTEXT_PREFIX": str(tmp_path / "corpus")}
    done = run(ROOT, **settings)
    assert done.returncode == 0, done.stderr
    trained = subprocess.run(
        [sys.executable, "pretrain_gpt2.py", "--preset", "tiny", "--tokenizer-type", "GPT2BPETokenizer", "--train-data",
         "webtext", "--train-iters", "30", "--lr", "3e-3", "--metrics-file", str(tmp_path / "metrics")],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    losses = [line["lm_loss"] for line in map(json.loads, (tmp_path / "metrics").read_text().splitlines())
              if "iteration" in line and not line.get("eval")]
    assert losses[-1] < losses[0] - 1
