"""scripts/gpu_check.sh as far as a CPU can tell, scripts/mutate.py on one function, and the files that CI and
Docker read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.reader import blocks

ROOT = Path(__file__).resolve().parents[2]
CHECKS = 16
"""Rows of the table."""


def bash(command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | settings
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_every_gpu_check_runs_on_a_cpu(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = bash("bash scripts/gpu_check.sh --device cpu --tiny", RESULTS=str(results), SECONDS_IN_ALL="3000")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    table = done.stdout[done.stdout.rindex("check "):].splitlines()[1:]
    assert len(table) == CHECKS and all(" passed " in row for row in table)
    rest = " not counted on a CPU"
    assert f"synchronisations{rest}" in table[1] and f"peak{rest}" in table[6]
    assert done.stdout.count(f"launches in one step:{rest}") == 2
    assert "saved global_step30 " in table[2] and "saved global_step60 " in table[3] and " * 0 " in table[4]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["check"], row["model"]) for row in rows if row["contender"] == "ours"] == [
        ("syncs", "124M"), ("speed", "124M"), ("speed", "350M"), ("decode", "124M"), ("decode", "124M"),
        ("speed", "774M"), ("speed", "1.5B")]


def test_a_check_for_which_no_time_is_left_is_said_to_be_left_out() -> None:
    done = bash("bash scripts/gpu_check.sh --device cpu --tiny", SECONDS_IN_ALL="0", RESULTS=os.devnull + ".none")
    assert done.returncode == 1 and done.stdout.count("not run no time was left") == CHECKS


@pytest.mark.parametrize("card, fits", [("80", True), ("16", False)])
def test_recomputation_is_on_where_the_planner_finds_no_room_without_it(card: str, fits: bool) -> None:
    done = bash(". scripts/lib.sh; FLAGS=(--preset 345M --bf16 --batch-size 16); GPUS_PER_NODE=1\n"
                "if fits --lr 1e-3; then echo fits; else echo recompute; fi", CARD_GB=card)
    assert done.stdout.split()[-1:] == ["fits" if fits else "recompute"], done.stderr


def test_of_two_mutants_one_is_killed_and_one_survives(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name, text in (("product/add.py", "def add(a, b):\n    return a + b\n"),
                       ("tests/test_add.py", "from product.add import add\ndef test(): assert add(2, 0) == 2\n")):
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text(text)
    for command in (["init", "--quiet"], ["add", "."],
                    ["-c", "user.name=test", "-c", "user.email=test", "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *command], cwd=repository, check=True)

    def mutate(*arguments: str) -> str:
        done = subprocess.run([sys.executable, str(ROOT / "scripts" / "mutate.py"), *arguments], cwd=repository,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    mutate("record", "--output", "calls.jsonl")
    recorded = json.loads((repository / "calls.jsonl").read_text())
    assert recorded["test"] == "tests/test_add.py" and "product/add.py:add" in recorded["calls"]
    assert mutate("record", "--output", "calls.jsonl") == "", "all is recorded"
    said = mutate("run", "--calls", "calls.jsonl", "--packages", "product", "--output", "mutants.jsonl")
    lines = (repository / "mutants.jsonl").read_text().splitlines(keepends=True)
    found = {line["after"]: line["killed_by"] for line in map(json.loads, lines)}
    assert found == {"return None": "tests/test_add.py", " - ": ""}
    (repository / "mutants.jsonl").write_text(lines[0])  # an earlier call stopped after the first
    mutate("run", "--calls", "calls.jsonl", "--packages", "product", "--output", "mutants.jsonl")
    assert (repository / "mutants.jsonl").read_text().splitlines(keepends=True) == lines
    assert "1 of 2 killed" in said and "'return a + b' -> 'return None': tests/test_add.py" in said


@pytest.mark.parametrize("event, command", [("push", "bash scripts/test.sh -n 4 @tests/smoke.txt"),
                                            ("pull_request", "bash scripts/test.sh")])
def test_ci_runs_the_smoke_tier_on_a_push_and_the_suite_on_a_pull_request(event: str, command: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert event in workflow[True]  # YAML 1.1 reads `on` as true
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    commands = [step for step in job["steps"] if "run" in step]
    assert [step["run"] for step in commands if eval(step["if"].replace("github.event_name", repr(event)))] == [command]
    smoke = (ROOT / "tests" / "smoke.txt").read_text().splitlines()
    assert all((ROOT / path).exists() for path in smoke) and len(set(smoke)) == len(smoke)


def test_the_container_runs_the_readmes_first_command_after_copying_what_is_there() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied) and len(lines) <= 25
    command = next(json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD "))
    assert " ".join(command) == blocks((ROOT / "README.md").read_text())[0].text
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored) and not set(copied) & set(ignored)
