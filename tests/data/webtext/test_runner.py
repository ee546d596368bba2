"""One stage: the same bytes for any number of workers and machines, resumed where it stopped, nothing half made."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from data import input_files
from data.input_files import find_text_files
from data.preprocess import TextReadOptions, main as preprocess
from data.sources import cached_corpus
from data.split_json import main as split_json_main
from data.storage import DataError, UsageError
from data.tokenizer import ByteLevelTokenizer
from data.webtext import runner, split
from data.webtext.__main__ import main, tokenize_part
from data.webtext.readers import WebReadOptions, shards_of_stage
from data.webtext.runner import (GlobalStage, StageRunOptions, merge_shares, read_stage_record, run_global_stage,
                                 run_map_stage)
from tests.data.helpers import in_a_fork
from tests.data.webtext.stages import REVERSE, SHOUT


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
    run_map_stage(replace(SHOUT, parameters={"drop": "more"}), [raw], other, run_options=replace(SMALL, shard=(2, 3)))
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
        lambda: run_map_stage(replace(SHOUT, parameters={"drop": "more"}), [raw], out, run_options=SMALL),
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


def test_a_second_pass_sees_all_that_the_first_kept(raw: Path, tmp_path: Path) -> None:
    record = run_map_stage(replace(SHOUT, second_pass=REVERSE), [raw], tmp_path / "out", run_options=SMALL)
    run_map_stage(SHOUT, [raw], tmp_path / "first", run_options=SMALL)
    assert texts_in(tmp_path / "out") == texts_in(tmp_path / "first")[::-1]
    assert record.counts.dropped == {"asked for": 40} and record.counts.documents_in == 207
    assert [name for name in contents(tmp_path / "out") if "dropped" not in name] == ["part-00000.jsonl", "stage.json"]


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


# ------------------------------------------------------------------------------------ its own files and those of others

def run(command: str, *words: object) -> None:
    main([command, *map(str, words), "--workers", "1", "--shard-bytes", "400"])


@pytest.fixture
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file of lines in `raw`."""
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    Path("raw/a.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)))
    return tmp_path


def everything() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*"))
            if path.is_file() and path.name != ".lock"}


AMONG_ITS_INPUTS = [
    (["shuffle", "A", "--output", "A"], "is A"), (["clean", "link", "--output", "A"], "is link"),
    (["read", "raw", "--output", "raw"], "is raw"), (["read", "raw", "--output", "raw/out"], "lies in raw"),
    (["shuffle", "D/read", "--output", "D", "--seed", "3"], "holds D/read"),
    (["read", "S/train/part-00000.jsonl", "--output", "S"], "holds S/train/part-00000.jsonl"),
    (["decontaminate", "A", "--output", "B", "--evaluation", "B/part-00000.jsonl"], "holds B/part-00000.jsonl"),
    (["merge", "M0", "M1", "--output", "M0"], "is M0"), (["run", "raw", "--output", "raw"], "lies in raw")]


def test_a_stage_among_what_it_reads_is_refused_before_anything_is_removed(current_folder: Path) -> None:
    for name in ("A", "B", "D/read", "w/2-extract"):
        run("read", "raw", "--output", name)
    run("split", "A", "--output", "S", "--split", "1,1,1")
    for k in range(2):
        run("read", "raw", "--output", f"M{k}", "--shard", f"{k}/2")
    os.symlink("A", "link")
    before = everything()
    for command, how in AMONG_ITS_INPUTS:
        with pytest.raises(UsageError) as caught:
            main(command)
        assert str(caught.value).startswith(f"--output {command[command.index('--output') + 1]}"), caught.value
        assert f": {how}, which is read; choose a folder beside it" in str(caught.value)
        assert everything() == before


def test_a_stage_that_is_made_again_removes_what_it_lists_and_nothing_else(current_folder: Path) -> None:
    run("read", "raw", "--output", "U")
    run("read", "raw", "--output", "U/other")
    run("split", "U/other", "--output", "U/split", "--split", "1,1,1")
    for name in ("mine/part-00000.jsonl", "train/part-00000.jsonl", "dropped.jsonl", "part-0.jsonl.bak"):
        Path("U", name).parent.mkdir(exist_ok=True)
        Path("U", name).write_text("precious\n")
    before = everything()
    main(["read", "raw", "--output", "U", "--workers", "1", "--shard-bytes", "900"])
    after = everything()
    own = {f"U/part-{k:05d}.jsonl" for k in range(9)} | {"U/stage.json"}
    assert {name: content for name, content in before.items() if name not in own} == {
        name: content for name, content in after.items() if name not in own}
    assert set(before) - set(after) <= own and len(texts_in(Path("U"))) == 60


