"""Processes that tests begin, and how they wait; conftest.py ends those that a test leaves, as one does that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 30.0
"""Seconds for what takes less than one on a machine with nothing else to do."""
LIMIT = 5.0
"""Seconds within which nobody may be left after a failure (docs/launch.md)."""

MEET = """
def meet(folder):
    import os, time
    met = os.path.join(folder, "met")
    open(met + os.environ["RANK"], "w").close()
    while not all(os.path.exists(f"{met}{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
"""
"""For programs of ranks: all begin what follows at the same time, however long each took to start."""

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                      "MEGATRON_LAUNCHER", "TORCHELASTIC_RUN_ID")


def environment(**more: object) -> dict[str, str]:
    """Of a program that no launcher has started yet and that finds our packages from any folder."""
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in more.items()}


def python(*words: object, cwd: Path = ROOT, **variables: object) -> subprocess.CompletedProcess[str]:
    """A Python program, run to its end."""
    return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=environment(**variables), text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=240)


def launched(ranks: int, *words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A program of so many ranks, run to its end."""
    return python("-m", "megatron.launch", "--nproc-per-node", ranks, *words, cwd=cwd)


def error_of(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The only error line of a program that ended with this code."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == code and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    return errors[0]


_BEGUN: list[subprocess.Popen[Any]] = []


def begin(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    _BEGUN.append(subprocess.Popen(command, **options))
    return _BEGUN[-1]


def wait_until(condition: Callable[[], object], limit: float = PATIENCE) -> None:
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie whose parent has not looked yet."""
    return state(pid) not in ("", "Z")


def state(pid: int) -> str:
    """One letter, as `ps` shows it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def end_all() -> None:
    """And close their pipes."""
    while _BEGUN:
        with _BEGUN.pop() as process:
            process.kill()


PRELUDE = MEET + """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, f"pid{rank}.tmp"), "w") as f:
    f.write(str(os.getpid()))
os.rename(os.path.join(here, f"pid{rank}.tmp"), os.path.join(here, f"pid{rank}"))
"""


class Job:
    """A running launcher and the program of its ranks."""

    def __init__(self, folder: Path, body: str, ranks: int = 2, arguments: tuple[str, ...] = (),
                 stdin: str = "") -> None:
        self.folder = folder
        script = folder / "program.py"
        script.write_text(PRELUDE + body)
        command = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(ranks), str(script), *arguments]
        self.process = begin(command, env=environment(TMPDIR=folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        self._stdin = stdin

    def pid(self, rank: int) -> int:
        """The process of a rank, once it has started."""
        path = self.folder / f"pid{rank}"
        wait_until(path.exists)
        return int(path.read_text())

    def end(self, limit: float = PATIENCE) -> tuple[int, str, list[str]]:
        """Exit code, standard output and the lines of standard error."""
        out, err = self.process.communicate(self._stdin, timeout=limit)
        return self.process.returncode, out, err.splitlines()
