"""Traced steps of a run: the files, the line, and that nothing else changes."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import call, patch

import pytest
import torch
from torch.profiler import profile

from megatron.config.cli import parse_args
from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.rank_status import STATUS
from megatron.errors import ConfigError, Interrupted
from megatron.trace.trace_window import StatusRanges, TraceWindow
from megatron.train.loop import Trainer
from mpu import collective_tracker
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, lines, train, train_all

RUN = [*TINY, "--mock-data", "--batch-size", "2", "--global-batch-size", "4", "--train-iters", "5"]
LINE = re.compile(r"^ steps (\d+) to (\d+): [\d.]+ ms each with the profiler at work: (.*) \| (.*\.json\.gz)",
                  re.MULTILINE)
ONE_STEP = re.compile(r"^ step 2: [\d.]+ ms with the profiler at work: .* \| (.*\.json\.gz)", re.MULTILINE)


def trace_of(path: str | Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def ranges(events: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """What the engine says of itself."""
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return [event for event in sorted(found, key=lambda event: event["ts"]) if event["name"].startswith(f"{place}: ")]


def track(events: list[dict[str, Any]], place: str) -> list[str]:
    return [event["name"].removeprefix(f"{place}: ") for event in ranges(events, place)]


def test_the_steps_that_were_asked_for_are_traced_and_no_bit_of_the_run_changes(tmp_path: Path) -> None:
    for name, more in (("without", []), ("with", ["--profile-steps", "2:3", "--profile-dir", tmp_path / "traces"])):
        said = train([*RUN, *more, "--metrics-file", tmp_path / name])
    assert lines(tmp_path / "with")[1:] == lines(tmp_path / "without")[1:]
    first, last, words, path = LINE.search(said).groups()
    assert (first, last, path) == ("2", "3", str(tmp_path / "traces" / "steps-2-3.rank-0.json.gz"))
    kinds = dict(word.rsplit(" ", 2)[:2] for word in words.split(", "))
    assert [*kinds] == ["products", "attention", "loss", "optimizer", "exchange not hidden", "data", "other"]
    assert abs(sum(map(int, kinds.values())) - 100) <= 4  # each is rounded
    assert int(kinds["products"]) > 0 and int(kinds["optimizer"]) > 0
    events = trace_of(path)
    assert track(events, "phase") == ["forward", "backward"] * 2 + ["optimizer step"] \
        + ["forward", "backward"] * 2 + ["optimizer step"]
    assert track(events, "block")[:4] == ["blocks.0", "blocks.1", "blocks.1", "blocks.0"]
    assert track(events, "step") == ["1", "2", "3"], "step 1 until the next one begins"
    assert track(events, "activity").count("reading of batches") == 2
    assert sum(event["name"] == "_LinearCrossEntropyMean"
               for event in events if event.get("cat") == "cpu_op") == 4  # micro-batches
    assert any(event["name"] == "[memory]" for event in events)


def test_the_ranges_of_the_engine_are_nested_and_count_by_the_clock_of_the_profiler(tmp_path: Path) -> None:
    """As viewers need them on the row of a thread; of each place there is one at a time."""
    train([*RUN, "--checkpoint-activations", "--profile-steps", "2:2", "--profile-dir", tmp_path])
    events = trace_of(tmp_path / "steps-2-2.rank-0.json.gz")
    outer: list[tuple[float, str]] = []
    for event in sorted((event for event in events if event.get("cat") == "user_annotation"),
                        key=lambda event: (event["ts"], -event["dur"])):
        end, place = event["ts"] + event["dur"], event["name"].partition(":")[0]
        while outer and outer[-1][0] <= event["ts"]:
            outer.pop()
        assert not outer or end <= outer[-1][0] + 0.01
        assert place not in {of_outer for _, of_outer in outer}
        outer.append((end, place))
    losses = [event for event in events if event["name"] == "_LinearCrossEntropyMean" and event.get("cat") == "cpu_op"]
    forwards = [event for event in ranges(events, "phase") if event["name"] == "phase: forward"]
    for loss, forward in zip(losses, forwards, strict=True):
        assert forward["ts"] < loss["ts"] and loss["ts"] + loss["dur"] < forward["ts"] + forward["dur"]


def test_another_rank_can_be_traced_and_says_what_travels(tmp_path: Path) -> None:
    runs = [[*RUN, "--zero-stage", "3", "--stage3-param-persistence-threshold", "0", "--profile-steps", "2:2",
             "--profile-rank", "1", "--profile-dir", tmp_path]]
    (first,), (second,) = run_ranks(train_all, 2, runs)
    assert "the profiler at work" not in first and ONE_STEP.search(second)
    events = trace_of(tmp_path / "steps-2-2.rank-1.json.gz")
    assert {"blocks.0, forward", "blocks.1, forward", "the gradients of blocks.0"} <= {*track(events, "exchange")}


def test_steps_and_ranks_that_cannot_be_traced_are_refused() -> None:
    for asked in ("3", "3:", "0:2", "3:2", "a:b", "1:2:3", "-1:2", " 1:2"):
        with pytest.raises(ConfigError, match="is no FIRST:LAST of steps from 1 on, in their order: write 10:12, say"):
            parse_args([*RUN, f"--profile-steps={asked}"], 1)
    config = parse_args([*RUN, "--profile-steps", "1:2", "--profile-rank", "2"], 2)
    with pytest.raises(ConfigError, match="--profile-rank 2 is not one of the 2 ranks"):
        config.check_world(2)


def test_steps_that_do_not_come_are_told(tmp_path: Path) -> None:
    traces = ["--profile-dir", tmp_path / "traces", "--profile-steps"]
    assert " note: --profile-steps 6:7 does not come: --train-iters 5 ends the run" in train([*RUN, *traces, "6:7"])
    assert "--profile-rank has no effect without --profile-steps" in train([*RUN, "--profile-rank", "0"])
    train([*RUN, "--save", tmp_path / "save", "--exit-interval", "3"])
    assert " note: nothing is traced: --profile-steps 2:3 is over, the run goes on at step 4" in train(
        [*RUN, "--save", tmp_path / "save", "--load", tmp_path / "save", *traces, "2:3"])
    assert not (tmp_path / "traces").exists()


def test_a_trace_that_the_run_ends_is_written(tmp_path: Path) -> None:
    said = train([*RUN, "--profile-steps", "4:9", "--profile-dir", tmp_path])
    assert LINE.search(said).groups()[:2] == ("4", "5")
    again = train([*RUN, "--profile-steps", "4:9", "--profile-dir", tmp_path])
    assert LINE.search(again)[4].endswith("steps-4-5.rank-0.2.json.gz")  # the first is kept
    assert (tmp_path / "steps-4-5.rank-0.json.gz").exists()


def at_once(rank: int, world: int, folder: Path) -> str:
    return train([*RUN, "--seed", rank, "--profile-steps", "2:3", "--profile-dir", folder])


def test_runs_that_trace_into_one_folder_at_once_have_a_file_each(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, multiprocessing.get_context("forkserver")) as pool:
        said = [*pool.map(at_once, range(3), [1] * 3, [tmp_path] * 3)]
    named = {LINE.search(one)[4] for one in said}
    assert len(named) == 3 and {str(path) for path in tmp_path.glob("*.json.gz")} == named
    assert {path.stat().st_size > 1000 for path in tmp_path.iterdir()} == {True} and len([*tmp_path.iterdir()]) == 3


def test_another_profiler_at_work_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as others:
        train([*RUN, "--profile-steps", "2:3", "--profile-dir", tmp_path / "t"])
    assert "another profiler of torch is at work" in capsys.readouterr().err and not (tmp_path / "t").exists()
    assert sum(event.name == "_LinearCrossEntropyMean" for event in others.events()) == 10


def test_after_an_error_everybody_is_as_before(tmp_path: Path) -> None:
    words, numbers, step = STATUS._counters, collective_tracker.current_counters(), Trainer.train_step

    def fails(trainer: Trainer, batches: list[Any]) -> Any:
        report = step(trainer, batches)
        if report.number == 3:
            raise ZeroDivisionError("on purpose")
        return report

    with patch.object(Trainer, "train_step", fails), pytest.raises(ZeroDivisionError):
        train([*RUN, "--profile-steps", "2:5", "--profile-dir", tmp_path])
    assert STATUS._counters is words and collective_tracker.current_counters() is numbers
    assert not [*tmp_path.iterdir()], "ranks may wait for this one, and the device may never answer"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_who_is_interrupted_at_the_beginning_of_a_trace_leaves_nothing_switched_on(device: str, tmp_path: Path) -> None:
    asked = parse_args([*RUN, "--profile-steps", "1:2", "--profile-dir", str(tmp_path)], 1).profile
    with patch.object(StatusRanges, "attached", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt), \
            patch("torch.cuda.memory._record_memory_history") as history, patch("torch.cuda.synchronize"), \
            TraceWindow(asked, torch.device(device), CollectiveLog(reductions_in_order=True), 0, 5):
        raise AssertionError("nobody comes here")
    assert not torch.autograd.profiler._is_profiler_enabled
    assert device == "cpu" or history.call_args == call(None)


def test_a_device_that_fails_at_the_end_of_a_trace_leaves_no_profiler_at_work(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = parse_args([*RUN, "--profile-steps", "1:2", "--profile-dir", str(tmp_path)], 1).profile
    with patch("torch.cuda.memory._record_memory_history"), \
            patch("torch.cuda.synchronize", side_effect=[None, RuntimeError("CUDA error")]), \
            TraceWindow(asked, torch.device("cuda"), CollectiveLog(reductions_in_order=True), 0, 5):
        assert torch.autograd.profiler._is_profiler_enabled
    assert not torch.autograd.profiler._is_profiler_enabled and "CUDA error" in capsys.readouterr().err


def test_a_run_that_is_stopped_has_its_trace(tmp_path: Path) -> None:
    """A request travels with the step after it."""
    step = Trainer.train_step

    def stops(trainer: Trainer, batches: list[Any]) -> Any:
        report = step(trainer, batches)
        if report.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    with patch.object(Trainer, "train_step", stops), pytest.raises(Interrupted):  # without --save
        train([*RUN, "--profile-steps", "2:5", "--profile-dir", tmp_path])
    assert {path.name for path in tmp_path.iterdir()} == {"steps-2-3.rank-0.json.gz"}


def test_a_folder_or_a_drive_that_fails_leaves_nothing_and_does_not_end_the_run(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    full = OSError(errno.ENOSPC, "No space left on device")
    for folder, words in (("file/traces", "warning: the trace cannot be written to"),
                          ("t", "(OSError: [Errno 28] No space left on device); training goes on without it")):
        with patch.object(profile, "export_chrome_trace", side_effect=full):
            train([*RUN, "--profile-steps", "2:3", "--profile-dir", tmp_path / folder, "--metrics-file",
                   tmp_path / f"metrics-{folder[0]}"])
        assert words in capsys.readouterr().err and len(lines(tmp_path / f"metrics-{folder[0]}")) >= 5
    assert [*(tmp_path / "t").iterdir()] == []
