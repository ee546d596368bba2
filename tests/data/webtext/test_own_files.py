"""A stage replaces and removes its own files alone, whatever is named: what it reads, other stages and the user's files
stay. And whoever reads the folder of a stage reads the shards that its record lists: all of them, and no others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data import split_json
from data.input_files import find_text_files
from data.preprocess import TextReadOptions, main as preprocess
from data.sources import cached_corpus
from data.storage import DataError, UsageError
from data.tokenizer import ByteLevelTokenizer
from data.webtext.__main__ import main
from data.webtext.runner import run_global_stage
from data.webtext.readers import shards_of_stage
from data.webtext.stage_folder import merge_shares, remove_stage
from tests.data.webtext.killing import in_a_fork
from tests.data.webtext.stages import REVERSE
from tests.data.webtext.test_runner import contents, texts_in

BYTE = ["--tokenizer-type", "ByteLevelTokenizer"]


def stage(command: str, *words: object) -> None:
    main([command, *map(str, words), "--workers", "1", "--shard-bytes", "400"])


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    Path("raw/a.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)))
    return Path("raw")


def everything() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*"))
            if path.is_file() and path.name != ".lock"}


AMONG_ITS_INPUTS: dict[str, tuple[list[str], str]] = {
    "a stage into itself": (["shuffle", "A", "--output", "A"], "is A"),
    "by a link": (["clean", "link", "--output", "A"], "is link"),
    "a folder of files into itself": (["read", "raw", "--output", "raw"], "is raw"),
    "inside of a folder of files": (["read", "raw", "--output", "raw/out"], "lies in raw"),
    "around a stage": (["shuffle", "D/read", "--output", "D", "--seed", "3"], "holds D/read"),
    "around a shard of a split": (["read", "S/train/part-00000.jsonl", "--output", "S"],
                                  "holds S/train/part-00000.jsonl"),
    "around evaluation text": (["decontaminate", "A", "--output", "B", "--evaluation", "B/part-00000.jsonl"],
                               "holds B/part-00000.jsonl"),
    "a merge into a share": (["merge", "M0", "M1", "--output", "M0"], "is M0"),
    "a run inside of its input": (["run", "raw", "--output", "raw"], "lies in raw")}


@pytest.mark.parametrize("command, how", AMONG_ITS_INPUTS.values(), ids=AMONG_ITS_INPUTS)
def test_a_stage_among_what_it_reads_is_refused_before_anything_is_removed(raw: Path, command: list[str], how: str
                                                                           ) -> None:
    for name in ("A", "B", "D/read", "w/2-extract"):
        stage("read", "raw", "--output", name)
    stage("split", "A", "--output", "S", "--split", "1,1,1")
    for k in range(2):
        stage("read", "raw", "--output", f"M{k}", "--shard", f"{k}/2")
    os.symlink("A", "link")
    before = everything()
    with pytest.raises(UsageError) as caught:
        main(command)
    assert str(caught.value).startswith(f"--output {command[command.index('--output') + 1]}"), caught.value
    assert f": {how}, which is read; choose a folder beside it" in str(caught.value)
    assert everything() == before


def test_a_stage_that_is_made_again_removes_what_it_lists_and_nothing_else(raw: Path) -> None:
    stage("read", "raw", "--output", "U")
    stage("read", "raw", "--output", "U/other")
    stage("split", "U/other", "--output", "U/split", "--split", "1,1,1")
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


def test_a_log_goes_with_its_stage(raw: Path) -> None:
    stage("read", "raw", "--output", "A")
    stage("dedup", "A", "--output", "D", "--exact-only")
    assert Path("D/dropped.jsonl").exists()
    stage("shuffle", "A", "--output", "D")
    assert not Path("D/dropped.jsonl").exists()


@pytest.mark.parametrize("name", ["train/part-00001.jsonl", "dropped.jsonl"])
def test_a_file_of_the_users_is_not_replaced(raw: Path, name: str) -> None:
    stage("read", "raw", "--output", "A")
    Path("S", name).parent.mkdir(parents=True)
    Path("S", name).write_text("precious\n")
    command = ("split", "A", "--split", "1,0,0") if "/" in name else ("dedup", "A", "--exact-only")
    with pytest.raises(DataError, match=f"S/{name}: was not made by this stage, which would replace it; move it away"):
        stage(*command, "--output", "S")
    assert Path("S", name).read_text() == "precious\n"
    Path("S", name).rename("mine")
    stage(*command, "--output", "S")
    assert len(texts_in(Path("S"))) == 60


def test_a_record_that_is_none_is_not_replaced(raw: Path) -> None:
    Path("S").mkdir()
    Path("S/stage.json").write_text('{"mine": 1}')
    with pytest.raises(DataError, match="^S/stage.json: not the record of a stage; remove that folder, or choose"):
        stage("read", "raw", "--output", "S")
    assert Path("S/stage.json").read_text() == '{"mine": 1}'


def test_names_of_a_record_that_lead_elsewhere_are_not_followed(raw: Path) -> None:
    stage("read", "raw", "--output", "A")
    record = json.loads(Path("A/stage.json").read_text())
    for name in ("../raw/a.jsonl", "../part-00000.jsonl", str(Path("part-00000.jsonl").absolute()), "./a/../a.jsonl"):
        record["outputs"].append(record["outputs"][0] | {"name": name})
    Path("A/stage.json").write_text(json.dumps(record))
    Path("part-00000.jsonl").write_text("precious\n")
    remove_stage(Path("A"))
    assert [*everything()] == ["part-00000.jsonl", "raw/a.jsonl"]


def test_what_a_kill_left_half_moved_or_half_removed_is_known_as_ours(raw: Path) -> None:
    """Of the stage before and of the one in its place, by a third one."""
    stage("read", "raw", "--output", "old")
    events = in_a_fork(lambda: (shutil.copytree("old", "out"), stage("shuffle", "old", "--output", "out")))
    for stop in range(1, events + 1):
        shutil.rmtree("out")
        shutil.copytree("old", "out")
        Path("out/mine").mkdir()
        Path("out/mine/part-00000.jsonl").write_text("precious\n")
        if in_a_fork(lambda: stage("shuffle", "old", "--output", "out"), stop) != -1:
            break
        main(["read", "raw", "--output", "out", "--workers", "1", "--shard-bytes", "900"])
        assert Path("out/mine/part-00000.jsonl").read_text() == "precious\n"
        shutil.rmtree("out/mine")
        assert {*contents(Path("out"))} == {"part-00000.jsonl", "part-00001.jsonl", "stage.json"}, stop
    assert stop > 20


# -------------------------------------------------------------------------------------------------------- merge

def shares(count: int = 2) -> list[Path]:
    for k in range(count):
        stage("read", "raw", "--output", f"M{k}", "--shard", f"{k}/{count}")
    return [Path(f"M{k}") for k in range(count)]


def test_a_merge_takes_what_the_shares_list(raw: Path) -> None:
    parts = shares()
    Path("M0/part-00009.jsonl").write_text('{"text": "of nobody"}\n')
    Path("M0/sub").mkdir()
    Path("M0/sub/part-00000.jsonl").write_text('{"text": "of nobody"}\n')
    merge_shares(parts, Path("M"))
    stage("read", "raw", "--output", "one")
    assert contents(Path("M")) == contents(Path("one"))


def test_a_share_with_a_changed_shard_is_not_merged(raw: Path) -> None:
    parts = shares()
    shard = next(parts[1].glob("part-*"))
    shard.write_bytes(shard.read_bytes().replace(b"document", b"Document"))
    with pytest.raises(DataError, match=f"^{shard}: expected content with the sha256"):
        merge_shares(parts, Path("M"))
    assert not [*Path("M").glob("*.json*")]


# ------------------------------------------------------------------------------------------------------ readers

READERS: dict[str, Callable[[str], object]] = {
    "data.preprocess": lambda name: preprocess(["--input", name, "--output-prefix", "c", *BYTE]),
    "data.split_json": lambda name: split_json.main([name, "--output-prefix", "c", "--split", "1,0,0"]),
    "--train-data": lambda name: cached_corpus(name, ByteLevelTokenizer(), TextReadOptions(), "cache"),
    "a map stage": lambda name: stage("clean", name, "--output", "out", "--min-tokens", "1"),
    "a global stage": lambda name: run_global_stage(REVERSE, [name], Path("out"))}


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request: pytest.FixtureRequest) -> Callable[[str], object]:
    found: Callable[[str], object] = request.param
    return found


def test_a_shard_that_is_missing_is_named_by_whoever_reads_the_stage(raw: Path, reader: Callable[[str], object]
                                                                     ) -> None:
    stage("read", "raw", "--output", "S")
    Path("S/part-00002.jsonl").rename("away")
    with pytest.raises(DataError, match="^S/part-00002.jsonl: expected .* bytes .stage.json., found no file"):
        reader("S")
    assert not list(Path().glob("c.*"))


@pytest.mark.parametrize("name", ["part-00077.jsonl", "part-0.jsonl"])
def test_a_shard_that_no_record_lists_is_named_by_whoever_reads_the_stage(raw: Path, reader: Callable[[str], object],
                                                                          name: str) -> None:
    stage("read", "raw", "--output", "S")
    shutil.copy("raw/a.jsonl", f"S/{name}")
    with pytest.raises(DataError, match=f"^S/{name}: is not one of the shards that stage.json lists; if it is yours"):
        reader("S")


def test_a_stage_that_is_not_complete_is_refused_by_whoever_reads_it(raw: Path, reader: Callable[[str], object]
                                                                     ) -> None:
    stage("read", "raw", "--output", "S")
    Path("S/stage.json").unlink()
    Path("S/.work").mkdir()
    with pytest.raises(DataError, match="^S: this stage is not complete; run its command again first"):
        reader("S")


def test_the_part_of_a_split_is_read_as_listed(raw: Path) -> None:
    stage("read", "raw", "--output", "A")
    stage("split", "A", "--output", "S", "--split", "1,1,1")
    every = find_text_files(["S"]).files
    assert every == sorted(shard.path for shard in shards_of_stage(Path("S"))) and len(every) > 6
    assert find_text_files(["S/train"]).files == [path for path in every if path.startswith("S/train/")]
    shard = find_text_files(["S/train"]).files[-1]
    for action, told in ((lambda: shutil.copy(shard, "S/train/part-00099.jsonl"), "part-00099.jsonl: is not one of"),
                         (lambda: os.remove("S/train/part-00099.jsonl"), None),
                         (lambda: os.remove(shard), "found no file")):
        action()
        for given in ("S", "S/train"):
            if told is None:
                find_text_files([given])
            else:
                with pytest.raises(DataError, match=told):
                    find_text_files([given])
            if told is not None:
                with pytest.raises(DataError, match=told):
                    stage("clean", given, "--output", "out")
    assert find_text_files(["S/valid"]).files
