"""scripts/evaluate_gpt2.sh: what it asks for, and that it runs on what the quick start trained."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.scripts import test_scripts
from tests.scripts.test_scripts import ROOT, run, value

repository = test_scripts.repository

SCRIPT = "evaluate_gpt2.sh"


@pytest.fixture
def trained(repository: Path) -> Path:
    """As the quick start leaves it."""
    (repository / "runs" / "pretrain_gpt2" / "small").mkdir(parents=True)
    (repository / "runs" / "pretrain_gpt2" / "small" / "latest").write_text("global_step240")
    return repository


def asked(repository: Path, *arguments: str, **settings: str) -> list[str]:
    """The words that the program gets."""
    result = run(repository, SCRIPT, *arguments, **settings)
    assert result.returncode == 0, result.stderr
    words: list[str] = json.loads(result.stdout)["argv"]
    return words[words.index("megatron.evaluate") + 1:]


def test_the_quick_starts_model_is_scored_on_what_its_training_held_out(trained: Path) -> None:
    runs = trained / "runs"
    assert asked(trained) == ["--load", f"{runs}/pretrain_gpt2/small", "--task", "perplexity",
                              "--data", f"{runs}/default_corpus/corpus.jsonl", "--part", "valid"]


def test_what_the_user_asks_for_takes_the_place_of_ours(trained: Path) -> None:
    model = ["--load", f"{trained}/runs/pretrain_gpt2/small"]
    wikitext = ["--task", "wikitext", "--data", "a b'$(x)"]
    assert asked(trained, *wikitext) == [*model, *wikitext]
    assert asked(trained, "--data=mine.txt") == [*model, "--task", "perplexity", "--data=mine.txt"]
    assert "--part" not in asked(trained, "--load_hf", "hf")
    assert asked(trained, "--load", "other")[:2] == ["--task", "perplexity"]
    assert asked(trained, "--json", "--stride", "8")[-3:] == ["--json", "--stride", "8"]


def test_it_is_the_run_that_was_saved_last_or_that_of_the_preset(trained: Path) -> None:
    other = trained / "runs" / "pretrain_gpt2" / "124M"
    other.mkdir()
    (other / "latest").write_text("global_step9")
    os.utime(other / "latest", (2e9, 2e9))
    assert value(asked(trained), "--load") == str(other)
    assert value(asked(trained, PRESET="small"), "--load").endswith("/small")


def test_ranks_come_from_the_environment(trained: Path) -> None:
    assert value(json.loads(run(trained, SCRIPT).stdout)["argv"], "--nproc-per-node") == "1"
    argv = json.loads(run(trained, SCRIPT, GPUS_PER_NODE="3").stdout)["argv"]
    assert value(argv, "--nproc-per-node") == "3"


def test_before_anything_is_trained_it_says_what_to_do(repository: Path) -> None:
    result = run(repository, SCRIPT)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: nothing is trained in") and "bash scripts/pretrain_gpt2.sh" in result.stderr


def test_help_is_that_of_the_program() -> None:
    result = run(ROOT, SCRIPT, "--help")
    assert result.returncode == 0 and "--protocol" in result.stdout and result.stderr == ""


@pytest.mark.slow
def test_it_runs_as_shipped_on_what_the_quick_start_trained(tmp_path: Path) -> None:
    settings = {"RUNS": str(tmp_path / "runs here"), "PRESET": "tiny"}
    trained = run(ROOT, "pretrain_gpt2.sh", "--train-iters", "20", "--eval-iters", "1", **settings)
    assert trained.returncode == 0, trained.stderr
    alone = run(ROOT, SCRIPT, "--json", **settings)
    assert alone.returncode == 0, alone.stderr
    found = json.loads(alone.stdout)
    assert (found["task"], found["protocol"], found["part"]) == ("perplexity", "megatron", "valid")
    assert found["examples"] > 100 and 0 < found["bits_per_byte"] < 9
    shared = run(ROOT, SCRIPT, "--json", GPUS_PER_NODE="2", **settings)
    assert json.loads(shared.stdout)["loss"] == pytest.approx(found["loss"], rel=1e-6)
