"""Swap files have no names, and their space is free again when they are closed or their process has ended."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.zero.offload.swap_drive import SwapDrive
from tests.megatron.zero.homes.swap_files import open_swap_files

FLAG = "--offload-optimizer-nvme-path"


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_a_file_has_no_name_and_no_other_user_reads_it(
        has_tmpfile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def without_tmpfile(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *more, **named)

    if not has_tmpfile:  # as on NFS
        monkeypatch.setattr(os, "open", without_tmpfile)
    with SwapDrive(tmp_path, flag=FLAG) as drive:
        descriptor = drive.create_file()
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600 and os.fstat(descriptor).st_nlink == 0
    assert len(open_swap_files(tmp_path)) == 1
    os.close(descriptor)
    assert open_swap_files(tmp_path) == []


def test_a_folder_that_is_not_there_is_the_settings_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{FLAG} {tmp_path}/nowhere: there is no such folder"):
        SwapDrive(tmp_path / "nowhere", flag=FLAG)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{FLAG} {tmp_path}/file: expected a folder, found a file"):
        SwapDrive(tmp_path / "file", flag=FLAG)


@pytest.mark.parametrize("number, remedy", [
    (errno.EACCES, "Permission denied; make it writable, or"), (errno.EROFS, "Read-only file system; make it writable"),
    (errno.ENOSPC, "No space left on device, .* free; free space, or"), (errno.EIO, "Input/output error; check"),
    (errno.EDQUOT, "Disk quota exceeded, .* free; free space, or"), (errno.EPERM, "its file system takes no new")])
def test_a_folder_that_cannot_be_written_is_named_with_its_flag(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)  # root may write anywhere
    with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: cannot write there: {remedy}"):
        SwapDrive(tmp_path, flag=FLAG)


def test_a_file_system_that_keeps_no_files_is_told_as_such() -> None:
    with pytest.raises(StorageError, match=f"{FLAG} /proc: cannot write there: its file system takes no new files; "
                                           "choose a folder on a drive"):
        SwapDrive("/proc", flag=FLAG)
