"""Processes that tests begin, and how they wait; conftest.py ends those that a test leaves, as one does that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 30.0
"""Seconds for what takes less than one on a machine with nothing else to do."""
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


_BEGUN: list[subprocess.Popen[Any]] = []


def begin(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    _BEGUN.append(subprocess.Popen(command, **options))
    return _BEGUN[-1]


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def end_all() -> None:
    """And close their pipes."""
    while _BEGUN:
        with _BEGUN.pop() as process:
            process.kill()
