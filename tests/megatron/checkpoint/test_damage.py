"""Any damage of a tag is refused by everything that reads it, and a load names the file; a clean tag never is. Files of
one tag belong together: what is of another save, step, run, rank or layout is refused, with checksums that fit too."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import cli, zero_to_fp32
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import digest_lines, open_checkpoint
from megatron.checkpoint.verify import verify_tag
from megatron.errors import EXIT_CHECKPOINT, CheckpointError, ConfigError
from mpu.groups import build
from tests.distributed import run_ranks
from tests.megatron.checkpoint.made import Grid, open_quietly, redigest, reseal, rewrite, save_grid, set_header

TAG = "global_step10"
GRID = Grid(2, 2)
FILES = (MANIFEST, "shared.json", "config.json", *(f"rank{k}.json" for k in range(4)),
         *(f"rank{k}.safetensors" for k in range(4)))


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our tag, and others that something of it may be exchanged with."""
    base = tmp_path_factory.mktemp("tags")
    save_grid(base / "ours", GRID, step=10)
    save_grid(base / "another save", GRID, step=10, seed=1)
    save_grid(base / "another step", GRID, step=5, seed=1)
    save_grid(base / "another run", GRID, step=10, run="other", config={"hidden": 9})
    save_grid(base / "another layout", Grid(1, 4), step=10)
    return {name: next((base / name).glob("global_step*")) for name in
            ("ours", "another save", "another step", "another run", "another layout")}


