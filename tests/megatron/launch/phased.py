"""pretrain_gpt2.py as a rank that leaves a mark when a phase begins, and makes that phase last: `phased.py PHASE FOLDER
FLAGS...`. What is slowed down is below what a request to stop has to get through.

    meeting     rank 1 comes late: rank 0 waits for it inside torch's store
    index       rank 0 makes the samples' index in many small parts; the others wait for it inside gloo
    step        each forward takes a while
    evaluation  of hours
    save        every file takes a while to be on the disk; `background` the same with --async-save
    end         after the last step is saved, the evaluation of hours
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrain_gpt2
from megatron.distributed.signals import exit_on_stop_signal

exit_on_stop_signal()
PHASE, FOLDER = sys.argv[1], Path(sys.argv[2])
del sys.argv[1:3]
RANK = int(os.environ.get("RANK", "0"))


def mark(name: str) -> None:
    path = FOLDER / f"{name}{RANK}"
    if not path.exists():
        path.with_suffix(".tmp").write_text(str(os.getpid()))
        path.with_suffix(".tmp").rename(path)


def slow(owner: Any, name: str, seconds: float, when: Callable[..., bool] = lambda *args, **more: True) -> None:
    """Each call of this function `when` that is true takes longer, and the first is marked."""
    before: Callable[..., Any] = getattr(owner, name)

    def slowed(*args: Any, **more: Any) -> Any:
        if when(*args, **more):
            mark(PHASE)
            until = time.monotonic() + seconds
            while time.monotonic() < until:  # in Python: time.sleep would do as well
                time.sleep(0.01)
        return before(*args, **more)

    setattr(owner, name, slowed)


mark("pid")
if PHASE == "start-up":
    mark(PHASE)
elif PHASE == "meeting":
    from megatron.distributed import process_group
    slow(process_group, "init_process_group", 30.0 * RANK)
elif PHASE == "index":
    from megatron.train import build
    slow(build, "datasets", 30.0 * (RANK == 0))
elif PHASE in ("save", "background"):
    slow(os, "fsync", 0.1)
else:
    from megatron.zero.api.engine import Engine
    slow(Engine, "__call__", 0.05, lambda engine, *args, **more: engine.training == (PHASE == "step"))

sys.exit(pretrain_gpt2.program())
