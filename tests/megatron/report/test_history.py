"""Whatever was killed and resumed: one line of steps, each of them once, as it was taken last."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from data.storage import DataError
from megatron.metrics.sinks import MetricsFileReader
from megatron.report.run_report import RunHistory, history_notes
from tests.megatron.report.written import CONFIG, evaluation, save, start, step, write


def history(*records: dict[str, Any]) -> RunHistory:
    return RunHistory("run", records)


def notes_of(found: RunHistory) -> list[str]:
    """Of a file whose lines are whole."""
    lines = MetricsFileReader(Path("whole"))
    lines.num_records = len(found.steps)
    return history_notes(found, lines)


def killed_run(seed: int) -> tuple[list[dict[str, Any]], dict[int, float], list[dict[str, Any]]]:
    """The file of a run that is killed at random steps, and what a patient reader would make of it: the loss of each
    step, and the evaluations and saves."""
    draw, records, losses = random.Random(seed), list[dict[str, Any]](), dict[int, float]()
    events, position = list[dict[str, Any]](), 0
    for _ in range(draw.randrange(1, 8)):
        records.append(start(position))
        losses = {number: loss for number, loss in losses.items() if number <= position}
        events = [event for event in events if event.get("iteration", event.get("step")) <= position]
        end = position + draw.randrange(1, 40)
        for number in range(position + 1, end + 1):
            losses[number] = draw.random()
            records.append(step(number, lm_loss=losses[number]))
            if number % 10 == 0:
                events += [evaluation(number, draw.random()), save(number)]
                records += events[-2:]
        position = draw.randrange(end // 10 + 1) * 10
    return records, losses, events


@pytest.mark.parametrize("seed", range(30))
def test_a_run_that_was_killed_and_resumed_is_one_line(seed: int) -> None:
    records, losses, events = killed_run(seed)
    found = history(*records)
    assert list(found.steps) == sorted(losses) == list(range(1, len(losses) + 1))
    assert list(found.columns["lm_loss"]) == [losses[number] for number in sorted(losses)]
    assert [*found.saves] == [event["step"] for event in events if "save" in event]
    assert [(one.step, one.loss) for one in found.evaluations] == [
        (event["iteration"], event["lm_loss"]) for event in events if "eval" in event]
    assert list(found.seconds) == [0.5 * number for number in found.steps]
    assert list(found.tokens) == [32 * number for number in found.steps]
    assert not any("two runs" in note for note in notes_of(found))


@pytest.mark.parametrize("seed", range(10))
def test_two_runs_that_write_at_the_same_time_are_seen(seed: int) -> None:
    """Whoever is ahead, each of them has recorded its own start; and nobody invents others."""
    draw, ahead = random.Random(seed), random.Random(seed).randrange(15)
    one, two = [start(0), *map(step, range(1, 31))], [start(0), *map(step, range(1, 31))]
    records, one = one[:ahead], one[ahead:]
    while one or two:
        records.append((one if not two or one and draw.random() < 0.5 else two).pop(0))
    found = history(*records)
    assert len(found.starts) == 2 and not found.resumes
    told, *others = notes_of(found)
    assert all("no record" in note for note in others), "who of them began anew is not known"
    assert told.startswith(f"run: {found.num_out_of_order} step") and told.endswith("mix both")


def test_a_run_that_is_begun_anew_in_the_file_of_another_is_told() -> None:
    found = history(start(0), *map(step, range(1, 11)), start(0), *map(step, range(1, 7)))
    assert [(one.step, one.discarded_steps, one.last_step) for one in found.starts] == [(0, 0, 10), (0, 10, 6)]
    assert list(found.steps) == list(range(1, 7))
    assert notes_of(found) == ["run: it was started again from step 0, and its curves leave out 10 steps before that"]


def test_steps_that_are_not_recorded_are_counted() -> None:
    """The disk of a machine that lost its power holds a later checkpoint than metrics."""
    found = history(start(0), step(1), step(2), start(5), step(6))
    assert list(found.steps) == [1, 2, 6]
    assert notes_of(found) == ["run: 3 steps between the first and the last have no record"]


def test_values_that_are_no_numbers_are_not_known() -> None:
    odd = [None, "fast", True, 10**400, [], 2.5]
    found = history(start(0), *(step(number, lm_loss=value) for number, value in enumerate(odd, 1)))
    loss = found.columns["lm_loss"]
    assert [math.isnan(value) for value in loss] == [True, True, False, True, True, False] and loss[-1] == 2.5
    for record in ({"iteration": "1"}, {"iteration": -1}, {"iteration": 1.5}, {"iteration": 2**70}, {"save": {}},
                   {"save": True}, {"iteration": 0}):
        assert not history(record).steps


# ---- the file ---------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[list[int | None], MetricsFileReader]:
    lines = MetricsFileReader(path)
    return [record.get("iteration") for record in lines], lines


@pytest.mark.parametrize("cut", range(1, len(json.dumps(step(3))), 7))
def test_a_last_line_that_was_cut_anywhere_is_told_and_left_out(cut: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m", CONFIG, step(1), step(2), end=json.dumps(step(3))[:cut])
    found, lines = read(path)
    assert found == [None, 1, 2] and lines.last_line_is_incomplete and not lines.num_damaged_lines
    found, lines = read(write(tmp_path / "m", CONFIG, end=json.dumps(step(1))))  # a whole one needs no end
    assert found == [None, 1] and not lines.last_line_is_incomplete


@pytest.mark.parametrize("cut", [5, 60, 200])
@pytest.mark.parametrize("following", [start(2), step(3)])
def test_a_record_behind_a_cut_line_is_found(following: dict[str, object], cut: int, tmp_path: Path) -> None:
    """As a trainer that did not begin a new line has left it."""
    path = write(tmp_path / "m", step(1), step(2), end=json.dumps(step(3))[:cut] + json.dumps(following) + "\n"
                 + json.dumps(step(4)) + "\n")
    found, lines = read(path)
    assert found == [1, 2, following.get("iteration"), 4
                     ] and lines.num_damaged_lines == 1 and not lines.last_line_is_incomplete


@pytest.mark.parametrize("content", [b"", b"\n\n", bytes(512), b'{"config": tr'])
def test_a_file_without_a_line_is_a_run_that_has_only_begun(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    assert read(tmp_path / "m")[0] == []


@pytest.mark.parametrize("content", [
    b"some text\nand more\n", b'{"text": "a corpus"}\n' * 3, b"[" * 100_000 + b"\n", b"\x80\xff\x00\n" * 3,
    b'"iteration"\n'])
def test_another_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(DataError, match=r"/m is no metrics file"):
        read(tmp_path / "m")
