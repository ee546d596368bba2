"""FlopsProfiler and get_model_profile, the names that DeepSpeed's users know; a profile as text and JSON; and the
profiled step of a run, at any layout, without a trace in the results."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError, StorageError
from megatron.model import count_parameters
from megatron.profiler import FlopsProfiler, get_model_profile
from megatron.profiler.profile import (Macs, ModelProfile, ModuleRow, ProfiledJob, format_count, format_profile,
                                       format_seconds, format_share, summary, tree_lines, write_profile)
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, lines, tiny_model, train, train_all
from tests.megatron.profiler.models import step_macs


class Net(nn.Module):
    """Two products of 4 x 6 and 6 x 3 a row, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.drop(self.one(x)).relu())
        return y

    def generate(self, x: Tensor, times: int) -> None:
        for _ in range(times):
            self(x)


MACS = 2 * (4 * 6 + 6 * 3)
PARAMETERS = 5 * 6 + 7 * 3


def test_the_profile_of_a_call_has_what_deepspeed_returns() -> None:
    model = Net()
    quiet: dict[str, Any] = dict(print_profile=False, as_string=False)
    assert get_model_profile(model, (2, 4), **quiet) == (2 * MACS, MACS, PARAMETERS)
    assert get_model_profile(model, args=[torch.zeros(2, 4)], **quiet) == (2 * MACS, MACS, PARAMETERS)
    assert get_model_profile(model, kwargs={"x": torch.zeros(2, 4)}, **quiet)[1] == MACS
    assert get_model_profile(model, args=[torch.zeros(2, 4), 3], mode="generate", **quiet)[1] == 3 * MACS
    assert get_model_profile(model, (2, 4), ignore_modules=[nn.Linear], **quiet) == (0, 0, PARAMETERS)
    assert get_model_profile(model, (2, 4), print_profile=False) == ("168 FLOPs", "84 MACs", "51")


def test_each_module_keeps_its_mode_and_no_gradient_is_made() -> None:
    model = Net()
    model.train()
    model.two.eval()
    streams, wanted = torch.get_rng_state(), set[bool]()
    model.one.register_forward_hook(lambda *_: wanted.add(torch.is_grad_enabled()))
    get_model_profile(model, (2, 4), print_profile=False)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert torch.get_rng_state().equal(streams)  # there is no dropout in evaluation
    assert wanted == {False}
    with pytest.raises(RuntimeError):  # also when it raises
        get_model_profile(model, (2, 5), print_profile=False, warm_up=0)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_start_and_stop_count_what_lies_between() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    model(torch.zeros(2, 4)).sum().backward()
    for _ in range(2):  # counters do not grow from one profile to the next
        profiler.start_profile()
        model(torch.zeros(2, 4)).sum().backward()
        profiler.stop_profile()
        model(torch.zeros(2, 4)).sum().backward()
        assert profiler.profile().macs == Macs(MACS, 2 * MACS - 2 * 4 * 6)
        assert (profiler.get_total_macs(), profiler.get_total_flops()) == (MACS, 2 * MACS)
        assert profiler.get_total_params() == PARAMETERS
        assert profiler.get_total_duration() == profiler.profile().root.seconds > 0
    assert profiler.get_total_params(as_string=True) == "51"
    profiler.reset_profile()
    assert profiler.get_total_macs() == 0
    profiler.end_profile()
    with pytest.raises(ConfigError, match="there is no profile: call start_profile"):
        profiler.get_total_flops()


def test_a_backward_that_was_not_seen_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = FlopsProfiler(Net(), recompute_fwd_factor=1.0)
    profiler.start_profile()
    profiler.model(torch.zeros(2, 4))
    profiler.stop_profile()
    profiler.print_model_profile(detailed=False)
    assert "backward FLOPs per rank, estimated as 3 x forward:" in (said := capsys.readouterr().out)
    assert f"{3 * 2 * MACS} FLOPs" in said
    found = profiler.profile().as_dict()
    assert found["backward_is_estimated"]
    assert found["flops"] == found["flops_here"] == {"forward": 2 * MACS, "backward": 6 * MACS, "recomputation": 0}
    profiler.start_profile()
    profiler.model(torch.zeros(2, 4)).sum().backward()
    profiler.stop_profile()
    found = profiler.profile().as_dict()
    assert not found["backward_is_estimated"] and found["flops"]["backward"] == 2 * profiler.profile().macs.backward


MISUSES: list[tuple[Any, str]] = [
    (lambda: FlopsProfiler("model"), "takes a torch.nn.Module, not a str"),
    (lambda: FlopsProfiler(Net()).stop_profile(), "no profile is under way; call start_profile"),
    (lambda: FlopsProfiler(Net()).print_model_profile(), "there is no profile"),
    (lambda: get_model_profile(Net()), "needs input_shape, args or kwargs"),
    (lambda: get_model_profile(Net(), (2, 4), mode="sing"), "mode='sing': expected one of forward, generate")]


