"""pretrain_gpt2.py as a rank whose drive fails: `MEGATRON_DRIVE=JSON`, with the fields of `Fault`; the other arguments
are its own. Calls of the system are replaced in the one rank, from a step on; some faults are the kernel's own. When
the drive fails first, the time is written to the file DRIVE_AT; every rank writes its number to DRIVE_AT.RANK."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ON_PATHS = ("open", "mkdir", "rename", "replace", "listdir", "scandir", "stat")
ON_DESCRIPTORS = ("write", "pwrite", "fsync", "preadv")


@dataclass(frozen=True)
class Fault:
    """Calls of this name on a path in which `where` is found fail on this rank, once it is at this step.

    Of `calls` that are none of the system's: "limit" is the kernel's limit on the size of a file, "file" puts a file in
    the place of the folder `where`, "read-only" and "tiny" mount it anew for this rank alone.
    """

    rank: int
    call: str
    where: str
    number: int = 0
    step: int = 0

    def __str__(self) -> str:
        name = errno.errorcode.get(self.number, "")
        return " ".join(word for word in (f"rank{self.rank}", self.call, self.where.rsplit("/", 1)[-1], name) if word)


def mark() -> None:
    path = Path(os.environ["DRIVE_AT"])
    if not path.exists():
        path.with_suffix(".tmp").write_text(str(time.monotonic()))
        path.with_suffix(".tmp").rename(path)


def path_of(first: Any) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fsdecode(first)
    except (OSError, TypeError):
        return ""


class Drive:
    """The patches of one fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.busy = fault, False

    def fails(self, first: Any) -> bool:
        from megatron.distributed.rank_status import STATUS
        return not self.busy and STATUS.snapshot.step >= self.fault.step and self.is_meant(first)

    def is_meant(self, first: Any) -> bool:
        return re.search(self.fault.where, path_of(first)) is not None

    def fail(self, path: str | None = None) -> None:
        self.busy = True  # the mark is a file as well
        mark()
        self.busy = False
        raise OSError(self.fault.number, os.strerror(self.fault.number), path)

    def failing(self, real: Callable[..., Any], names_it: bool) -> Callable[..., Any]:
        def call(first: Any, *others: Any, **more: Any) -> Any:
            if self.fails(first):
                self.fail(path_of(first) if names_it else None)
            return real(first, *others, **more)
        return call

    def opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """For the calls of files: what is opened for them."""
        def call(first: Any, *others: Any, **more: Any) -> Any:
            file = real(first, *others, **more)
            return File(file, self) if self.is_meant(first) else file
        return call

    def install(self) -> None:
        call = self.fault.call
        if call in ON_PATHS + ON_DESCRIPTORS:
            setattr(os, call, self.failing(getattr(os, call), call in ON_PATHS))
        if call == "open":
            builtins.open = io.open = self.failing(open, True)
        elif call in ("write", "close"):
            builtins.open = io.open = self.opened(open)


class File:
    """One whose writing, or closing, fails."""

    def __init__(self, file: Any, drive: Drive) -> None:
        self._file, self._drive = file, drive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, data: Any) -> Any:
        if self._drive.fault.call == "write" and self._drive.fails(self._file.fileno()):
            self._drive.fail()
        return self._file.write(data)

    def close(self) -> None:
        fails = self._drive.fault.call == "close" and not self._file.closed and self._drive.fails(self._file.fileno())
        self._file.close()
        if fails:
            self._drive.fail()


def mounted_anew(folder: str, *options: str) -> None:
    """For this process alone: nobody else sees the mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0, "CLONE_NEWNS"
    for words in (["--make-rprivate", "/"], ["--bind", folder, folder], options):
        subprocess.run(["mount", *words, *([folder] if words is options else [])], check=True)


ACTIONS: dict[str, Callable[[str], Any]] = {
    "limit": lambda folder: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY)),
    "file": lambda folder: (os.rename(folder, f"{folder}.moved"), Path(folder).write_text("a file")),
    "read-only": lambda folder: mounted_anew(folder, "-o", "remount,ro,bind"),
    "tiny": lambda folder: mounted_anew(folder, "-t", "tmpfs", "-o", "size=8k", "tmpfs"),
}


def act_before_save(fault: Fault) -> None:
    from megatron.train.loop import TrainState
    from megatron.train.resume import RunCheckpoints

    saving = RunCheckpoints._save

    def save(checkpoints: RunCheckpoints, engine: Any, say: Any, state: TrainState) -> None:
        if state.iteration >= fault.step:
            mark()
            ACTIONS[fault.call](fault.where)
        saving(checkpoints, engine, say, state)

    RunCheckpoints._save = save  # type: ignore[method-assign]


def main() -> int:
    import pretrain_gpt2
    from megatron.distributed.process_group import read_environment

    fault, rank = Fault(**json.loads(os.environ["MEGATRON_DRIVE"])), read_environment().rank
    Path(os.environ["DRIVE_AT"]).with_suffix(f".{rank}").write_text(str(os.getpid()))
    if rank == fault.rank and fault.call in ACTIONS:
        act_before_save(fault)
    elif rank == fault.rank:
        Drive(fault).install()
    return pretrain_gpt2.program()


if __name__ == "__main__":
    sys.exit(main())
