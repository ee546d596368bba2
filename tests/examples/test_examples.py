"""Every example runs, and what it trains learns."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.distributed import run_ranks
from tests.docs.reader import blocks
from tests.megatron.launch.processes import launched

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
    assert {name for name, _ in PRINTED} == {path.name for path in (ROOT / "examples").iterdir()
                                             if path.is_file() and path.suffix != ".ipynb"}


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


def test_the_page_of_the_own_loop_shows_the_example() -> None:
    shown = [block for block in blocks((ROOT / "docs" / "library.md").read_text()) if block.file]
    assert [(block.file, block.text + "\n") for block in shown] == [
        ("own_loop_gpt2.py", (ROOT / "examples" / "own_loop_gpt2.py").read_text())]
    assert len(shown[0].text.splitlines()) < 40


@pytest.mark.slow
def test_own_loop_gpt2_resumes_and_leads_to_text_on_the_command_line(tmp_path: Path) -> None:
    program = ROOT / "examples" / "own_loop_gpt2.py"
    first = run(tmp_path, sys.executable, program, 1)
    then = run(tmp_path, sys.executable, "-m", "megatron.launch", "--nproc-per-node", 2, program, 2)
    epochs = re.findall(r"epoch (\d+): validation loss ([\d.]+)", first + then)
    assert [epoch for epoch, _ in epochs] == ["1", "2"] and float(epochs[1][1]) < float(epochs[0][1]) < 0.1
    asked = ["--load", "own_loop", "--greedy", "--max-new-tokens", 16, "The dog"]
    assert run(tmp_path, sys.executable, "-m", "megatron.generate", *asked) == "The dog lay on the rug.\n"


@pytest.mark.slow
def test_the_notebook_trains_and_plots_the_losses_of_its_run(clone: Path) -> None:
    """Its code runs in a plain interpreter in the notebook's folder; matplotlib is replaced by a recorder of calls."""
    cells = json.loads((ROOT / "examples" / "quick_start.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not committed"
    code = "\n".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    recorder = ("import json, sys\nfrom unittest.mock import MagicMock\nrecorded = MagicMock()\n"
                "sys.modules |= {'matplotlib': recorded, 'matplotlib.pyplot': recorded.pyplot}\n")
    code += "print(json.dumps(recorded.pyplot.plot.call_args_list[0].args))"
    done = subprocess.run([sys.executable, "-c", recorder + code], cwd=clone / "examples", text=True, timeout=240,
                          env=ENVIRONMENT | {"PYTHON": sys.executable, "PYTHONPATH": ""}, capture_output=True)
    assert done.returncode == 0, done.stderr
    steps, losses = json.loads(done.stdout.splitlines()[-1])
    assert steps == list(range(1, len(steps) + 1)) and sum(losses[-10:]) < 0.7 * sum(losses[:10])


# ---- DeepSpeed's two first tutorials, retyped, with no edit but the import -----------------------------------------

def every(*quick: tuple[int, int]) -> pytest.MarkDecorator:
    """All ranks and stages; those that are not named are slow."""
    return pytest.mark.parametrize(("ranks", "stage"), [
        pytest.param(ranks, stage, marks=[] if (ranks, stage) in quick else pytest.mark.slow)
        for ranks in (1, 2) for stage in range(4)])


def started(ranks: int, script: str, *flags: str) -> str:
    done = launched(ranks, f"examples/{script}", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


ENGINE = "from megatron import zero as deepspeed"
DEVICE = "from megatron.zero.accelerator import get_accelerator"


def test_only_lines_of_import_say_which_engine_it_is() -> None:
    for script, lines in (("cifar10_deepspeed.py", [ENGINE, DEVICE]), ("bert_masked_lm.py", [ENGINE])):
        code = ast.parse((ROOT / "examples" / script).read_text())
        assert [ast.unparse(node) for node in ast.walk(code) if isinstance(node, ast.Import | ast.ImportFrom)
                and "megatron" in ast.unparse(node)] == lines
        assert not [node for node in ast.walk(code) if isinstance(node, ast.Name | ast.Attribute)
                    and "megatron" in ast.unparse(node)]


@every((2, 3))
def test_the_picture_classifier_learns(ranks: int, stage: int) -> None:
    out = started(ranks, "cifar10_deepspeed.py", "--stage", str(stage))
    accuracy = re.search(r"accuracy (\d+) %", out)
    assert accuracy is not None and int(accuracy[1]) > 50, out  # 10 % is guessing


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_picture_classifier_learns_in_16_bits(dtype: str) -> None:
    accuracy = re.search(r"accuracy (\d+) %", started(2, "cifar10_deepspeed.py", "--stage", "2", "--dtype", dtype))
    assert accuracy is not None and int(accuracy[1]) > 50


def masked_model(rank: int, world: int, stage: int, folder: Path) -> tuple[str, str]:
    """What is printed by a run in one go, and by the second half of one that was resumed."""
    said = []
    for name, iterations in (("whole", 40), ("parts", 20), ("parts", 40)):
        argv = ["--stage", stage, "--checkpoint_dir", folder / name, "--num_iterations", iterations]
        said.append(io.StringIO())
        with patch("sys.argv", ["bert_masked_lm.py", *map(str, argv)]), redirect_stdout(said[-1]):
            runpy.run_path(str(ROOT / "examples" / "bert_masked_lm.py"), run_name="__main__")
    return said[0].getvalue(), said[2].getvalue()


@every((2, 3))
def test_the_masked_model_learns_and_goes_on_from_its_checkpoint(ranks: int, stage: int, tmp_path: Path) -> None:
    whole, rest = run_ranks(masked_model, ranks, stage, tmp_path)[0]
    first, last = (re.search(pattern, whole) for pattern in (r"step 0: loss ([\d.]+)", r"last loss ([\d.]+)"))
    assert first is not None and last is not None and float(last[1]) < 0.8 * float(first[1])
    assert f"40 steps, from 20: last loss {last[1]}" in rest, "a resumed run is the run"
