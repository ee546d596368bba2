"""Faults put under a real save by the kernel: strace makes the k-th call of a kind fail, or its process die at it.

A *fault* hits the main thread of one rank (the *victim*) from the moment it begins to save a certain step until the
save, pruning included, is over. Without a fault the calls are only written down: a rehearsal, which shows where the
file-changing calls of a save are. strace attaches to a running rank, so a trial needs no start of a program.

`broken` puts a wrong writer in place of ours: what finds no fault with that one proves nothing.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.checkpoint import safetensors_io, writer
from megatron.distributed import exit_codes
from megatron.train.loop import TrainState
from megatron.train.resume import RunCheckpoints
from tests.megatron.helpers import train

CALLS = "openat,write,fsync,close,rename,mkdir,unlink,unlinkat,rmdir,ftruncate"
"""What a save changes files by; `test_kill.py` holds that nothing else occurs."""


@dataclass(frozen=True)
class Fault:
    """What happens to which call: `how` in strace's words (signal=KILL, error=EIO), or None to write the calls down."""

    victim: int
    call: str = ""
    when: int = 0
    how: str | None = None

    def __str__(self) -> str:
        return f"rank {self.victim}, {self.call} {self.when}: {self.how}"


@dataclass(frozen=True)
class Death:
    """The victim dies at byte `at` of the file `name` of the save."""

    victim: int
    name: str
    at: int


def strace_works() -> str | None:
    """Why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            tracer = subprocess.Popen(["strace", "-p", str(child.pid)], stderr=subprocess.PIPE, text=True)
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            tracer.terminate()
            tracer.communicate()
        finally:
            child.kill()
    return None if "attached" in said else f"strace cannot attach: {said.strip()}"


@contextmanager
def traced(fault: Fault, log: Path) -> Iterator[None]:
    """The calling thread under strace."""
    inject = ["-e", f"inject={fault.call}:{fault.how}:when={fault.when}"] if fault.how else []
    command = ["strace", "-p", str(os.getpid()), "-y", "-s", "0", "-o", str(log), "-e", f"trace={CALLS}", *inject]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    assert "attached" in tracer.stderr.readline()
    try:
        yield
    finally:
        tracer.terminate()
        tracer.communicate()


@contextmanager
def dying(death: Death) -> Iterator[None]:
    """The kernel ends a process with SIGXFSZ at the first byte beyond its limit; Python would ignore that signal.

    Blocks are small, so that a tiny model's files are written as large ones are: past the page cache, by a thread.
    """
    made = safetensors_io.ChecksummedWriter.__init__

    def limited(new: Any, file: Any, *rest: Any) -> None:
        made(new, file, *rest)
        if Path(file.name).name == death.name:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (death.at, resource.RLIM_INFINITY))

    with patch.object(safetensors_io.ChecksummedWriter, "__init__", limited), \
            patch.object(safetensors_io, "WRITE_BLOCK_BYTES", 1 << 14):
        yield


@contextmanager
def armed(rank: int, fault: Fault | Death, step: int, log: Path) -> Iterator[None]:
    """Let the fault be during the save of `step`."""
    saving = RunCheckpoints._save

    def save(checkpoints: RunCheckpoints, engine: Any, say: Any, state: TrainState) -> None:
        with ExitStack() as stack:
            if rank == fault.victim and state.iteration == step:
                stack.enter_context(traced(fault, log) if isinstance(fault, Fault) else dying(fault))
            saving(checkpoints, engine, say, state)

    with patch.object(RunCheckpoints, "_save", save):
        yield


def save_under(rank: int, world: int, argv: Sequence[object], fault: Fault | Death, step: int, log: Path,
               control: str | None = None) -> tuple[int, str]:
    """A run whose save of `step` meets the fault: what its process would exit with, and its error line."""
    with armed(rank, fault, step, log), broken(control):
        try:
            train(argv)
            return 0, ""
        except BaseException as error:
            failure = exit_codes.exit_reason_of(error)
            return failure.code, failure.text


# ---- what strace wrote down --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call that changed something under the save root: the `when`-th of its kind."""

    name: str
    when: int
    text: str


def calls(log: Path, root: Path) -> list[Call]:
    """The file-changing calls of a rehearsal, in order."""
    seen: Counter[str] = Counter()
    found = []
    for line in log.read_text().splitlines():
        match = re.match(r"(\w+)\(", line)
        if match is None:
            continue  # a signal, the end of the process
        seen[match[1]] += 1
        if str(root) in line and (match[1] != "openat" or "O_CREAT" in line):
            found.append(Call(match[1], seen[match[1]], line))
    return found


def out_of_order(log: Path, root: Path) -> list[str]:
    """What is not surely on the disk at the moment that it counts. A file or folder counts from its rename on: by then
    it and all in it have been flushed; the rename itself is flushed afterwards."""
    dirty: dict[str, str] = {}
    complaints = []
    for call in calls(log, root):
        path = re.search(r'["<]([^">]*' + re.escape(str(root)) + r'[^">]*)[">]', call.text)
        assert path is not None, call
        where, folder = path[1], str(Path(path[1]).parent)
        if call.name == "write":
            dirty[where] = "its bytes"
        elif call.name == "openat":
            dirty[folder] = f"the name {Path(where).name}"
        elif call.name == "fsync":
            dirty.pop(where, None)
        elif call.name == "rename":
            complaints += [f"{name}: {what}" for name, what in dirty.items() if f"{name}/".startswith(f"{where}/")]
            dirty[folder] = f"the rename of {Path(where).name}"
    return complaints + [f"{name}: {what}" for name, what in dirty.items() if "rename" in what]


# ---- negative controls -------------------------------------------------------------------------------------------


@contextmanager
def broken(control: str | None) -> Iterator[None]:
    """One of three wrong writers, or ours."""
    with ExitStack() as stack:
        for target, name, value in CONTROLS[control]:
            stack.enter_context(patch.object(target, name, value))
        yield


@contextmanager
def _stage_in_place(root: Path, tag: str, *_: Any) -> Iterator[Path]:
    (root / tag).mkdir()
    yield root / tag


def _commit_in_place(staging: Path, root: Path, tag: str, *_: Any) -> None:
    (root / "latest").write_text(f"{tag}\n")


def _delete_then_rename(staging: Path, root: Path, tag: str, *_: Any) -> None:
    shutil.rmtree(root / tag, ignore_errors=True)
    os.rename(staging, root / tag)


CONTROLS: dict[str | None, list[tuple[Any, str, Any]]] = {
    None: [],
    "in place": [(writer, "open_staging_folder", _stage_in_place), (writer, "commit_tag", _commit_in_place)],
    "delete first": [(writer, "commit_tag", _delete_then_rename)],
    "no fsync": [(os, "fsync", lambda descriptor: None)],
}
