"""Every example runs, and what it trains learns."""

from __future__ import annotations

import os
import re
import shutil
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


def printed_lines(text: str) -> list[str]:
    """The commands of a docstring, a comment or a block that start an example."""
    lines = [line.strip(" #").split("  #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if re.match(r"(?:PYTHONPATH=\S+ )?(?:python|bash) (?:\S+ )*examples/", line)]


PRINTED = [(path.name, line) for path in sorted((ROOT / "examples").iterdir()) if path.is_file()
           for line in printed_lines(path.read_text())]


def test_every_example_says_how_to_start_it() -> None:
    assert {name for name, _ in PRINTED} == {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "clone"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "*.egg-info"))
    (folder / "my_texts").mkdir()
    (folder / "my_texts" / "cat.txt").write_text("The cat sat on the mat.\n\n" * 300)
    (folder.parent / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder.parent / "python").chmod(0o755)
    return folder


@pytest.mark.parametrize(("file", "line"), [
    pytest.param(file, line, marks=[] if file == "own_model.py" and "launch" not in line else pytest.mark.slow)
    for file, line in PRINTED])
def test_a_printed_line_is_true(file: str, line: str, clone: Path) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = subprocess.run(line, shell=True, cwd=clone, capture_output=True, text=True, timeout=240,
                          env=environment | {"PATH": f"{clone.parent}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


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


@pytest.mark.slow
def test_own_loop_gpt2_leads_to_text_in_the_program_and_on_the_command_line(tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, ROOT / "examples" / "own_loop_gpt2.py", "saved")
    assert printed.endswith("\nThe cat sat on the mat. The dog lay on the rug.\n")
    asked = ["--load", "saved", "--greedy", "--max-new-tokens", 16, "The dog"]
    assert run(tmp_path, sys.executable, "-m", "megatron.generate", *asked) == "The dog lay on the rug.\n"