def test_a_file_of_the_users_is_not_replaced(current_folder: Path) -> None:
    run("read", "raw", "--output", "A")
    for name, command in (("train/part-00001.jsonl", ("split", "A", "--split", "1,0,0", "--output", "S")),
                          ("dropped.jsonl", ("dedup", "A", "--exact-only", "--output", "S")),
                          ("stage.json", ("read", "raw", "--output", "T"))):
        precious = Path(command[-1], name)
        precious.parent.mkdir(parents=True, exist_ok=True)
        precious.write_text('{"mine": 1}\n')
        told = "not the record of a stage; remove" if name == "stage.json" else (
            "was not made by this stage, which would replace it; move it away")
        with pytest.raises(DataError, match=f"^{precious}: {told}"):
            run(*command)
        assert precious.read_text() == '{"mine": 1}\n'
        precious.rename("mine")
        run(*command)
        assert len(texts_in(Path(command[-1]))) == 60


def test_a_stage_killed_at_every_second_point_while_it_takes_the_place_of_another(current_folder: Path) -> None:
    """Nothing is half made, the same command goes on, and a third stage knows what is left as ours."""
    run("read", "raw", "--output", "old")
    run("shuffle", "old", "--output", "new")
    shutil.copytree("old", "out")
    events = in_a_fork(lambda: run("shuffle", "old", "--output", "out"))
    assert events > 20 and contents(Path("out")) == contents(Path("new"))
    for stop in range(1, events + 1, 2):
        for folder in ("out", "third"):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree("old", "out")
        Path("out/mine").mkdir()
        Path("out/mine/part-00000.jsonl").write_text("precious\n")
        assert in_a_fork(lambda: run("shuffle", "old", "--output", "out"), stop) == -1
        assert Path("out/mine/part-00000.jsonl").read_text() == "precious\n"
        shutil.rmtree("out/mine")
        record = read_stage_record(Path("out/stage.json"))
        if record and record.is_complete_in(Path("out")):
            assert contents(Path("out")) in (contents(Path("old")), contents(Path("new"))), stop
        else:
            with pytest.raises(DataError, match="not complete|no file to read|bytes .stage.json., found no file"):
                run("clean", "out", "--output", "next")
        shutil.copytree("out", "third")
        run("shuffle", "old", "--output", "out")
        assert contents(Path("out")) == contents(Path("new")), stop
        main(["read", "raw", "--output", "third", "--workers", "1", "--shard-bytes", "900"])
        assert {*contents(Path("third"))} == {"part-00000.jsonl", "part-00001.jsonl", "stage.json"}, stop


def test_a_merge_takes_what_the_shares_list_and_refuses_a_shard_that_changed(current_folder: Path) -> None:
    shares = [Path("M0"), Path("M1")]
    for k, share in enumerate(shares):
        run("read", "raw", "--output", share, "--shard", f"{k}/2")
    Path("M0/part-00009.jsonl").write_text('{"text": "of nobody"}\n')
    Path("M0/sub").mkdir()
    Path("M0/sub/part-00000.jsonl").write_text('{"text": "of nobody"}\n')
    merge_shares(shares, Path("M"))
    run("read", "raw", "--output", "one")
    assert contents(Path("M")) == contents(Path("one"))
    shard = next(shares[1].glob("part-*"))
    shard.write_bytes(shard.read_bytes().replace(b"document", b"Document"))
    with pytest.raises(DataError, match=f"^{shard}: expected content with the sha256"):
        merge_shares(shares, Path("other"))
    assert not [*Path("other").glob("*.json*")]


# --------------------------------------------------------------------------------------------------- readers of a stage

BYTE = ByteLevelTokenizer()
SPLIT = GlobalStage("split", split.run_split, {"shares": "8,1,1"})


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """Of nine shards."""
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": f"some text {i}"}) + "\n" for i in range(160)))
    run_map_stage(SHOUT, [raw], tmp_path / "stage", run_options=SMALL)
    assert len(shards_of_stage(tmp_path / "stage")) == 9
    return tmp_path / "stage"


def change(shard: Path) -> None:
    """One bit, in a text: the line is JSON as before. The time is as it was. Once more: as it was."""
    times = shard.stat()
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def is_no_longer_complete(folder: Path) -> None:
    (folder / "stage.json").unlink()
    (folder / ".work").mkdir()


