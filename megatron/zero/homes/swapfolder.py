"""The folder of one rank on a drive: its own while it lives, gone when it ends.

    <nvme_path>/<run>-rank<k>       0700; locked by the process that uses it, with files `*.tiles` of 0600
    <nvme_path>/<run>-rank<k>-2     where another process has the first: two jobs in one nvme_path never meet

A lock (flock) goes with its process. So a folder whose lock is free was left by a killed one: the next start of the
same name empties it and moves in. What other runs left is told of (`tidy`) and stays. Nothing is followed or deleted
that only stands in the place of our folders: a symbolic link, a file, a folder with other content.

A process that ends by itself closes what it holds: by atexit, and as a forked child of `multiprocessing`, which runs no
atexit, by what that has instead. One that ends by `os._exit` calls `close_all` before.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Self, final

from megatron.errors import ConfigError, StorageError
from megatron.zero.homes.lanes import Lanes
from megatron.zero.homes.words import in_bytes, refusal

SUFFIX = ".tiles"

PATIENCE = 2.0
"""Seconds that closing waits for a system call under way."""

Say = Callable[[str], None]
Stop = Callable[[float], bool]
"""Seconds to wait at most -> whether that was enough."""


def say_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(eq=False)
class _Hold:
    """What has to be undone: apart from its `SwapFolder`, which may be gone by then."""

    path: Path
    descriptor: int
    """Of the folder. The lock is its."""
    leaving: bool = False
    stops: list[Stop] = field(default_factory=list)
    lanes: dict[tuple[int, int], Lanes] = field(default_factory=dict)

    def leave(self) -> None:
        if self.descriptor < 0:  # left, or a forked child's copy
            return
        _HOLDS.discard(self)
        self.leaving = True
        patience = PATIENCE
        for stop in (*self.stops, *(lanes.stop for lanes in self.lanes.values())):
            patience = patience if stop(patience) else 0.0
        with suppress(OSError, StorageError):
            _empty(self.descriptor, self.path)
            os.rmdir(self.path)
        os.close(self.descriptor)
        self.descriptor = -1


_HOLDS: weakref.WeakSet[_Hold] = weakref.WeakSet()
"""Of the process, as its locks are."""


def _forget() -> None:
    """A forked child that outlives us must not hold our lock."""
    for hold in _HOLDS:
        os.close(hold.descriptor)
        hold.descriptor = -1
    _HOLDS.clear()


os.register_at_fork(after_in_child=_forget)


@final
class SwapFolder:
    def __init__(self, nvme_path: str | os.PathLike[str], run: str, rank: int, *, flag: str) -> None:
        """`run` names the run, and again the next start of it; `flag` is the setting that gave `nvme_path`."""
        assert re.fullmatch(r"[\w.-]+", run), run
        self.flag = flag
        self.path, descriptor = _first_free(usable(nvme_path, flag), f"{run}-rank{rank}", flag)
        self._owner = os.getpid()
        self._hold = _Hold(self.path, descriptor)
        try:
            _empty(descriptor, self.path)
            os.fchmod(descriptor, 0o700)
        except BaseException:
            os.close(descriptor)
            raise
        _HOLDS.add(self._hold)
        _close_with_the_process()
        self.close = weakref.finalize(self, self._hold.leave)
        """Removes folder and files. Called again, at the end of the process or with the object's, does nothing."""

    def create(self, name: str) -> int:
        """The descriptor of a new file `name`.tiles. Raises OSError."""
        return os.open(name + SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
                       dir_fd=self._hold.descriptor)

    def lanes(self, slots: int, beside: int) -> Lanes:
        """The threads of all files that want so many."""
        return self._hold.lanes.setdefault((slots, beside), Lanes(slots, beside))

    def check_ours(self) -> None:
        """A forked process has neither the threads, nor the memory, nor the lock."""
        if os.getpid() != self._owner:
            raise ConfigError(f"{self.path} belongs to process {self._owner}, and this is a fork of it "
                              f"({os.getpid()}): what an engine keeps on a drive can be used only in the process that "
                              "made the engine; use it there, not in a fork or a worker of a data loader")

    @property
    def leaving(self) -> bool:
        """Its files are about to be removed."""
        return self._hold.leaving

    def before_it_goes(self, stop: Stop) -> None:
        """Ends what uses the files. `stop` must not refer to this object."""
        self._hold.stops.append(stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def close_all() -> None:
    """Every folder of this process goes: for ends that run no atexit."""
    for hold in list(_HOLDS):
        hold.leave()


_CLOSING: set[int] = set()
"""Processes that are to do so where `multiprocessing` ends them: this one, and those it was forked from."""


def _close_with_the_process() -> None:
    if os.getpid() not in _CLOSING:
        _CLOSING.add(os.getpid())
        Finalize(None, close_all, exitpriority=0)


def usable(nvme_path: str | os.PathLike[str], flag: str) -> Path:
    """The folder, which must exist: making it would hide a drive that is not mounted."""
    path = Path(nvme_path)
    if not os.path.exists(path):
        raise ConfigError(f"{flag} {path}: there is no such folder; create it on the drive, or name one that exists")
    if not os.path.isdir(path):
        raise ConfigError(f"{flag} {path}: expected a folder, found a file")
    return path.resolve()


def tidy(nvme_path: str | os.PathLike[str], run: str, ranks: Container[int], say: Say = say_stderr) -> None:
    """Once a node: remove what earlier, killed starts of this run left under names that none of this node's `ranks`
    takes over, and tell of what other runs left."""
    left: dict[str, int] = {}
    for path, owner, rank, again in _named_like_ours(Path(nvme_path)):
        descriptor = None if owner == run and rank in ranks and not again else _take(path, fresh=False)
        if descriptor is not None:
            with suppress(OSError, StorageError):
                if owner == run:
                    _empty(descriptor, path)
                    os.rmdir(path)
                elif size := _size(descriptor, path):
                    left[path.name] = size
            os.close(descriptor)
    if left:
        names = sorted(left)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(f"warning: {nvme_path}: {in_bytes(sum(left.values()))} are left of other runs that have ended: "
            f"{', '.join(names[:3])}{more}; remove what nobody needs")


def _named_like_ours(root: Path) -> Iterator[tuple[Path, str, int, bool]]:
    """Folders with the run, the rank, and whether the name was a second choice."""
    with os.scandir(root) as entries:
        for entry in entries:
            found = re.fullmatch(r"(.+)-rank(\d+)(-\d+)?", entry.name)
            if found and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), found[1], int(found[2]), bool(found[3])