def test_misuse_says_what_to_do() -> None:
    for misuse, message in MISUSES:
        with pytest.raises(ConfigError, match=message):
            misuse()


# ---- text and JSON ------------------------------------------------------------------------------------------------


def leaf(path: str, kind: str, parameters: int, macs: Macs, seconds: float) -> ModuleRow:
    return ModuleRow(path, kind, parameters, parameters, macs, macs, 1, seconds)


def example() -> ModelProfile:
    rows = (leaf("a", "Linear", 600, Macs(30, 60, 30), 0.25), leaf("b", "Linear", 300, Macs(10, 20), 0.125),
            leaf("c", "<Norm>", 100, Macs(), 0.025))
    root = ModuleRow("", "Net", 1000, 1000, Macs(50, 100, 30), Macs(50, 100, 30), 1, 0.5, rows)
    return ModelProfile(root, Macs(), {"forward": 0.5, "backward": 1.0, "step": 0.5}, step=7, step_before=1.25,
                        layout=ProfiledJob(world=2, dp=2, global_batch=8), uncounted_ops={"mine.op": 3})


def test_numbers_are_told_in_three_figures_and_a_letter() -> None:
    assert [format_count(n, "FLOPs") for n in (0, 999, 1000, 123_456, 1.5e6, 2e9, 3e12, 4e15)] == [
        "0 FLOPs", "999 FLOPs", "1.00 kFLOPs", "123.46 kFLOPs", "1.50 MFLOPs", "2.00 GFLOPs", "3.00 TFLOPs",
        "4.00 PFLOPs"]
    assert [format_seconds(seconds)
            for seconds in (2.5, 0.0125, 3e-6, 0.0)] == ["2.50 s", "12.50 ms", "3.00 us", "0.00 us"]
    assert (format_count(124_439_808), format_share(1, 4), format_share(1, 0)) == ("124.44 M", "25.00%", "0.00%")


def test_the_summary_has_every_number_of_the_step() -> None:
    said = {name: value for name, _, value in (line.partition(":") for line in summary(example()))}
    found = {name: value.strip() for name, value in said.items()}
    assert found["forward FLOPs per rank"] == "100 FLOPs" and found["backward FLOPs per rank"] == "200 FLOPs"
    assert found["FLOPs of recomputation per rank"] == "60 FLOPs"
    assert found["FLOPs of the step, on all ranks"] == "720 FLOPs"
    assert found["iteration latency, forward + backward + step"] == "2.00 s"
    assert found["iteration latency of the step before, without the profiler"] == "1.25 s"
    assert found["forward FLOPS per rank"] == "200 FLOPS"
    assert found["backward FLOPS per rank, with recomputation"] == "260 FLOPS"
    assert found["FLOPS per rank"] == "180 FLOPS"
    assert found["samples per second, on all ranks"] == "4.00"  # of the data parallel ranks' 8, not 2 x 8
    assert found["FLOPS per rank in the time of the step before"] == "288 FLOPS"  # of 360 FLOPs in 1.25 s
    assert found["samples per second of the step before, on all ranks"] == "6.40"
    assert "mine.op" in said["not counted, for want of a formula"]


def test_the_tree_is_that_of_the_modules_with_shares_of_the_whole() -> None:
    assert list(tree_lines(example()))[3:6] == [
        "Net(",
        "  1.00 k, 100.00% params, 50 MACs, 100.00% MACs, 500.00 ms, 100.00% latency, 200 FLOPS",
        "  (a): Linear(600, 60.00% params, 30 MACs, 60.00% MACs, 250.00 ms, 50.00% latency, 240 FLOPS)"]


def test_the_files_ending_decides(tmp_path: Path) -> None:
    for name in ("p.json", "p.txt", "profile"):
        write_profile(example(), str(tmp_path / name))
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["flops"] == {"forward": 100, "backward": 200, "recomputation": 60}
    assert found["modules"]["modules"][0]["macs"] == {"forward": 30, "backward": 60, "recomputation": 30}
    assert (found["step"], found["layout"]["dp"], found["seconds"]["backward"]) == (7, 2, 1.0)
    assert (tmp_path / "p.txt").read_text() == (tmp_path / "profile").read_text() == format_profile(example()) + "\n"
    with pytest.raises(StorageError, match="the profile cannot be written to"):
        write_profile(example(), str(tmp_path / "nowhere" / "p.json"))


# ---- the profiled step of a run ------------------------------------------------------------------------------------

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
