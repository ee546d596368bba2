"""A profile as people and programs read it: text, JSON, and a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import permutations
from pathlib import Path

import pytest

from megatron.errors import StorageError
from megatron.profiler.profile import Macs, ModelProfile, ModuleRow, ProfiledJob
from megatron.profiler.profile_report import (aggregated_lines, flame_bars, format_count, format_profile,
                                              format_seconds, format_share, profile_page, summary, tree_lines,
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
    for name in ("p.json", "p.html", "p.txt", "profile"):
        write_profile(example(), str(tmp_path / name))
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["flops"] == {"forward": 100, "backward": 200, "recomputation": 60}
    assert found["modules"]["modules"][0]["macs"] == {"forward": 30, "backward": 60, "recomputation": 30}
    assert (found["step"], found["layout"]["dp"], found["seconds"]["backward"]) == (7, 2, 1.0)
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "p.txt").read_text() == (tmp_path / "profile").read_text() == format_profile(example()) + "\n"
    with pytest.raises(StorageError, match="the profile cannot be written to"):
        write_profile(example(), str(tmp_path / "nowhere" / "p.json"))


class Page(HTMLParser):
    """Tags that are open, and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href")]
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_loads_nothing_and_escapes_names() -> None:
    text = profile_page(example())
    parsed = Page()
    parsed.feed(text)
    assert not parsed.open and not parsed.loads and "<script" not in text and "url(" not in text
    assert "<Norm>" not in text and "&lt;Norm&gt;" in text
    assert "a (Linear): 240 FLOPs, 66.67%" in parsed.titles and "c (<Norm>): 25.00 ms, 5.00%" in parsed.titles
    assert "Net (Net) itself, outside of the modules in it: 100.00 ms, 20.00%" in parsed.titles
    assert len(re.findall(r"<tr>", text)) == 4 + 1 + text[:text.index("FLOPs</h2>")].count("<tr>")


def test_bars_lie_under_their_module_side_by_side_as_wide_as_their_share() -> None:
    model = gpt2()
    profile = recorded(model, tokens(model), tokens(model))
    drawn = list(flame_bars(profile.root, lambda row: row.macs.all))
    place = {bar.row.path: bar for bar in drawn if not bar.is_own}
    assert (place[""].left, place[""].width, place[""].depth) == (0.0, 1.0, 0)
    for bar in drawn[1:]:
        above = place[bar.row.path if bar.is_own else bar.row.path.rpartition(".")[0]]
        assert bar.depth == above.depth + 1
        assert above.left - 1e-9 <= bar.left and bar.left + bar.width <= above.left + above.width + 1e-9
        own = bar.row.macs.all - bar.is_own * sum(inner.macs.all for inner in bar.row.children)
        assert bar.width == pytest.approx(own / profile.root.macs.all)
    for one, other in permutations(drawn, 2):
        apart = one.left + one.width <= other.left + 1e-9 or other.left + other.width <= one.left + 1e-9
        assert apart or one.depth != other.depth
    for bar in drawn:  # under a module no gap is left
        inside = (bar.row, *bar.row.children)
        below = [under.width for under in drawn if under.depth == bar.depth + 1 and under.row in inside]
        assert bar.is_own or not bar.row.children or sum(below) == pytest.approx(bar.width)
    assert [bar.row.path for bar in drawn if bar.is_own] == ["blocks.0.attn", "blocks.1.attn", ""]
    assert not list(flame_bars(example().root, lambda row: 0.0))
