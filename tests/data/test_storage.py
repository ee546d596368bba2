"""Staged files: whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import zlib
from pathlib import Path

import pytest

from data.sources import open_datasets
from data.storage import (DataError, StorageFault, crc32_file, make_folder, prefix_storage_errors, staged_file,
                          wait_for_lock, write_json_atomic)
from data.tokenizer import ByteLevelTokenizer


def test_a_staged_file_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with staged_file(target) as file:
        file.write(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(KeyError), staged_file(target, "w") as file:
        file.write("half of the new")
        raise KeyError
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_a_storage_fault_naming_the_target(tmp_path: Path) -> None:
    with pytest.raises(StorageFault, match=r"file: cannot write: No space left"), staged_file(tmp_path / "file"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_at_the_last_flush_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFault), staged_file(tmp_path / "file") as file:
        file.write(b"x")
    assert os.listdir(tmp_path) == []


def test_an_input_that_cannot_be_read_is_no_fault_of_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staged_file(tmp_path / "file"):
        open(tmp_path / "missing")


def test_a_missing_folder_is_a_storage_fault(tmp_path: Path) -> None:
    with pytest.raises(StorageFault, match="cannot write"), staged_file(tmp_path / "missing" / "file"):
        pass
    (tmp_path / "plain").write_text("")
    with pytest.raises(StorageFault, match="plain"):
        make_folder(tmp_path / "plain" / "folder")


def test_crc32_is_that_of_the_whole_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000  # more than one chunk
    (tmp_path / "file").write_bytes(content)
    assert crc32_file(tmp_path / "file") == f"{zlib.crc32(content):08x}"


def test_json_refuses_what_json_cannot_say(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a.json", {"b": 1, "a": [None, "ü"]})
    with pytest.raises(ValueError):
        write_json_atomic(tmp_path / "b.json", float("nan"))
    assert os.listdir(tmp_path) == ["a.json"]


def test_data_errors_and_storage_faults_stay_apart() -> None:
    assert not issubclass(DataError, StorageFault) and not issubclass(StorageFault, DataError)


def test_a_link_stays_one_and_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    with staged_file(tmp_path / "link", "w") as file:
        file.write("after")
        assert (tmp_path / "real").read_text() == "before"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"
    (tmp_path / "new").symlink_to("absent")
    with staged_file(tmp_path / "new", "w") as file:
        file.write("made")
    assert (tmp_path / "new").is_symlink() and (tmp_path / "absent").read_text() == "made"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with staged_file(tmp_path / "pipe") as stream:
        stream.write(b"words")
    assert os.read(reader, 10) == b"words" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["absent", "link", "new", "pipe", "real"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_cache_that_cannot_be_written_is_named_with_its_flag(call: str, number: int, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "text.jsonl", tmp_path / "cache"
    source.write_text('{"text": "some words of a text"}\n' * 9)

    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    beside = f"the cache beside {source}, which a folder given with --data-cache-path replaces: "
    for given, begins in ((cache, "--data-cache-path: "), (None, beside)):
        with pytest.raises(StorageFault) as caught:
            open_datasets(train_data=[str(source)], split="1,0,0", seq_length=4, seed=1,
                          tokenizer=ByteLevelTokenizer(), cache_path=given and str(given))
        folder = given or f"{source}.cache"
        assert str(caught.value).startswith(f"{begins}{folder}/"), caught.value
        assert str(caught.value).endswith(f": cannot write: {os.strerror(number)}")


def test_lack_of_memory_is_no_fault_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as caught, prefix_storage_errors("--output"), staged_file(tmp_path / "x") as file:
        file.write(b"x")
    assert not isinstance(caught.value, StorageFault) and caught.value.errno == errno.ENOMEM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leaves", [False, True])
def test_a_lock_is_that_of_the_block_and_not_of_a_forked_child(leaves: bool, tmp_path: Path) -> None:
    """One that lives on does not keep it, and one that ends its copy of the block does not let it go."""
    def is_free() -> bool:
        with open(tmp_path / "lock", "ab") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    block, (ours, theirs) = wait_for_lock(tmp_path / "lock"), os.pipe()
    with block:
        if (child := os.fork()) == 0:
            if leaves:
                block.__exit__(None, None, None)
            os.close(theirs)
            os.read(ours, 1)  # until the test is over, or at once
            os._exit(0)
        if leaves:
            os.close(theirs)
            os.waitpid(child, 0)
        assert not is_free()
    assert is_free()
    if not leaves:
        os.close(theirs)
        os.waitpid(child, 0)
    os.close(ours)
