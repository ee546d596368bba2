"""The ds_*.sh scripts: each hands its JSON file to the trainer, and the real trainer runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts import test_scripts
from tests.scripts.test_scripts import ROOT, run, value

repository = test_scripts.repository

SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("ds_*.sh"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_ds_script_names_its_file_and_the_users_arguments_come_last(repository: Path, script: str) -> None:
    result = run(repository, script, "--train-iters", "7", "--deepspeed_config", "mine.json")
    argv = json.loads(result.stdout)["argv"]
    assert argv[-4:] == ["--train-iters", "7", "--deepspeed_config", "mine.json"] and "--deepspeed" in argv
    shipped = Path(argv[argv.index("--deepspeed_config") + 1])
    assert shipped.is_file() and shipped.parent == repository / "scripts" / "configs"
    assert value(argv, "--preset") == "small" and value(argv, "--save").endswith(f"{script.removesuffix('.sh')}/small")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_ds_script_trains_as_shipped(tmp_path: Path, script: str) -> None:
    result = run(ROOT, script, "--train-iters", "3", "--eval-iters", "1", RUNS=str(tmp_path), PRESET="tiny")
    assert result.returncode == 0, result.stderr
    metrics = tmp_path / script.removesuffix(".sh") / "tiny" / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["iteration"] for line in steps if "iteration" in line and not line.get("eval")] == [1, 2, 3]
