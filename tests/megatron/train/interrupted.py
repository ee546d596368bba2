"""A rank of pretrain_gpt2.py that sends a signal at a drawn moment: `interrupted.py FLAGS...`.

The variable INTERRUPT holds JSON: [signal, target, rank, where, step, seconds]. That rank sends the signal to the
target (`rank`: itself; `launcher`; `all`: the launcher and its ranks) that many seconds after it entered the step or,
for `save`, after it began the first save of that step or a later one. Each file of a save then takes a while.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pretrain_gpt2
from megatron.distributed.signals import exit_on_stop_signal

SLOW = 0.02
"""Seconds that a file of a save takes more."""

exit_on_stop_signal()
NUMBER, TARGET, VICTIM, WHERE, STEP, SECONDS = json.loads(os.environ["INTERRUPT"])
LAUNCHER = os.getppid() if "MEGATRON_LAUNCHER" in os.environ else os.getpid()  # a job of one rank has no launcher


def send() -> None:
    time.sleep(SECONDS)
    ranks = Path(f"/proc/{LAUNCHER}/task/{LAUNCHER}/children").read_text().split()
    others = [LAUNCHER, *(int(pid) for pid in ranks if int(pid) != os.getpid())]
    for pid in {"rank": [os.getpid()], "launcher": [LAUNCHER], "all": [*others, os.getpid()]}[TARGET]:
        with suppress(ProcessLookupError):  # a rank ends with its launcher
            os.kill(pid, NUMBER)


def sends(owner: Any, name: str, is_due: Any) -> None:
    """The first call of this function that is due starts the clock."""
    before, begun = getattr(owner, name), threading.Event()

    def called(*args: Any, **more: Any) -> Any:
        if is_due(*args) and not begun.is_set():
            begun.set()
            threading.Thread(target=send, daemon=True).start()
        return before(*args, **more)

    setattr(owner, name, called)


def slow_files() -> None:
    before = os.fsync

    def slowed(file: Any) -> None:
        time.sleep(SLOW)
        before(file)

    os.fsync = slowed


if os.environ.get("RANK", "0") == str(VICTIM):
    from megatron.train.loop import Trainer
    from megatron.zero.api import engine
    if WHERE == "step":
        sends(Trainer, "train_step", lambda trainer, batches: trainer.engine.global_steps + 1 >= STEP)
    else:
        sends(engine, "plan_engine_save", lambda saved, *_: saved.global_steps >= STEP)
if WHERE == "save":
    slow_files()

sys.exit(pretrain_gpt2.program())
