"""Shards that are not what their stage wrote, though they have its size: whoever reads them says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from data import input_files
from data.preprocess import TextReadOptions, build_corpus
from data.sampling import parse_split
from data.sources import cached_corpus
from data.split_json import split_json
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer
from data.webtext import dedup, runner, split
from data.webtext.runner import GlobalStage, StageRunOptions, run_global_stage, run_map_stage
from data.webtext.readers import shards_of_stage
from data.webtext.__main__ import tokenize_part
from tests.data.webtext.stages import REVERSE, SHOUT

SMALL = StageRunOptions(shard_bytes=500)
BYTE = ByteLevelTokenizer()
SPLIT = GlobalStage("split", split.run_split, split.SplitOptions("8,1,1"))
DEDUP = GlobalStage("dedup", dedup.run_dedup, dedup.DedupOptions(), dedup.write_signature_share)


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """Of nine shards."""
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": f"some text {i}"}) + "\n" for i in range(160)))
    run_map_stage(SHOUT, [raw], tmp_path / "stage", run_options=SMALL)
    assert len(shards_of_stage(tmp_path / "stage")) == 9
    return tmp_path / "stage"


def change(shard: Path, place: int = 20) -> None:
    """One bit, in a text: the line is JSON as before. The time is as it was."""
    times = shard.stat()
    content = bytearray(shard.read_bytes())
    content[place] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def refused(shard: Path, action: Callable[[], object]) -> None:
    wanted = r"expected content with the sha256 \w{64} .stage.json., found \w{64}: .* run its command again"
    with pytest.raises(DataError, match=f"^{shard}: {wanted}$"):
        action()


READERS: dict[str, Callable[[Path, Path], object]] = {
    "a map stage": lambda stage, out: run_map_stage(SHOUT, [stage], out, run_options=SMALL),
    "with workers": lambda stage, out: run_map_stage(SHOUT, [stage], out, run_options=replace(SMALL, workers=2)),
    "a global stage": lambda stage, out: run_global_stage(REVERSE, [stage], out),
    "a share of one": lambda stage, out: run_global_stage(SPLIT, [stage], out, replace(SMALL, shard=(0, 2))),
    "a share that is prepared": lambda stage, out: run_global_stage(DEDUP, [stage], out, replace(SMALL, shard=(1, 2))),
    "tokens of the pipeline": lambda stage, out: tokenize_part(stage, "train", out, BYTE, 1),
    "data.preprocess, a folder": lambda stage, out: build_corpus(sorted(stage.glob("part-*")), out, BYTE),
    "data.preprocess, a file": lambda stage, out: build_corpus([stage / "part-00006.jsonl"], out, BYTE),
    "data.split_json": lambda stage, out: split_json([str(stage / "part-00006.jsonl")], str(out), parse_split("1,1,1")),
    "--train-data": lambda stage, out: cached_corpus(str(stage), BYTE, TextReadOptions(), str(out))}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_shard_with_one_other_bit_is_refused_by_whoever_reads_it(
        stage: Path, tmp_path: Path, reader: Callable[[Path, Path], object]) -> None:
    change(stage / "part-00006.jsonl")
    refused(stage / "part-00006.jsonl", lambda: reader(stage, tmp_path / "out"))
    change(stage / "part-00006.jsonl")  # as it was
    reader(stage, tmp_path / "out")


def test_the_parts_of_a_split_are_checked_wherever_they_are_named(stage: Path, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    run_global_stage(SPLIT, [stage], tmp_path / "split")
    shard = next((tmp_path / "split" / "train").iterdir())
    change(shard)
    refused(shard, lambda: build_corpus([shard], tmp_path / "c", BYTE))
    monkeypatch.chdir(shard.parent)
    with pytest.raises(DataError, match=f"^{shard.name}: expected content"):
        build_corpus([shard.name], tmp_path / "c", BYTE)
    refused(shard, lambda: tokenize_part(tmp_path / "split", "train", tmp_path / "c", BYTE, 1))
    assert not list(tmp_path.glob("c.*"))


def test_only_what_is_still_to_be_read_is_checked(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    really, original, made = input_files.sha256_file, runner.run_job, list[str]()
    monkeypatch.setattr(input_files, "sha256_file", lambda path: (read.append(Path(path).name), really(path))[1])

    def four(job, stage, reading):  # type: ignore[no-untyped-def]
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(job[1].name)
        return original(job, stage, reading)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runner, "run_job", four)
        run_map_stage(SHOUT, [stage], tmp_path / "out", run_options=SMALL)
    every = [Path(shard.path).name for shard in shards_of_stage(stage)]
    assert read == every
    read.clear()
    run_map_stage(SHOUT, [stage], tmp_path / "out", run_options=SMALL)
    assert read and read[1:] == every[len(every) - len(read) + 1:] and len(read) <= len(every) - 3
    read.clear()
    run_map_stage(SHOUT, [stage], tmp_path / "out", run_options=SMALL)
    assert read == [], "what is done is not read again"