def mixes() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(where from, [(file there, its name here)])."""
    for other in ("another save", "another step", "another run", "another layout"):
        for name in FILES:
            yield other, [(name, name)]
        for pair in combinations(FILES, 2):
            if any(name in pair for name in (MANIFEST, "shared.json", "rank1.json")):
                yield other, [(name, name) for name in pair]
        for rank in range(4):
            yield other, [(name, name) for name in FILES if name.startswith(f"rank{rank}.")]
            yield other, [(name, name) for name in FILES if not name.startswith(f"rank{rank}.")]
    for a, b in combinations(range(4), 2):
        for end in (".json", ".safetensors"):
            yield "ours", [(f"rank{a}{end}", f"rank{b}{end}")]
        yield "ours", [(f"rank{a}{end}", f"rank{b}{end}") for end in (".json", ".safetensors")]


MIXES = list(mixes())


def exported(root: Path) -> None:
    for entry in zero_to_fp32.output_tensors(*zero_to_fp32.open_tag(root, TAG)):
        entry.load()


READERS: dict[str, Callable[[Path], Any]] = {
    "verify": lambda root: verify_tag(root, TAG), "load": lambda root: open_checkpoint(root, TAG).shared_state,
    "digest": lambda root: list(digest_lines(open_checkpoint(root, TAG))), "zero_to_fp32": exported}


def accepted(root: Path) -> list[str]:
    """The readers that find nothing wrong."""
    found = []
    for name, read in READERS.items():
        try:
            read(root)
            found.append(name)
        except (CheckpointError, zero_to_fp32.DamagedCheckpoint):
            pass
    return found


@pytest.mark.parametrize("sums", ["as copied", "made to fit"])
def test_no_mix_is_accepted(sums: str, tags: dict[str, Path], tmp_path: Path) -> None:
    tried = 0
    for other, files in MIXES:
        folder = tmp_path / TAG
        shutil.copytree(tags["ours"], folder)
        for theirs, here in files:
            shutil.copy(tags[other] / theirs, folder / here)
        if any((folder / here).read_bytes() != (tags["ours"] / here).read_bytes() for _, here in files):
            if sums == "made to fit":
                reseal(folder)
            found = accepted(tmp_path)
            if {here for _, here in files} == {"config.json"}:  # for people: the script does not read it
                found = [name for name in found if name != "zero_to_fp32"]
            assert found == [], (other, files)
            tried += 1
        shutil.rmtree(folder)
    assert tried >= 150, tried


def test_the_tag_itself_is_accepted(tags: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tags["ours"], tmp_path / TAG)
    reseal(tmp_path / TAG)
    assert accepted(tmp_path) == list(READERS)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "step": lambda body: body.update(iteration=11), "tag": lambda body: body.update(tag="global_step11"),
    "run": lambda body: body.update(run_id="other"), "layout": lambda body: body.update(layout={"tp": 1, "dp": 4}),
    "stage": lambda body: body["layout"].update(zero_stage=3),
    "configuration": lambda body: body["config"].update(hidden=9),
    "a tensor": lambda body: body["tensors"][0].update(name="other"), "format": lambda body: body.update(format=3),
    "save": lambda body: body.update(save_id="x" + body["save_id"][1:]),
    "save and digest": lambda body: (body.update(iteration=11), redigest(body)),
    "downgrade": lambda body: body.update(format=3, save_id=body["save_id"].partition("-")[0])}


@pytest.mark.parametrize("what", CHANGES)
def test_a_manifest_that_says_something_else_is_of_another_checkpoint(what: str, tags: dict[str, Path],
                                                                      tmp_path: Path) -> None:
    shutil.copytree(tags["ours"], tmp_path / TAG)
    rewrite(tmp_path / TAG / MANIFEST, CHANGES[what])
    assert accepted(tmp_path) == []


@pytest.mark.parametrize("change", [
    lambda header: header.pop("__metadata__") and None, lambda header: header.update(__metadata__={}),
    lambda header: header["__metadata__"].pop("save_id") and None,
    lambda header: header["__metadata__"].update(rank="1"), lambda header: header["__metadata__"].update(rank=0.0),
    lambda header: header["__metadata__"].update(more="x")],
    ids=["none", "empty", "no save", "rank", "number", "more"])
def test_a_file_of_tensors_that_does_not_say_whose_it_is_is_refused(
        change: Callable[[dict[str, Any]], Any], tags: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tags["ours"], tmp_path / TAG)
    set_header(tmp_path / TAG / "rank0.safetensors", change)
    reseal(tmp_path / TAG)
    assert set(accepted(tmp_path)) <= {"zero_to_fp32"}  # which ignores what it does not know
    with pytest.raises(CheckpointError, match="rank0.safetensors: "):
        verify_tag(tmp_path, TAG)


def test_the_error_says_what_is_of_what(tags: dict[str, Path], tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tags["ours"], tmp_path / TAG)
    shutil.copy(tags["another step"] / "shared.json", tmp_path / TAG)
    reseal(tmp_path / TAG)
    assert cli.main(["verify", str(tmp_path)]) == EXIT_CHECKPOINT
    said = capsys.readouterr().err
    assert said.startswith(f"error: tag {TAG}: file shared.json: is of another checkpoint: save_id expected ")


def opened_in_its_own_folder(rank: int, world_size: int, folders: list[str]) -> str:
    try:
        open_checkpoint(folders[rank], world=build().world)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_find_other_checkpoints_under_one_name_load_none(tmp_path: Path) -> None:
    """Each node with a disk of its own, and an older copy, or another run's, on one of them."""
    for name in ("a", "b"):
        save_grid(tmp_path / name, Grid(1, 2))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    a, b, copy = (str(tmp_path / name) for name in ("a", "b", "copy"))
    assert run_ranks(opened_in_its_own_folder, 2, [a, copy]) == ["", ""]
    first, second = run_ranks(opened_in_its_own_folder, 2, [a, b])
    assert first == second and first.startswith("the ranks find different checkpoints: tag global_step")


# ---- damaged bytes ---------------------------------------------------------------------------------------------------

def refusal(root: Path) -> str:
    """What the open that a resume begins with, and `verify`, say; so nothing of a damaged tag reaches a model."""
    with pytest.raises(CheckpointError, match=f"^tag {TAG}: ") as caught:
        open_quietly(root)
    with pytest.raises(CheckpointError, match=re.escape(str(caught.value))):
        verify_tag(root, TAG)
    return str(caught.value)


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "flipped": flip, "truncated": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "lengthened": lambda path, draw: path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 100))),
    "missing": lambda path, draw: path.unlink()}


@pytest.mark.parametrize(("damage", "times"), [("flipped", 1000), ("truncated", 60), ("lengthened", 60),
                                               ("missing", 30)])
def test_a_damaged_file_is_refused_and_named(damage: str, times: int, tags: dict[str, Path], tmp_path: Path) -> None:
    root, draw = tmp_path / "s", random.Random(1)
    shutil.copytree(tags["ours"].parent, root)
    files = {path: path.read_bytes() for path in sorted((root / TAG).iterdir())}
    for path in draw.choices(list(files), k=times):
        DAMAGES[damage](path, draw)
        assert path.name in refusal(root), path
        path.write_bytes(files[path])
    assert open_quietly(root).tag == TAG
