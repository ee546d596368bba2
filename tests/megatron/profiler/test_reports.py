"""A profile as people and programs read it: text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import StorageError
from megatron.profiler.profile import (Macs, ModelProfile, ModuleRow, ProfiledJob, aggregated_lines, format_count,
                                       format_profile, format_seconds, format_share, summary, tree_lines,
                                       write_profile)
from tests.megatron.profiler.models import gpt2, recorded, tokens


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


def test_sums_over_classes_are_told_depth_by_depth() -> None:
    lines = list(aggregated_lines(example(), top_modules=2))
    assert lines[1:5] == ["depth 0:", "    parameters      - Net: 1.00 k", "    forward MACs    - Net: 50 MACs",
                          "    forward latency - Net: 500.00 ms"]
    assert lines[5:] == ["depth 1:", "    parameters      - Linear: 900, <Norm>: 100",
                         "    forward MACs    - Linear: 40 MACs, <Norm>: 0 MACs",
                         "    forward latency - Linear: 375.00 ms, <Norm>: 25.00 ms"]
    assert list(aggregated_lines(example(), module_depth=0)) == [lines[0].replace("2", "1"), *lines[1:5]]


def test_the_tree_is_that_of_the_modules_with_shares_of_the_whole() -> None:
    assert list(tree_lines(example()))[3:6] == [
        "Net(",
        "  1.00 k, 100.00% params, 50 MACs, 100.00% MACs, 500.00 ms, 100.00% latency, 200 FLOPS",
        "  (a): Linear(600, 60.00% params, 30 MACs, 60.00% MACs, 250.00 ms, 50.00% latency, 240 FLOPS)"]


def test_every_module_of_a_model_has_one_line_and_brackets_close() -> None:
    model = gpt2()
    text = format_profile(recorded(model, tokens(model), tokens(model)))
    lines = text.splitlines()[text.splitlines().index("GPT2("):]
    assert sum("% params" in line for line in lines) == len(list(model.modules()))
    assert text.count("(") == text.count(")")
    assert "GPT2(" not in format_profile(recorded(model, tokens(model), tokens(model)), detailed=False)


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
