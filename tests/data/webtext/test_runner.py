"""One stage: the same bytes for any number of workers and machines, resumed where it stopped, nothing half made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.storage import DataError
from data.webtext.readers import WebReadOptions
from data.webtext.runner import StageRunOptions, run_global_stage, run_map_stage
from data.webtext.readers import shards_of_stage
from data.webtext.stage_folder import merge_shares, read_stage_record
from tests.data.webtext.stages import REVERSE, SHOUT, Options

SMALL = StageRunOptions(shard_bytes=500)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that can be seen in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)}


def texts_in(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for shard in shards_of_stage(folder)
            for line in Path(shard.path).read_bytes().splitlines()]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    write(folder / "a.jsonl", [f"text {i}" + " drop" * (i % 5 == 0) for i in range(200)])
    write(folder / "b.jsonl", [f"more {i}" for i in range(7)])
    return folder


def test_a_map_stage_is_the_function_on_every_document_in_order(raw: Path, tmp_path: Path) -> None:
    record = run_map_stage(SHOUT, [raw], tmp_path / "out", run_options=SMALL)
    expected = [f"TEXT {i}" for i in range(200) if i % 5] + [f"MORE {i}" for i in range(7)]
    assert texts_in(tmp_path / "out") == expected
    assert len(record.outputs) > 5
    assert record.counts.dropped == {"asked for": 40}
    assert (record.counts.documents_in, record.counts.documents_kept) == (207, 167)
    assert record.counts.bytes_in == sum(path.stat().st_size for path in raw.iterdir())
    assert record.counts.bytes_kept == sum(output.bytes for output in record.outputs)
    assert read_stage_record(tmp_path / "out" / "stage.json") == record


def test_any_number_of_workers_and_machines_makes_the_same_folder(raw: Path, tmp_path: Path) -> None:
    run_map_stage(SHOUT, [raw], tmp_path / "one", run_options=SMALL)
    run_map_stage(SHOUT, [raw], tmp_path / "three", run_options=replace(SMALL, workers=3))
    shares = [tmp_path / f"share{k}" for k in range(4)]
    for k, folder in enumerate(shares):
        run_map_stage(SHOUT, [raw], folder, run_options=replace(SMALL, shard=(k, 4)))
    merge_shares(shares[::-1], tmp_path / "merged")
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "merged")


def test_merge_refuses_shares_that_are_missing_twice_there_or_of_another_stage(raw: Path, tmp_path: Path) -> None:
    shares = [tmp_path / f"share{k}" for k in range(3)]
    for k, folder in enumerate(shares):
        run_map_stage(SHOUT, [raw], folder, run_options=replace(SMALL, shard=(k, 3)))
    for wrong in (shares[:2], [*shares, shares[0]], shares[1:]):
        with pytest.raises(DataError, match="expected each share"):
            merge_shares(wrong, tmp_path / "merged")
    other = tmp_path / "other"
    run_map_stage(replace(SHOUT, options=Options(drop="more")), [raw], other, run_options=replace(SMALL, shard=(2, 3)))
    with pytest.raises(DataError, match="the shares differ in parameters"):
        merge_shares([*shares[:2], other], tmp_path / "merged")
    with pytest.raises(DataError, match="expected the folder of a stage that is complete"):
        merge_shares([raw], tmp_path / "merged")


def test_a_stage_that_is_done_is_passed_by_and_one_that_differs_is_made_again(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run_map_stage(SHOUT, [raw], out, run_options=SMALL)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.suffix}
    assert run_map_stage(SHOUT, [raw], out, run_options=replace(SMALL, workers=2)) == first
    assert {path: path.stat().st_mtime_ns for path in out.iterdir() if path.suffix} == times
    for change in (
        lambda: run_map_stage(replace(SHOUT, options=Options(drop="more")), [raw], out, run_options=SMALL),
        lambda: run_map_stage(SHOUT, [raw], out, run_options=StageRunOptions(shard_bytes=10_000)),
        lambda: run_map_stage(SHOUT, [raw], out, WebReadOptions(on_error="skip"), SMALL),
        lambda: run_map_stage(SHOUT, [write(raw / "b.jsonl", ["more"] * 7)], out, run_options=SMALL),
    ):
        again = change()
        assert again.key != first.key
        assert {path.name for path in out.glob("part-*")} == {output.name for output in again.outputs}
    before = contents(out)
    (out / "part-00000.jsonl").write_bytes(b"")
    run_map_stage(SHOUT, [raw / "b.jsonl"], out, run_options=SMALL)
    assert contents(out) == before, "a shard that is damaged is made again"


def test_a_global_stage_reads_the_folder_of_a_stage(raw: Path, tmp_path: Path) -> None:
    run_map_stage(SHOUT, [raw], tmp_path / "first", run_options=SMALL)
    record = run_global_stage(REVERSE, [tmp_path / "first"], tmp_path / "second")
    assert texts_in(tmp_path / "second") == texts_in(tmp_path / "first")[::-1]
    assert record and record.counts.documents_in == 167


def test_a_second_pass_sees_all_that_the_first_kept(raw: Path, tmp_path: Path) -> None:
    record = run_map_stage(replace(SHOUT, second_pass=REVERSE), [raw], tmp_path / "out", run_options=SMALL)
    run_map_stage(SHOUT, [raw], tmp_path / "first", run_options=SMALL)
    assert texts_in(tmp_path / "out") == texts_in(tmp_path / "first")[::-1]
    assert record.counts.dropped == {"asked for": 40} and record.counts.documents_in == 207
    assert list(contents(tmp_path / "out")) == ["part-00000.jsonl", "stage.json"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_with_its_place_whichever_worker_meets_it(raw: Path, tmp_path: Path, workers: int) -> None:
    lines = (raw / "a.jsonl").read_bytes().splitlines(keepends=True)
    lines[150] = lines[190] = b"[]\n"
    (raw / "a.jsonl").write_bytes(b"".join(lines))
    place = f"a.jsonl:151 .byte {len(b''.join(lines[:150]))}. expected a JSON object, found an array"
    with pytest.raises(DataError, match=place):
        run_map_stage(SHOUT, [raw], tmp_path / "out", run_options=replace(SMALL, workers=workers))
    record = run_map_stage(SHOUT, [raw], tmp_path / "out", WebReadOptions(on_error="skip"),
                           replace(SMALL, workers=workers))
    assert record.counts.dropped["not an object"] == 2
    assert record.counts.documents_in == record.counts.documents_kept + sum(record.counts.dropped.values()) == 207


def test_what_a_library_does_not_survive_is_an_error_or_a_counted_loss(raw: Path, tmp_path: Path) -> None:
    write(raw / "b.jsonl", ["good", "fail", "good"])
    with pytest.raises(DataError, match=r"b.jsonl:2 \(byte 17\) ZeroDivisionError: a library gave up"):
        run_map_stage(SHOUT, [raw], tmp_path / "out")
    assert run_map_stage(SHOUT, [raw], tmp_path / "out", WebReadOptions(on_error="skip")).counts.dropped["failed"] == 1


def test_shards_that_no_stage_made_are_never_removed(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    mine = write(tmp_path / "mine" / "part-00000.jsonl", ["precious"])
    with pytest.raises(DataError, match="found shards no stage made"):
        run_map_stage(SHOUT, [raw], tmp_path / "mine")
    assert mine.exists()
