"""Durable files: staged writes with fsync and rename, checksums, file locks, and the error classes of `data`.

A *staged* file is written under a hidden temporary name and renamed when every byte is on disk, so a killed process
leaves the old file or none. `wait_for_lock` waits for the holder of a lock, `hold_writer_lock` refuses a second writer.
Locks are the kernel's (flock) and end with the process that holds them, so a killed holder blocks no other process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

try:
    from isal.isal_zlib import crc32 as crc32  # same CRC-32 as zlib's, several times faster
except ImportError:
    from zlib import crc32 as crc32

# Errnos of failed writes; other OSErrors inside a `staged_file` block do not concern its file.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE}

READ_BYTES = 1 << 20  # bytes per read, which fit the CPU cache for the checksum


class DataError(Exception):
    """Unusable data (for the user to fix): names file, field, expected and found. Exit code 3."""


# Terminal controls, line ends, bidirectional overrides and surrogates.
_CONTROL = re.compile("[\0-\x08\n-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_to_one_line(text: object, allowed: str = "") -> str:
    """Any text as one line for a terminal or a log: control characters but `allowed` become escapes (`\\x1b`). A line
    of JSON keeps its values."""
    def escaped(found: re.Match[str]) -> str:
        sign = found[0]
        return sign if sign in allowed else f"\\u{ord(sign):04x}" if sign > "~" else ascii(sign)[1:-1]

    return _CONTROL.sub(escaped, str(text))


def parse_error_text(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


class UsageError(DataError):
    """An unusable value of a flag, whatever the data. Exit code 2."""


class StorageFault(OSError):
    """A disk or folder that cannot be written. Exit code 7."""


@contextmanager
def write_errors_for(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError in the block into a StorageFault for `path`; ENOMEM passes through."""
    try:
        yield
    except StorageFault:
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise StorageFault(f"{os.fspath(path)}: cannot write: {error.strerror or error}") from error


@contextmanager
def _prefix_errors(kind: type[Exception], flag: str) -> Iterator[None]:
    """Prefix such an error in the block with the flag that named the path or the data, if it names none."""
    try:
        yield
    except kind as error:
        if not flag or str(error).startswith("--"):
            raise
        raise type(error)(f"{flag}: {error}") from error


prefix_storage_errors, prefix_data_errors = partial(_prefix_errors, StorageFault), partial(_prefix_errors, DataError)


def check_flag_file(path: str | Path, flag: str) -> None:
    """Raise if the path given with `flag` is no file."""
    if not Path(path).is_file():
        raise UsageError(f"{flag} {path}: {'a folder' if Path(path).is_dir() else 'no such file'}; give the path of a "
                         "file that exists")


def read_flag_file(path: str | Path, flag: str) -> bytes:
    """The content of the file given with `flag`."""
    check_flag_file(path, flag)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: cannot read: {error.strerror}") from error


def read_flag_text(path: str | Path, flag: str) -> str:
    try:
        return read_flag_file(path, flag).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: not UTF-8 text ({error})") from error


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Wait until the content of a file (or the entries of a folder) is on disk."""
    with write_errors_for(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Waits until the entries of a folder are on disk: only then does a rename survive a power loss.
fsync_directory = fsync_file


@contextmanager
def staged_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Write a file that appears complete and durable under its name, or not at all. Mode "wb" or "w" (UTF-8). The
    folder must exist. Of concurrent writers the last rename wins. A symbolic link stays, and its target is replaced. A
    pipe or device is written directly."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        with write_errors_for(target):
            stream = open(target, mode, encoding=None if "b" in mode else "utf-8")
        with stream:
            yield stream
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with write_errors_for(target):
        file = open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8")
    try:
        yield file
        with write_errors_for(target):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, target)
            fsync_directory(target.parent)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise StorageFault(f"{target}: cannot write: {error.strerror}") from error
        raise
    finally:
        with suppress(OSError):  # a full disk fails again when the buffer is flushed
            file.close()
        with suppress(FileNotFoundError):  # missing after a successful rename
            os.unlink(temporary)


def write_json_atomic(path: str | os.PathLike[str], value: object) -> None:
    """Write an indented JSON document atomically, keys in the given order."""
    with staged_file(path, "w") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.write("\n")


def read_json_or_none(path: Path) -> Any:
    """The JSON value in a file; None if it is missing or invalid."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in an object store or on a server: s3://bucket/name, hf://datasets/name, ..."""
    return "://" in os.fspath(path) and not os.fspath(path).startswith("file://")


def file_system_of(url: str) -> tuple[Any, str]:
    """(fsspec's file system, path within it)."""
    try:
        from fsspec import url_to_fs
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # fsspec, or what it needs for this kind; or an unknown kind
        raise DataError(f"{url}: {error}; `pip install fsspec s3fs` reads s3://, gcsfs gs://, huggingface_hub hf://"
                        ) from error
    return system, path


def open_binary(path: str | os.PathLike[str]) -> Any:
    """A file or object for reading, unbuffered if it is a file."""
    if not is_url(path):
        return open(path, "rb", buffering=0)
    system, name = file_system_of(os.fspath(path))
    return system.open(name, "rb")


def crc32_file(path: str | os.PathLike[str]) -> str:
    """CRC-32 of a file as 8 hexadecimal digits."""
    crc, buffer = 0, memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = crc32(buffer[:count], crc)
    return f"{crc:08x}"