def _first_free(root: Path, name: str, flag: str) -> tuple[Path, int]:
    """The folder of the first name that nobody else has, and its descriptor."""
    for number in count(1):
        path = root / (f"{name}-{number}" if number > 1 else name)
        descriptor = _take(path, _make(path, flag))
        if descriptor is not None:
            return path, descriptor
    raise AssertionError("there are always more numbers")


def _make(path: Path, flag: str) -> bool:
    """Whether the folder is new."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(f"{flag} {path.parent}: cannot write there: {refusal(error, path.parent)}") from error
    return True


def _take(path: Path, fresh: bool) -> int | None:
    """Its descriptor, locked. None where somebody else has it, or may have: on a file system without locks only a
    folder just made is surely ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise StorageError(f"{path}: expected a swap folder, found a file or a symbolic link; remove it, or choose "
                           "another folder") from None
    except OSError:  # another user's, or just removed
        return None
    if _lock(descriptor, path, fresh):
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, path: Path, fresh: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return fresh
    status = os.fstat(descriptor)
    try:  # whoever had the lock before may have removed the folder
        return status.st_uid == os.geteuid() and os.path.samestat(status, os.lstat(path))
    except OSError:
        return False


def _empty(descriptor: int, path: Path) -> None:
    for name in _files(descriptor, path):
        os.unlink(name, dir_fd=descriptor)


def _size(descriptor: int, path: Path) -> int:
    return sum(os.stat(name, dir_fd=descriptor).st_blocks * 512 for name in _files(descriptor, path))


def _files(descriptor: int, path: Path) -> list[str]:
    """Only what a swap folder holds: anything else, and it is not one."""
    names = []
    with os.scandir(descriptor) as entries:
        for entry in entries:
            if not (entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)):
                raise StorageError(f"{path}: expected a swap folder, found {entry.name} in it; move that elsewhere, or "
                                   "choose another folder")
            names.append(entry.name)
    return names
