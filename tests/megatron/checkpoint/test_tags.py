"""Which tags there are, and every damage found and named. Which one is chosen: test_choice.py."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint import zero_to_fp32
from megatron.checkpoint.manifest import MANIFEST, rank_of_file, read_commit_number
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import complete_manifests, read_tag_manifest, tag_names
from megatron.checkpoint.verify import verify_share, verify_tag
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.made import (Grid, make_signed, save_grid,
                                            save_solo)


def test_tags_are_listed_by_number_and_not_by_spelling(tmp_path: Path) -> None:
    for step in (10, 9, 100, 99):
        save_solo(tmp_path, step)
    assert [manifest.iteration for manifest in complete_manifests(tmp_path)] == [9, 10, 99, 100]


def test_a_tag_of_the_users_own_stands_by_its_iteration(tmp_path: Path) -> None:
    for step, tag in ((5, None), (7, "best.v1"), (6, None)):
        save_solo(tmp_path, step, tag=tag)
    assert tag_names(tmp_path) == ["global_step5", "global_step6", "best.v1"]


@pytest.mark.parametrize("root", ["absent", "empty", "file"])
def test_no_checkpoint_is_an_error_that_names_the_folder(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty" / "not_a_tag").mkdir(parents=True)
    (tmp_path / "empty" / "global_step3").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"no committed checkpoint under {tmp_path / root}"):
        open_checkpoint(tmp_path / root)


@pytest.mark.parametrize("tag", ["../global_step1", "/etc", ".", "..", ".staging-global_step1-solo", "",
                                 "global_step2"])
def test_a_tag_that_is_no_tag_is_refused(tmp_path: Path, tag: str) -> None:
    save_solo(tmp_path, 1)
    with pytest.raises(CheckpointError, match="tag"):
        open_checkpoint(tmp_path, tag)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    for step in (1, 2):
        save_grid(root, Grid(2, 1), step=step)
    return root


def test_a_tag_that_an_earlier_version_signed_is_read_like_any_other(tmp_path: Path) -> None:
    save_grid(tmp_path, Grid(1, 2))
    make_signed(tmp_path, "global_step1")
    assert b',"hmac":"' in (tmp_path / "global_step1" / MANIFEST).read_bytes()
    assert len(verify_tag(tmp_path, "global_step1")) == 6
    assert open_checkpoint(tmp_path).shared_state["scale"] == 2.0
    assert zero_to_fp32.open_tag(tmp_path, "global_step1").output_tensors()
    assert read_commit_number(tmp_path / "global_step1") == 1


FILES = ["rank0.safetensors", "rank1.safetensors", "rank0.json", "rank1.json", "shared.json", "config.json", MANIFEST]


@pytest.fixture
def root(tmp_path: Path, pristine: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "root"))


def check_named(root: Path, name: str) -> None:
    """Verify and open both name the file; the older tag is as good as ever."""
    for attempt in (lambda: verify_tag(root, "global_step2"), lambda: open_checkpoint(root)):
        with pytest.raises(CheckpointError, match=f"tag global_step2: .*{name}"):
            attempt()
    verify_tag(root, "global_step1")


@pytest.mark.parametrize("name", FILES)
def test_flipped_bytes_are_found_anywhere(root: Path, name: str) -> None:
    path = root / "global_step2" / name
    data = path.read_bytes()
    for position in {0, 1, len(data) // 3, len(data) // 2, len(data) - 2, len(data) - 1}:
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1:])
        check_named(root, name)


@pytest.mark.parametrize("name", FILES)
def test_wrong_lengths_are_found(root: Path, name: str) -> None:
    path = root / "global_step2" / name
    data = path.read_bytes()
    for wrong in (b"", data[:1], data[:len(data) // 2], data[:-1], data + b"\0", data * 2):
        path.write_bytes(wrong)
        check_named(root, name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(root: Path, name: str) -> None:
    (root / "global_step2" / name).unlink()
    check_named(root, name)


def test_a_missing_shard_is_named_with_its_rank(root: Path) -> None:
    (root / "global_step2" / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"global_step2: shard file rank1.safetensors \(rank 1 of 2\) missing$"):
        verify_tag(root, "global_step2")


def test_a_file_too_many_is_told(root: Path) -> None:
    (root / "global_step2" / "rank2.safetensors").write_bytes(b"")
    said: list[str] = []
    verify_tag(root, "global_step2", print_line=said.append)
    assert said == ["warning: tag global_step2: not part of this checkpoint, and not read: 'rank2.safetensors'"]


def test_a_file_that_leads_out_of_its_tag_must_still_be_the_file_that_was_saved(root: Path, tmp_path: Path) -> None:
    shard = root / "global_step2" / "rank1.safetensors"
    for target in ("/etc/passwd", "/dev/zero", root / "global_step1" / shard.name, tmp_path):
        shard.unlink()
        shard.symlink_to(target)
        if Path(target).is_file() and Path(target).read_bytes() == (root / "global_step1" / shard.name).read_bytes():
            continue  # the same state in both tags
        check_named(root, shard.name)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(root: Path) -> None:
    unreadable = OSError(errno.EIO, os.strerror(errno.EIO), str(root))
    with mock.patch.object(os, "listdir", side_effect=unreadable), \
            pytest.raises(CheckpointError, match="cannot be read .Input/output error"):
        tag_names(root)
    with mock.patch.object(os, "listdir", side_effect=unreadable), \
            pytest.raises(CheckpointError, match="cannot be read .Input/output error"):
        open_checkpoint(root)


def test_every_rank_looks_at_its_share_of_the_files_alone(tmp_path: Path) -> None:
    """The ranks that load are fewer than, as many as, or more than those that saved."""
    save_grid(tmp_path, Grid(2, 2))
    manifest, folder = read_tag_manifest(tmp_path, "global_step1"), tmp_path / "global_step1"
    for shares in (1, 2, 3, 4, 7):
        found = [set(verify_share(folder, manifest, share, shares)) for share in range(shares)]
        assert sum(map(len, found)) == len(set().union(*found)) == len(os.listdir(folder)) - 1
        for share, files in enumerate(found):
            assert {rank for rank in map(rank_of_file, files)} == set(range(4)[share::shares])
