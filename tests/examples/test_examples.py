"""Every example runs, and what it trains learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(cwd: Path, *command: object) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_listed_and_tested() -> None:
    files = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} - {"README.md"}
    listed = set(re.findall(r"\| \[[\w.]+\]\(([\w.]+)\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed == files


@pytest.mark.slow
def test_own_model_learns_and_goes_on_under_another_number_of_ranks(tmp_path: Path) -> None:
    program = ROOT / "examples" / "own_model.py"
    first = run(tmp_path, sys.executable, program, "saved")
    then = run(tmp_path, sys.executable, "-m", "megatron.launch", "--nproc-per-node", 2, program, "saved")
    epochs = [(int(epoch), float(loss)) for epoch, loss in re.findall(r"epoch (\d+): loss ([\d.]+)", first + then)]
    assert [epoch for epoch, _ in epochs] == [0, 1, 2, 3, 4, 5]
    assert epochs[-1][1] < epochs[0][1] / 2


@pytest.mark.slow
def test_a_folder_of_text_becomes_a_model(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text("The cat sat on the mat.\n\n" * 100)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    printed = run(tmp_path, "env", f"PATH={tmp_path}/bin:{os.environ['PATH']}", "bash",
                  ROOT / "examples" / "folder_of_text.sh", "texts", "--train-iters", 30)
    assert "texts: 3 files, 300 documents" in printed and (tmp_path / "runs" / "folder_of_text" / "latest").is_file()
