"""The profiled step of a run: by flags, by a DeepSpeed file, at any layout, without a trace in the results."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import StorageError
from megatron.model import count_parameters
from megatron.profiler.profile import Macs
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, lines, tiny_model, train, train_all
from tests.megatron.profiler.models import step_macs

RUN = [*TINY, *NO_DROPOUT, "--mock-data", "--batch-size", "2", "--global-batch-size", "4", "--train-iters", "4",
       "--vocab-size", "257"]
PROFILE = ["--flops-profiler", "--flops-profiler-step", "3"]


def flops(macs: Macs) -> dict[str, int]:
    return {"forward": 2 * macs.forward, "backward": 2 * macs.backward, "recomputation": 2 * macs.recomputation}


def test_a_run_prints_and_writes_the_step_that_was_asked_for(tmp_path: Path) -> None:
    said = train([*RUN, *PROFILE, "--flops-profiler-output-file", tmp_path / "p.json"])
    assert "Profile summary of step 3\n" in said and f" profile of step 3, every module: {tmp_path / 'p.json'}" in said
    assert "iteration latency of the step before, without the profiler:" in said
    assert "(blocks): ModuleList(" not in said
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["flops"] == flops(step_macs(tiny_model(), 4, 16, causal=True))  # two micro-batches of 2
    assert found["modules"]["calls"] == 2 and set(found["seconds"]) == {"forward", "backward", "step"}
    assert found["layout"] == {"world": 1, "dp": 1, "tp": 1, "zero_stage": 0, "micro_batch": 2, "global_batch": 4,
                               "parameters_kept": found["layout"]["parameters_kept"]}
    short = [*PROFILE, "--no-flops-profiler-detailed", "--flops-profiler-output-file"]
    assert f" profile of step 3: {tmp_path / 'p.txt'}\n" in train([*RUN, *short, tmp_path / "p.txt"])
    assert "(blocks): ModuleList(" not in (tmp_path / "p.txt").read_text()
    assert f" profile of step 3, every module: {tmp_path / 'p.json'}\n" in train([*RUN, *short, tmp_path / "p.json"])
    assert "(blocks): ModuleList(" in train([*RUN, *PROFILE])
    assert "(blocks): ModuleList(" not in train([*RUN, *PROFILE, "--no-flops-profiler-detailed"])


def test_the_first_step_can_be_profiled_and_recomputation_is_seen(tmp_path: Path) -> None:
    train([*RUN, "--flops-profiler", "--checkpoint-activations", "--flops-profiler-output-file", tmp_path / "p.json"])
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["flops"] == flops(step_macs(tiny_model(), 4, 16, causal=True, chunk=1))
    assert found["seconds_of_step_before"] is None


def test_no_bit_of_a_run_depends_on_it(tmp_path: Path) -> None:
    for name, more in (("without", []), ("with", PROFILE)):
        train([*RUN, "--hidden-dropout", "0.1", *more, "--metrics-file", tmp_path / name])
    assert lines(tmp_path / "with")[1:] == lines(tmp_path / "without")[1:]


@pytest.mark.parametrize("layout", [["--zero-stage", "3", "--stage3-param-persistence-threshold", "0"],
                                    ["--model-parallel-size", "2"]])
def test_rank_0_tells_of_the_whole_job(tmp_path: Path, layout: list[str]) -> None:
    path = tmp_path / "p.json"
    runs = [[*RUN, "--vocab-size", "512", *PROFILE, *layout, "--flops-profiler-output-file", path]]
    (first,), (second,) = run_ranks(train_all, 2, runs)
    assert "Profile summary of step 3" in first and "Profile summary" not in second
    found, model = json.loads(path.read_text()), tiny_model(vocab_size=512)
    split = "--zero-stage" not in layout
    a_rank = step_macs(model, 4 if split else 2, 16, causal=True)
    assert found["flops"]["backward"] == flops(a_rank)["backward"]
    assert found["flops_here"]["backward"] * (2 if split else 1) == found["flops"]["backward"]
    assert found["parameters"] == count_parameters(model)[0]
    kept = found["layout"]["parameters_kept"]
    assert 1 / 2 <= kept / count_parameters(model)[0] < 0.6
    assert (found["layout"]["dp"], found["layout"]["tp"]) == ((1, 2) if split else (2, 1))


def test_a_resumed_run_says_that_the_step_is_over(tmp_path: Path) -> None:
    train([*RUN, "--save", tmp_path, "--save-interval", "0"])
    said = train([*RUN, "--train-iters", "6", "--load", tmp_path, "--override-lr-scheduler", *PROFILE])
    assert "note: nothing is profiled: --flops-profiler-step 3 is over, the run goes on at step 5" in said
    assert said.count("nothing is profiled") == 1
    assert "note: --flops-profiler-step 9 does not come: --train-iters 4 ends the run before it" in train(
        [*RUN, "--flops-profiler", "--flops-profiler-step", "9"])


def test_a_file_that_cannot_be_written_is_told_before_and_costs_no_step(tmp_path, capsys):
    with pytest.raises(StorageError, match="--flops-profiler-output-file .* is no folder; name a file"):
        train([*RUN, *PROFILE, "--flops-profiler-output-file", tmp_path / "gone" / "p.json"])
    taken = tmp_path / "p.json"
    taken.symlink_to(tmp_path / "later" / "p.json")  # whose folder never comes
    train([*RUN, *PROFILE, "--flops-profiler-output-file", taken, "--metrics-file", tmp_path / "m"])
    assert "training goes on without it" in capsys.readouterr().err
    assert len(lines(tmp_path / "m")) == 4


def engine_by_keys(rank: int, world: int) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "module_depth": 0, "top_modules": 2, "detailed": False,
                           "output_file": None, "recompute_fwd_factor": 1.0}}
    printed = io.StringIO()
    with redirect_stdout(printed):
        engine = zero.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), config=config)[0]
        for _ in range(6):
            loss = engine(torch.ones(2, 4)).sum()
            engine.backward(loss)
            engine.step()
    said = printed.getvalue()
    assert said.count("Profile summary of step 2") == 1 and "depth 0:" in said and "depth 1:" not in said
    assert "Sequential(" not in said
    assert engine.flops_profiler.get_total_macs() == 2 * 2 * 16
    del config["flops_profiler"]
    assert zero.initialize(model=nn.Linear(4, 4), config=config)[0].flops_profiler is None


def test_an_engine_profiles_by_deepspeeds_keys() -> None:
    run_ranks(engine_by_keys, 1)
