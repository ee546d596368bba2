"""Which tags there are, and which one a load uses: what is named, else what `latest` names, else what was committed
last; after any history. Every damage is found and named."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint import zero_to_fp32
from megatron.checkpoint.commit import clean_up_save_root
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import (PENDING_LATEST, find_tag_of_step, latest_tag, parse_checkpoint_path, tag_names)
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.faults import failing
from tests.megatron.checkpoint.made import Grid, load_candidates, printed, save_grid, save_solo


def opened(root: Path, **options: bool) -> tuple[str, list[str]]:
    """The tag that a resume takes, and what it says."""
    with printed() as lines:
        tag = open_checkpoint(root, **options).tag
    if not options and latest_tag(root) is not None:
        assert zero_to_fp32.open_tag(root)[1]["tag"] == tag, "the script beside the tags takes another"
    elif not options:
        with pytest.raises(zero_to_fp32.DamagedCheckpoint, match="holds no tag|has no usable `latest`; it holds"):
            zero_to_fp32.open_tag(root)
    return tag, lines


# ---- latest decides -------------------------------------------------------------------------------------------------

def test_a_latest_that_names_no_checkpoint_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for step in (1, 2):
        save_solo(tmp_path, step)
    nameless, absent = "which is no name of a tag", "names {}, which is not there"
    for hint, state in ((b"", nameless), (b"global_step77", absent), (b"notes", absent), (b".", nameless),
                        (b"../../etc/passwd", "says '../../etc/passwd', which is no name"), (b"latest", nameless),
                        (b"\xff\x00\x80" * 1000, nameless), (None, "is missing")):
        (tmp_path / "latest").unlink()
        if hint is not None:
            (tmp_path / "latest").write_bytes(hint)
        tag, lines = opened(tmp_path)
        assert tag == "global_step2"
        assert len(lines) == 1 and "\n" not in lines[0]
        assert f"{tmp_path} holds global_step1, global_step2, and the tag saved last is global_step2" in lines[0]
        assert f"{tmp_path}/latest " in lines[0] and state.format((hint or b"").decode("utf-8", "replace")) in lines[0]
        (tmp_path / "latest").touch()


def test_a_latest_that_names_no_tag_is_told_also_where_no_other_can_be_loaded(tmp_path: Path) -> None:
    for step in range(1, 10):
        save_solo(tmp_path, step)
    (tmp_path / "latest").write_text("global_step77\n")
    (tmp_path / "global_step9" / "rank0.safetensors").write_bytes(b"")
    with printed() as lines, pytest.raises(CheckpointError, match="tag global_step9: file rank0.safetensors"):
        open_checkpoint(tmp_path)
    assert lines == [f"warning: {tmp_path}/latest names global_step77, which is not there; {tmp_path} holds "
                     "global_step1, global_step2, 4 more, global_step7, global_step8, global_step9, and the tag saved "
                     "last is global_step9"]
    for tag in tag_names(tmp_path):
        shutil.rmtree(tmp_path / tag)
    with pytest.raises(CheckpointError, match="no committed checkpoint .*latest names global_step77, which is not the"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("tag", ["global_step2", "best"])
def test_a_damaged_latest_is_an_error_unless_falling_back_is_asked_for(tag: str, tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    save_solo(tmp_path, 2, tag=tag)
    (tmp_path / tag / MANIFEST).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"tag {tag}: .*; --resume-fallback takes"):
        open_checkpoint(tmp_path)
    found, lines = opened(tmp_path, fallback=True)
    assert found == "global_step1" and len(lines) == 1 and f"tag {tag}" in lines[0] and "falling back" in lines[0]
    (tmp_path / "global_step1" / "rank0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="tag global_step1: .* rank0.safetensors .*missing"):
        opened(tmp_path, fallback=True)


def test_falling_back_never_goes_forward_into_an_abandoned_branch(tmp_path: Path) -> None:
    """Steps 2, 4, 6, 8; back to 2; 3 and 5 of the new branch, both damaged: 2, not 4 and not 8."""
    for step, after in ((2, None), (4, None), (6, None), (8, None), (3, "global_step2"), (5, None)):
        save_solo(tmp_path, step, after=after)
    for damaged, found in ((5, 3), (3, 2)):
        (tmp_path / f"global_step{damaged}" / "rank0.safetensors").write_bytes(b"")
        assert opened(tmp_path, fallback=True)[0] == f"global_step{found}"
    assert load_candidates(tmp_path) == ["global_step5", "global_step3", "global_step2"]
    shutil.rmtree(tmp_path / "global_step3")
    (tmp_path / "global_step5" / MANIFEST).write_bytes(b"")
    assert load_candidates(tmp_path) == ["global_step5", "global_step2"], "as the part of rank 0 says"
    (tmp_path / "global_step5" / "rank0.json").unlink()  # nothing says, and the steps 6 and 8 are of another branch
    assert load_candidates(tmp_path) == ["global_step5"]
    with pytest.raises(CheckpointError, match="the branch of global_step5 is unknown.*: name the tag to load"):
        opened(tmp_path, fallback=True)
    for step in (6, 8):
        shutil.rmtree(tmp_path / f"global_step{step}")
    assert load_candidates(tmp_path) == ["global_step5", "global_step4", "global_step2"]  # all on one line
    found, lines = opened(tmp_path, fallback=True)
    assert found == "global_step4" and "global_step5 is unknown; it is taken to have continued from" in lines[0]


@pytest.mark.parametrize("name", [MANIFEST, "rank0.safetensors"])
def test_a_damaged_tag_that_was_asked_for_makes_way_for_its_ancestors_alone(name: str, tmp_path: Path) -> None:
    for step in (4, 6, 8):
        save_solo(tmp_path, step)
    save_solo(tmp_path, 6, seed=60, after="global_step4")
    (tmp_path / "global_step8" / name).write_bytes(b"")
    tag, note = find_tag_of_step(tmp_path, 8)
    assert (tag, note) == ("global_step8", None)
    with pytest.raises(CheckpointError, match="tag global_step8: [^;]*$"):
        open_checkpoint(tmp_path, tag)
    with printed() as lines:
        assert open_checkpoint(tmp_path, tag, fallback=True).tag == "global_step4"
    assert len(lines) == 1 and "tag global_step8: " in lines[0] and lines[0].endswith("older tag, global_step4")
    (tmp_path / "global_step4" / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="tag global_step4: .*; no tag is there that it continues from"):
        open_checkpoint(tmp_path, "global_step4", fallback=True)


@pytest.mark.parametrize("step", [4, 5])
def test_a_damaged_newest_save_with_a_name_of_its_own_is_taken_without_latest(step: int, tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        save_solo(tmp_path, number)
    save_solo(tmp_path, step, tag="best")
    (tmp_path / "best" / MANIFEST).write_bytes(b"")
    wanted = ["best", *(f"global_step{number}" for number in (4, 3, 2, 1))]
    assert load_candidates(tmp_path) == wanted
    (tmp_path / "latest").unlink()
    assert load_candidates(tmp_path) == wanted


# ---- the order of commits -------------------------------------------------------------------------------------------

def test_two_tags_of_one_step_are_told_apart_by_time(tmp_path: Path) -> None:
    save_solo(tmp_path, 6, tag="best")
    save_solo(tmp_path, 6)
    save_solo(tmp_path, 7)
    assert find_tag_of_step(tmp_path, 7) == ("global_step7", None)
    tag, note = find_tag_of_step(tmp_path, 6)
    assert tag == "global_step6" and note is not None and "best" in note
    save_solo(tmp_path, 6, seed=1, tag="best")
    assert find_tag_of_step(tmp_path, 6)[0] == "best"
    with pytest.raises(CheckpointError, match="--ckpt-step 5: .* holds best, global_step6, global_step7"):
        find_tag_of_step(tmp_path, 5)


# ---- a kill before `latest` is written ------------------------------------------------------------------------------

def interrupted(root: Path, step: int, seed: int | None = None) -> None:
    """A save that is killed after the tag has its name, before `latest` is written."""
    with mock.patch("megatron.checkpoint.commit._write_latest", side_effect=KeyboardInterrupt), \
            pytest.raises(KeyboardInterrupt):
        save_solo(root, step, seed)


@pytest.mark.parametrize("step", [5, 6, 8, 9])
def test_a_tag_committed_before_the_kill_is_taken_also_when_it_replaces_one(step: int, tmp_path: Path) -> None:
    for earlier in (4, 6, 8):
        save_solo(tmp_path, earlier)
    (tmp_path / "latest").write_text("global_step4\n")
    interrupted(tmp_path, step, seed=50)
    tag, lines = opened(tmp_path)
    assert tag == f"global_step{step}" and len(lines) == 1 and "interrupted" in lines[0]
    shutil.copytree(tmp_path, edited := tmp_path.with_name(f"{tmp_path.name}-edited"))
    (edited / "latest").write_text("global_step8")  # edited after the kill: followed, before and after cleaning
    assert opened(edited) == ("global_step8", [])
    clean_up_save_root(edited)
    assert opened(edited) == ("global_step8", [])
    with printed() as said:
        clean_up_save_root(tmp_path)
    assert (tmp_path / "latest").read_text() == f"global_step{step}\n" and not (tmp_path / PENDING_LATEST).exists()
    assert len(said) == 1 and opened(tmp_path) == (tag, [])


def test_a_pending_file_that_is_none_is_ignored(tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    for content in (b"", b"{}", b"[1]", b'{"tag": "../x", "seal": "00000000", "was": null}', b"\xff"):
        (tmp_path / PENDING_LATEST).write_bytes(content)
        assert opened(tmp_path) == ("global_step1", [])
    save_solo(tmp_path, 2)
    assert not (tmp_path / PENDING_LATEST).exists()


# ---- what the user names --------------------------------------------------------------------------------------------

def test_a_folder_a_tag_of_it_and_a_folder_with_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root in ("s", "s:old", "at:10:30"):
        save_solo(tmp_path / root, 1)
    assert parse_checkpoint_path("s") == (Path("s"), None)
    assert parse_checkpoint_path("s:global_step1") == (Path("s"), "global_step1")
    assert parse_checkpoint_path("s/:global_step1") == (Path("s"), "global_step1")
    assert parse_checkpoint_path("s:old") == (Path("s:old"), None)
    assert parse_checkpoint_path("at:10:30:global_step1") == (Path("at:10:30"), "global_step1")
    assert parse_checkpoint_path("s/global_step1") == (tmp_path / "s", "global_step1")
    assert parse_checkpoint_path("absent:global_step1") == (Path("absent"), "global_step1")
    for word in ("absent", "s:", ":x", "s:a/b", "s:latest", "s:.hidden"):
        assert parse_checkpoint_path(word) == (Path(word), None)


# ---- which tags there are --------------------------------------------------------------------------------------------


def test_no_checkpoint_is_an_error_that_names_the_folder_and_no_tag_one_that_names_the_tag(tmp_path: Path) -> None:
    (tmp_path / "empty" / "not_a_tag").mkdir(parents=True)
    (tmp_path / "empty" / "global_step3").mkdir()
    (tmp_path / "file").write_text("")
    for root in ("absent", "empty", "file"):
        with pytest.raises(CheckpointError, match=f"no committed checkpoint under {tmp_path / root}"):
            open_checkpoint(tmp_path / root)
    save_solo(tmp_path / "s", 1)
    with pytest.raises(CheckpointError, match=f"; did you mean {tmp_path / 's'}\\?$"):
        open_checkpoint(tmp_path)
    for tag in ("../global_step1", "/etc", ".", "..", ".staging-global_step1-solo", "", "global_step2"):
        with pytest.raises(CheckpointError, match="tag"):
            open_checkpoint(tmp_path / "s", tag)


def test_a_file_that_leads_out_of_its_tag_must_still_be_the_file_that_was_saved(tmp_path: Path) -> None:
    for step in (1, 2):
        save_grid(tmp_path, Grid(2, 1), step=step)
    shard = tmp_path / "global_step2" / "rank1.safetensors"
    for target in ("/etc/passwd", "/dev/zero", tmp_path / "global_step1" / shard.name, tmp_path):
        shard.unlink()
        shard.symlink_to(target)
        with pytest.raises(CheckpointError, match=f"tag global_step2: .*{shard.name}"):
            open_checkpoint(tmp_path)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    with failing(tmp_path, errno.EIO, lambda operation, path: True, ["listdir"]):
        for look in (tag_names, open_checkpoint):
            with pytest.raises(CheckpointError, match="cannot be read .Input/output error"):
                look(tmp_path)
