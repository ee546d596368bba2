"""--dry-run: the plan of the run that the flags and the launcher would start, and what is in its way; nothing else."""

from __future__ import annotations

import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import pretrain_gpt2
from megatron import host_memory
from megatron.config.cli import is_dry_run
from megatron.errors import ConfigError
from megatron.plan import cli as plan
from megatron.plan.cli import TargetMachine, describe_requirements
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import USABLE_FRACTION

BIG = ["--preset", "10B", "--bf16", "--batch-size", "10", "--checkpoint-activations"]
ON_HOST = ["--zero-stage", "2", "--offload-optimizer-device", "cpu"]


def on_drive(folder: str) -> list[str]:
    return ["--zero-stage", "3", "--offload-optimizer-device", "nvme", "--offload-optimizer-nvme-path", folder,
            "--offload-param-device", "nvme", "--offload-param-nvme-path", folder]


def planned(*argv: str) -> PlannedRun:
    return plan.parse(argv)[1]


def lines(*argv: str, cards: tuple[int, ...] = (32,), per_node: int = 1) -> list[str]:
    usable = {str(card): card * 2**30 * USABLE_FRACTION for card in cards}
    return list(describe_requirements(planned(*argv), TargetMachine(usable, per_node)))


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan has room here."""
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 2**60)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2**60))


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, *argv: str) -> int:
    """One rank of eight on two nodes, none of which is waited for."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 8, "LOCAL_RANK": rank % 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt2.py", *argv])
    return pretrain_gpt2.main()


def test_rank_0_prints_the_plan_of_the_ranks_that_would_run(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = [*BIG, *ON_HOST, "--dry_run", "--save", str(tmp_path / "save"), "--train-data", "no such file"]
    assert launched(monkeypatch, 0, *argv) == 0
    text = capsys.readouterr().out
    assert " on 8 ranks, 4 per node: tensor parallel 1, data parallel 8" in text
    assert "\na node of 4 ranks needs " in text and "\n* 2     cpu " in text and "cheapest way" in text
    assert launched(monkeypatch, 1, *argv) == 0 and capsys.readouterr().out == ""
    assert launched(monkeypatch, 0, *argv, "--ranks", "2", "--tflops", "30", "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert " on 2 ranks, 2 per node" in text and "at 30 TFLOP/s per rank: " in text and "--tflops" not in text
    assert not list(tmp_path.iterdir())


def test_wrong_flags_are_refused_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean --zero-stage"):
        launched(monkeypatch, 0, "--dry-run", "--zero-stagee", "2")
    with pytest.raises(ConfigError, match="did you mean --dry-run"):
        launched(monkeypatch, 0, "--dry-rum", "--preset", "tiny")
    assert not is_dry_run(["--dry-run=false"]) and is_dry_run(["--dry_run=true"])


def test_what_is_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_machine: None) -> None:
    folder = str(tmp_path / "not made yet")
    argv = [*BIG, *on_drive(folder)]
    assert [line for line in lines(*argv) if line.startswith("problem")] == [
        f"problem: --offload-optimizer-nvme-path and --offload-param-nvme-path {folder}: there is no such folder on "
        "this machine; the run needs it"]
    Path(folder).mkdir()
    assert not [line for line in lines(*argv) if line.startswith("problem")]
    (card,) = [line for line in lines(*argv, cards=(4, 6, 80)) if line.startswith("problem")]
    assert card.startswith("problem: a card of 4, 6 GB is too small; try --batch-size 5 --global-batch-size 10 (saves ")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2**30))
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 2**32)
    run = planned(*argv)
    host, nvme = (f"{2 * count / 2**30:.2f} GiB" for count in (run.offloaded_host_bytes, run.nvme_bytes))
    assert [line for line in lines(*argv, per_node=2) if line.startswith("problem")] == [
        f"problem: a node needs {host} of memory, and this machine has 4.00 GiB",
        f"problem: a node needs {nvme} of NVMe, and {folder} has 1.00 GiB free"]