def content_digest(parts: Iterable[bytes], name: str = "") -> str:
    """16 hexadecimal digits that identify a sequence of byte strings under a name."""
    digest = hashlib.sha256(name.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def change_detector(paths: Iterable[str | os.PathLike[str]]) -> Callable[[], None]:
    """Call it before files are read, and the returned check afterwards: raises DataError if a file's size or time has
    changed, since it may have been incomplete. Pipes are not checked."""
    before = {os.fspath(path): file_stamp(path) for path in paths}

    def check() -> None:
        for path, state in before.items():
            if file_stamp(path) != state:
                raise DataError(f"{path}: changed while it was read; start again when it is complete")

    return check


def file_stamp(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """(inode, size, mtime in ns), which change with the file; None if it is no regular file. Of an object 0, its size
    and what its store says of its content."""
    if is_url(path):
        system, name = file_system_of(os.fspath(path))
        return 0, system.size(name), system.checksum(name)
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else None


def check_outputs_are_not_inputs(inputs: Iterable[str | os.PathLike[str]], outputs: Iterable[str | os.PathLike[str]],
                                 remedy: str = "choose another name for what is written") -> None:
    """Raise if an output is also an input, under any name, symbolic or hard link. Call it before writing."""
    read = {mark: os.fspath(path) for path in inputs for mark in _file_identities(path)}
    for output in outputs:
        path = os.fspath(output)
        for identity in _file_identities(path):
            if identity in read:
                also = "" if path == read[identity] else f", which is {read[identity]}"
                raise UsageError(f"{path}{also}: is read by this command, which would write over it; {remedy}")


def _file_identities(path: str | os.PathLike[str]) -> list[str | tuple[int, int]]:
    """What all names of one file have in common; [] for pipes and terminals, which may be read and written."""
    try:
        status = os.stat(path)
    except OSError:  # it may be created
        return [os.path.realpath(path)]
    return [os.path.realpath(path), (status.st_dev, status.st_ino)] if S_ISREG(status.st_mode) else []


def check_is_file(path: str | os.PathLike[str]) -> None:
    """Raise unless `path` is a regular file, for callers that read it more than once."""
    if os.path.isdir(path):
        raise DataError(f"{os.fspath(path)}: expected a file, found a folder")
    check_is_rereadable(path)


def check_is_rereadable(path: str | os.PathLike[str]) -> None:
    """Raise for a pipe or device. Comes before checks of the name, which do not help with a pipe."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise DataError(f"{os.fspath(path)}: is no file but a pipe or a device, which can be read only once; write "
                        "what comes from it to a file first")


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder and its parents if missing; returns it."""
    with write_errors_for(path):
        os.makedirs(path, exist_ok=True)
    return Path(path)


def is_still_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


class LockResult(Enum):
    """Outcome of an attempt to lock."""

    ACQUIRED = auto()
    HELD_BY_OTHER = auto()
    UNSUPPORTED = auto()  # the file system has no locks; each caller decides what that means for its files


def try_lock(file: IO[Any] | int) -> LockResult:
    """Lock an open file or descriptor without waiting. The lock lasts until all copies of the descriptor are closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockResult.HELD_BY_OTHER
    except OSError:
        return LockResult.UNSUPPORTED
    return LockResult.ACQUIRED


def unlock(file: IO[Any] | int) -> None:
    """Release the lock, even if a forked child still has the descriptor."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def unlock_on_exit(file: IO[Any] | int, remove: Path | None = None) -> Iterator[None]:
    """Unlock at the end of the block, after deleting `remove`; a forked child that leaves the block does neither."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            if remove is not None:  # while still locked: a process that opened it meanwhile sees that it is gone
                with suppress(OSError):
                    os.unlink(remove)
            unlock(file)


class LockFile:
    """A lock file that names its holder.

    `result` says whether it is locked, `holder` who holds it otherwise. Close the file to release it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open or create the file, try to lock it, and write this process's name into it."""
        self.path = Path(path)
        self.holder = ""
        while True:
            # The file is truncated, which must not hit the target of a symbolic link.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            self.file = os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")
            self.result = try_lock(self.file)
            if self.result is LockResult.HELD_BY_OTHER:
                self.file.seek(0)
                self.holder = " ".join(self.file.read(200).split()) or "another process"
            elif self.result is LockResult.ACQUIRED:
                if not is_still_at(self.file.fileno(), self.path):  # a former holder has just deleted it
                    self.file.close()
                    continue
                self.file.truncate(0)
                self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                self.file.flush()
            break


@contextmanager
def wait_for_lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold an advisory lock: one process builds, the others wait. The empty lock file stays."""
    with write_errors_for(path):
        file = open(path, "ab")
    with file, unlock_on_exit(file):
        with write_errors_for(path):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def hold_writer_lock(path: str | os.PathLike[str], name: str | os.PathLike[str] | None = None) -> Iterator[bool]:
    """Exclude other writers of `path`, whose folder may be a link; raises StorageFault, which says `name`. Yields False
    if the file system has no locks."""
    name = os.fspath(name or path)
    folder, base = os.path.split(os.path.abspath(path))
    with write_errors_for(name):
        lock = LockFile(Path(os.path.realpath(folder), f".{base}.writing"))
    with lock.file:
        if lock.result is LockResult.HELD_BY_OTHER:
            raise StorageFault(f"{name}: {lock.holder} is writing under this name now; wait for its end, or choose "
                               "another name")
        with unlock_on_exit(lock.file, remove=lock.path):
            yield lock.result is LockResult.ACQUIRED