READERS: dict[str, Callable[[Path, Path], object]] = {
    "a map stage": lambda stage, out: run_map_stage(SHOUT, [stage], out, run_options=SMALL),
    "with workers": lambda stage, out: run_map_stage(SHOUT, [stage], out, run_options=replace(SMALL, workers=2)),
    "a global stage": lambda stage, out: run_global_stage(REVERSE, [stage], out),
    "tokens of the pipeline": lambda stage, out: tokenize_part(stage, "train", out, BYTE),
    "data.preprocess": lambda stage, out: preprocess(
        ["--input", str(stage), "--output-prefix", str(out), "--tokenizer-type", "byte"]),
    "data.split_json": lambda stage, out: split_json_main(
        [str(stage), "--output-prefix", str(out), "--split", "1,1,1"]),
    "--train-data": lambda stage, out: cached_corpus(str(stage), BYTE, TextReadOptions(), str(out))}
CHECKSUM = r"expected content with the sha256 \w{64} .stage.json., found \w{64}: .* run its command again"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda stage: os.rename(stage / "part-00006.jsonl", stage / "away"),
                           "/part-00006.jsonl: expected .* bytes .stage.json., found no file"),
    "one that is not listed": (lambda stage: shutil.copy(stage / "part-00006.jsonl", stage / "part-0.jsonl"),
                               "/part-0.jsonl: is not one of the shards that stage.json lists; if it is yours"),
    "not complete": (is_no_longer_complete, ": this stage is not complete; run its command again first")}


@pytest.mark.parametrize(("reader", "other_fault"), [*zip(READERS, cycle(FAULTS))])
def test_a_fault_of_a_stage_is_named_by_whoever_reads_it(stage, tmp_path, reader, other_fault):
    change(stage / "part-00006.jsonl")
    with pytest.raises(DataError, match=f"^{stage}/part-00006.jsonl: {CHECKSUM}"):
        READERS[reader](stage, tmp_path / "out")
    assert not list(tmp_path.glob("out.*"))
    change(stage / "part-00006.jsonl")
    READERS[reader](stage, tmp_path / "out")
    make, told = FAULTS[other_fault]
    make(stage)
    with pytest.raises(DataError, match=f"^{stage}{told}"):
        READERS[reader](stage, tmp_path / "out")


def test_the_part_of_a_split_is_read_as_listed(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_global_stage(SPLIT, [stage], Path("S"))
    every = find_text_files(["S"]).files
    assert every == sorted(shard.path for shard in shards_of_stage(Path("S"))) and len(every) > 6
    parts = [find_text_files([f"S/{part}"]).files for part in split.PARTS]
    assert all(parts) and sorted(sum(parts, [])) == every
    for fault, told in ((lambda: shutil.copy(every[0], "S/train/part-00099.jsonl"), "part-00099.jsonl: is not one of"),
                        (lambda: os.rename("S/train/part-00099.jsonl", parts[0][-1] + ".away"), None),
                        (lambda: os.remove(parts[0][-1]), "found no file")):
        fault()
        for given in ("S", "S/train"):
            if told is None:
                find_text_files([given])
                continue
            for read in (find_text_files, lambda given: run_map_stage(SHOUT, given, tmp_path / "out")):
                with pytest.raises(DataError, match=told):
                    read([given])


def test_a_stage_goes_on_with_the_shards_it_has_and_checks_only_what_it_still_reads(stage, tmp_path, monkeypatch):
    run_map_stage(SHOUT, [stage], tmp_path / "whole", run_options=SMALL)
    every = [Path(shard.path).name for shard in shards_of_stage(stage)]
    checked, made = list[str](), list[str]()
    really, original = input_files.sha256_file, runner.run_job
    monkeypatch.setattr(input_files, "sha256_file", lambda path: (checked.append(Path(path).name), really(path))[1])

    def four(job, stage, reading):  # type: ignore[no-untyped-def]
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(job[1].name)
        return original(job, stage, reading)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runner, "run_job", four)
        run_map_stage(SHOUT, [stage], tmp_path / "out", run_options=SMALL)
    assert checked == every
    assert contents(tmp_path / "out") == {}, "nothing is seen before all of it is there"
    with pytest.raises(DataError, match="this stage is not complete"):
        run_map_stage(SHOUT, [tmp_path / "out"], tmp_path / "next")
    checked.clear()
    run_map_stage(SHOUT, [stage], tmp_path / "out", run_options=SMALL)
    assert checked and checked[1:] == every[len(every) - len(checked) + 1:] and len(checked) <= len(every) - 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and not (tmp_path / "out" / ".work").exists()
    checked.clear()
    run_map_stage(SHOUT, [stage], tmp_path / "out", run_options=SMALL)
    assert checked == [], "what is done is not read again"
