"""What the scripts do on a GPU, as far as a CPU can tell: every check runs; the planner decides about recomputation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
