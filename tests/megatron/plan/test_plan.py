"""The planner: same flags as training, the published formulas in the limit, remedies that help, a clear end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron.train.loop
from megatron.errors import ConfigError
from megatron.launch import exits
from megatron.plan import command as plan
from megatron.plan.footprint import Run
from megatron.plan.memory import moments, peak
from megatron.plan.remedies import largest_micro_batch, remedies, with_batch, with_stage
from megatron.plan.shortage import MemoryShortage, explained
from tests.megatron.helpers import ROOT, TINY, train

FLAGS = ["--preset", "345M", "--bf16", "--batch-size", "8", "--ranks", "8", "--zero-stage", "2"]


def planned(*argv: str) -> Run:
    return plan.parse(argv)[1]


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    monkeypatch.setattr(sys, "argv", ["plan", *argv])
    assert plan.main() == 0
    return capsys.readouterr().out


def test_the_table_has_a_row_for_every_legal_choice_and_marks_the_one_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(capsys, monkeypatch, *FLAGS).splitlines()
    marked = [line.split()[:3] for line in lines if line.startswith("*")]
    assert marked == [["*", "2", "none"]]
    assert sum(line[:4].strip(" *").isdigit() for line in lines) == 8
    assert max(map(len, lines)) <= 120


def test_a_plan_needs_no_torch() -> None:
    program = ("import sys; from megatron.plan.command import main; sys.argv = ['plan', '--preset', '1.5B']; main(); "
               "sys.exit('torch' in sys.modules)")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-P", "-c", program], cwd=ROOT, env=environ,
                            capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_json_says_the_same_in_bytes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(printed(capsys, monkeypatch, *FLAGS, "--json", "--card-gb", "4", "80"))
    (row,) = [row for row in found["rows"] if row["chosen"]]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    assert row["device"] == sum(row[part] for part in parts) == peak(planned(*FLAGS)).total
    assert row["cards"]["80"]["fits"] and not row["cards"]["4"]["fits"]
    assert row["cards"]["80"]["largest_micro_batch"] > 8 > row["cards"]["4"]["largest_micro_batch"]


def test_a_thousand_ranks_are_planned_without_any() -> None:
    run = planned("--preset", "10B", "--bf16", "--ranks", "1024", "--model-parallel-size", "4", "--zero-stage", "3")
    assert (run.tp, run.dp) == (4, 256)
    # Weights and optimizer state of stage 3 are 14 bytes a parameter, in 1024 equal parts; vectors stay whole.
    whole = 2 * run.resident.numel
    assert run.weights + run.optimizer == pytest.approx(14 * 10.28e9 / 1024 + whole, rel=0.02)


def test_a_deepspeed_config_is_read_like_in_training(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
                                "zero_optimization": {"stage": 2}}))
    run = planned("--preset", "124M", "--ranks", "4", "--deepspeed_config", str(path))
    assert (run.accumulation, run.work, run.config.zero.zero_stage) == (4, 2, 2)


@pytest.mark.parametrize("argv, words", [
    (["--preset", "tiny", "--ranks", "0"], "--ranks is 0"),
    (["--preset", "tiny", "--card-gb", "-1"], "--card-gb is -1"),
    (["--preset", "tiny", "--zero-stagee", "1"], "did you mean --zero-stage"),
    (["--preset", "tiny", "--ranks", "3", "--model-parallel-size", "2"], "3 is not divisible by 2"),
])
def test_wrong_flags_are_refused_as_in_training(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan.parse(argv)


# Bytes per parameter of docs/zero.md, in 16 bit: weights, optimizer and gradients that last; n ranks.
@pytest.mark.parametrize("stage, formula", [(0, lambda n: 16.0), (1, lambda n: 4 + 12 / n), (2, lambda n: 2 + 14 / n),
                                            (3, lambda n: 16 / n)])
def test_what_lasts_is_what_the_zero_paper_says(stage: int, formula) -> None:  # type: ignore[no-untyped-def]
    for ranks in (1, 2, 64):
        run = planned("--preset", "1.5B", "--bf16", "--ranks", str(ranks), "--zero-stage", str(stage),
                      "--stage3-param-persistence-threshold", "0")
        update = [moment for moment in moments(run) if moment.name == "update"][0]
        lasting = update.parameters + update.gradients + update.optimizer
        # 0.2 %: padding of slots, shards and the vocabulary.
        assert lasting / run.config.model.parameters() == pytest.approx(formula(ranks), rel=2e-3)


@pytest.mark.parametrize("stage, formula", [(0, lambda a: (2, 0)), (1, lambda a: (1, 1)), (2, lambda a: (a, 1)),
                                            (3, lambda a: (a, 2 * a))])
def test_traffic_is_what_the_guide_says(stage: int, formula) -> None:  # type: ignore[no-untyped-def]
    for steps in (1, 3):
        run = planned("--preset", "10B", "--ranks", "1024", "--batch-size", "1", "--global-batch-size",
                      str(1024 * steps), "--zero-stage", str(stage))
        elements = [part / (4 * run.config.model.parameters()) for part in
                    (run.traffic().gradients, run.traffic().parameters)]
        # 3 %: rings send (N - 1) / N, the tables are gathered once, and buckets are padded.
        assert elements == pytest.approx(formula(steps), rel=0.03)


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    run = planned("--preset", "124M", "--bf16", "--ranks", "4", "--batch-size", "2", "--global-batch-size", "24")
    for capacity in (1e9, 4e9, 8e9, 20e9):
        best = largest_micro_batch(run, capacity)
        totals = [peak(replace(run, config=with_batch(run.config, size, size * 12))).total for size in (best, best + 1)
                  if size]
        assert totals[-1] > capacity and all(total <= capacity for total in totals[:-1])


def test_remedies_keep_the_samples_of_a_step_and_save_what_they_say() -> None:
    run = planned(*FLAGS[:-1], "0")
    found = {remedy.flags: remedy.saves for remedy in remedies(run)}
    assert list(found) == ["--batch-size 4 --global-batch-size 64", "--checkpoint-activations", "--zero-stage 1",
                           "--zero-stage 2", "--zero-stage 3", "--model-parallel-size 2"]
    argv = [word for word in FLAGS[:-1] if word not in ("--batch-size", "8", "--ranks", "--zero-stage")]
    smaller = planned(*argv, "--ranks", "8", "--batch-size", "4", "--global-batch-size", "64")
    assert found["--batch-size 4 --global-batch-size 64"] == peak(run).total - peak(smaller).total
    assert found["--zero-stage 3"] == peak(run).total - peak(with_stage(run, 3)).total


def test_lack_of_memory_in_a_run_ends_in_one_error_line_with_the_plan_before_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(megatron.train.loop, "forward_loss", exhausted)
    argv = [*TINY, "--mock-data", "--batch-size", "64", "--train-iters", "2"]
    assert exits.run(lambda: train(argv) and 0, debug=False) == 5  # type: ignore[func-returns-value]
    shown, error = capfd.readouterr().err.splitlines()
    run = planned(*[word for word in argv if word != "--mock-data"], "--device", "cpu")
    assert shown.startswith(" rank 0 was to hold ") and f"({peak(run).name})" in shown
    assert error.startswith("error: rank 0 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; try "
                            "--batch-size 32 --global-batch-size 64 (saves ")
    assert "or --checkpoint-activations (saves" in error


def test_other_errors_pass_and_a_shortage_is_explained_once() -> None:
    config = planned("--preset", "tiny").config
    with pytest.raises(RuntimeError, match="^a bug$"), explained(config, 0, 1, "cpu"):
        raise RuntimeError("a bug")
    with pytest.raises(MemoryShortage, match="^inner$"), explained(config, 0, 1, "cpu"):
        raise MemoryShortage("inner")


LIMITED = """
import resource, sys
import pretrain_gpt2, torch
from megatron.launch import exits
from megatron.train import build, sample as generate, loop as training  # what is imported counts as well
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (600 << 20),) * 2)
sys.exit(exits.run(pretrain_gpt2.main))
"""


@pytest.mark.slow
def test_a_process_that_may_not_grow_ends_with_the_same_line() -> None:
    argv = [*TINY, "--mock-data", "--batch-size", "16384", "--train-iters", "1"]
    result = subprocess.run([sys.executable, "-c", LIMITED, *argv], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 5, result.stderr
    assert "rank 0 was to hold" in result.stderr
    assert "try --batch-size 8192 --global-batch-size 16384 (saves" in result.stderr.splitlines()[-1]
