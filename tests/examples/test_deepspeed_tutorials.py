"""DeepSpeed's two first tutorials, retyped, run here with no edit but the import, on 1 and 2 ranks at every stage."""

from __future__ import annotations

import ast
import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.distributed import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def every(*quick: tuple[int, int]) -> pytest.MarkDecorator:
    """All ranks and stages; those that are not named are slow."""
    return pytest.mark.parametrize(("ranks", "stage"), [
        pytest.param(ranks, stage, marks=[] if (ranks, stage) in quick else pytest.mark.slow)
        for ranks in (1, 2) for stage in range(4)])


def run(ranks: int, script: str, *flags: str) -> str:
    launcher = ["-m", "megatron.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, f"examples/{script}", *flags], cwd=ROOT, capture_output=True,
                          text=True, timeout=300, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""})
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
    out = run(ranks, "cifar10_deepspeed.py", "--stage", str(stage))
    accuracy = re.search(r"accuracy (\d+) %", out)
    assert accuracy is not None and int(accuracy[1]) > 50, out  # 10 % is guessing


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_picture_classifier_learns_in_16_bits(dtype: str) -> None:
    accuracy = re.search(r"accuracy (\d+) %", run(2, "cifar10_deepspeed.py", "--stage", "2", "--dtype", dtype))
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
