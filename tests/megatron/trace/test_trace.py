"""Traced steps of a run: the files, the line, and that nothing else changes."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.profiler import profile

from megatron.distributed.rank_status import FORWARD, OPTIMIZER_STEP, READING, STATUS, TRAINING
from megatron.errors import Interrupted
from megatron.trace.trace_window import (ATTENTION, LOSS, PRODUCTS, Interval, format_breakdown, operations_with_kinds,
                                         time_breakdown, time_by_kind)
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


def test_another_rank_can_be_traced_and_says_what_travels(tmp_path: Path) -> None:
    runs = [[*RUN, "--zero-stage", "3", "--stage3-param-persistence-threshold", "0", "--profile-steps", "2:2",
             "--profile-rank", "1", "--profile-dir", tmp_path]]
    (first,), (second,) = run_ranks(train_all, 2, runs)
    assert "the profiler at work" not in first and ONE_STEP.search(second)
    events = trace_of(tmp_path / "steps-2-2.rank-1.json.gz")
    assert {"blocks.0, forward", "blocks.1, forward", "the gradients of blocks.0"} <= {*track(events, "exchange")}


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


def test_a_folder_or_a_drive_that_fails_leaves_nothing_and_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    full = OSError(errno.ENOSPC, "No space left on device")
    for folder, words in (("file/traces", "warning: the trace cannot be written to"),
                          ("t", "(OSError: [Errno 28] No space left on device); training goes on without it")):
        with patch.object(profile, "export_chrome_trace", side_effect=full):
            train([*RUN, "--profile-steps", "2:3", "--profile-dir", tmp_path / folder, "--metrics-file",
                   tmp_path / f"metrics-{folder[0]}"])
        assert words in capsys.readouterr().err and len(lines(tmp_path / f"metrics-{folder[0]}")) >= 5
    assert [*(tmp_path / "t").iterdir()] == []


# ---- which kind of work each moment of a trace belongs to ---------------------------------------------------------


def test_each_moment_belongs_to_the_first_kind_that_has_it() -> None:
    draw = random.Random(1)
    for _ in range(20):
        kinds = {name: [Interval(start, start + draw.randrange(12))
                        for start in draw.choices(range(-5, 95), k=draw.randrange(9))] for name in "abcd"}
        wanted = dict.fromkeys([*kinds, ""], 0)
        for moment in range(80):
            wanted[next((name for name, its in kinds.items()
                         if any(start <= moment < stop for start, stop, _ in its)), "")] += 1
        assert time_by_kind(kinds, (0, 80)) == wanted


NAMES = [
    (PRODUCTS, "aten::mm aten::addmm aten::bmm aten::linear mkldnn::_linear_pointwise aten::_scaled_mm"),
    (ATTENTION, "aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention_for_cpu_backward "
     "aten::_flash_attention_forward aten::_efficient_attention_backward"),
    (LOSS, "_LinearCrossEntropyMean _LinearCrossEntropyMeanBackward _VocabParallelCrossEntropyBackward "
     "aten::cross_entropy_loss aten::_log_softmax"),
    ("", "aten::add aten::native_layer_norm aten::gelu aten::mmean aten::addcmul_ aten::t aten::copy_ aten::_softmax")]


def test_operations_are_known_by_name() -> None:
    for kind, names in NAMES:
        events = [op(name, start, 1) for start, name in enumerate(names.split())]
        assert [found for _, found in operations_with_kinds(events)] == [kind] * len(events)


def states(place: str, *changes: tuple[float, str]) -> list[dict[str, Any]]:
    """The engine's successive states at one place, each from its time to the next one's; "" is none."""
    return [{"cat": "user_annotation", "name": f"{place}: {name}", "ts": start, "dur": stop - start, "tid": 7}
            for (start, name), (stop, _) in zip(changes, [*changes[1:], (100, "")]) if name]


def op(name: str, start: float, length: float, thread: int = 7, number: int = 0) -> dict[str, Any]:
    return {"cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": thread, "args": {"External id": number}}


def test_on_a_cpu_the_thread_that_trains_is_looked_at() -> None:
    said = [*states("activity", (0, READING), (10, TRAINING)),
            *states("phase", (10, FORWARD), (60, OPTIMIZER_STEP), (80, "")),
            *states("exchange", (20, "blocks.0, forward"), (26, ""), (70, "collective"), (75, ""))]
    events = [op("AddmmBackward0", 29, 11), op("aten::linear", 30, 10), op("aten::mm", 31, 5),
              op("_LinearCrossEntropyMean", 40, 10), op("aten::mm", 41, 8), op("aten::add", 50, 5),
              op("aten::scaled_dot_product_attention", 11, 12), op("aten::bmm", 12, 3),
              op("aten::mm", 61, 4), op("aten::mm", 82, 10, thread=8)]
    found = time_breakdown([*said, *events], 7, (0, 100), on_host=True)
    assert found == {"products": 10, "attention": 9, "loss": 10, "optimizer": 15, "exchange not hidden": 11, "data": 10,
                     "evaluation and saves": 0, "other": 35}
    assert format_breakdown(found) == (
        "products 10 %, attention 9 %, loss 10 %, optimizer 15 %, exchange not hidden 11 %, "
        "data 10 %, other 35 %")


def numbered(event: dict[str, Any], sequence: int, backward: bool = False) -> dict[str, Any]:
    return {**event, "args": {**event["args"], "Sequence number": sequence, "Fwd thread id": int(backward)}}


def test_a_step_backward_is_of_what_it_differentiates() -> None:
    """Attention with dropout is written out: its gradient is made of products, a softmax and so on. What comes before
    it has the same number as its first operation, and makes no step backward of its own."""
    events = [numbered(op("aten::detach", 0, 1), 4), numbered(op("aten::scaled_dot_product_attention", 1, 9), 4),
              numbered(op("aten::bmm", 2, 2), 4), numbered(op("aten::bmm", 5, 2), 5),
              numbered(op("aten::mm", 10, 5), 6),
              numbered(op("aten::gelu", 15, 1), 7), op("aten::bmm", 31, 4), op("aten::bmm", 41, 4),
              numbered(op("BmmBackward0", 30, 6), 5, True), numbered(op("BmmBackward0", 40, 6), 4, True),
              numbered(op("MmBackward0", 50, 7), 6, True), numbered(op("GeluBackward0", 60, 3), 7, True)]
    found = time_breakdown(events, 7, (0, 100), on_host=True)
    assert (found["attention"], found["products"], found["other"]) == (9 + 6 + 6, 5 + 7, 67)


def kernel(name: str, start: float, length: float, launch: int, operation: int | None = None,
           cat: str = "kernel") -> dict[str, Any]:
    known = {} if operation is None else {"External id": operation}
    return {"cat": cat, "name": name, "ts": start, "dur": length, "tid": 100, "args": {"correlation": launch, **known}}


def launch(start: float, number: int) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start, "dur": 0.1, "tid": 7,
            "args": {"correlation": number}}


def test_on_an_accelerator_the_device_is_looked_at() -> None:
    """The host launches ahead; backwards are in a thread of their own, and Adam's kernel is launched by Python."""
    said = [*states("activity", (0, READING), (5, TRAINING)),
            *states("phase", (5, FORWARD), (30, OPTIMIZER_STEP), (40, "")),
            *states("exchange", (6, "collective"), (9, ""))]
    events = [op("aten::linear", 6, 2), op("aten::addmm", 6.5, 1, number=1),
              op("_LinearCrossEntropyMeanBackward", 8, 4, thread=9),
              op("aten::mm", 9, 1, thread=9, number=2), op("aten::add", 12, 1, number=3),
              {**op("detached", 3, 1), "args": {}},
              op("aten::copy_", 34, 1, number=5), op("c10d::_allgather_base_", 32, 1, number=77),
              *(launch(at, number) for number, at in enumerate((7, 9, 12, 32, 33, 35, 20, 36), 1)),
              kernel("generated_3", 10, 20, 1, 1), kernel("gemm", 30, 10, 2, 2), kernel("elementwise", 40, 5, 3, 3),
              kernel("ncclDevKernel_AllGather", 20, 40, 4, 77), kernel("_adam", 60, 10, 5),
              kernel("Memcpy HtoD (Pinned -> Device)", 65, 15, 6, 5, cat="gpu_memcpy"),
              kernel("sm90_xmma_gemm_bf16", 82, 4, 7), kernel("Memset (Device)", 86, 1, 8, cat="gpu_memset")]
    found = time_breakdown([*said, *events], 7, (0, 100), on_host=False)
    assert found == {"products": 24, "attention": 0, "loss": 10, "optimizer": 11, "exchange not hidden": 15, "data": 5,
                     "evaluation and saves": 0, "other": 5, "copies": 10, "idle": 20}
    assert sum(found.values()) == 100
