"""A rank of pretrain_gpt2.py that does something at a place: `MEGATRON_FAULT=kind,phase,rank`; the other arguments are
its own. Just before, it writes the time to the file FAULT_AT; every rank writes its number to FAULT_AT.RANK."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

STEP = 3
"""Where the phase belongs to a step; evaluations and saves are due after it."""


def _spin() -> None:
    while True:
        pass


KINDS: dict[str, Callable[[], Any]] = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "spinning": _spin,
    "sleeping": lambda: time.sleep(1000),
    "in C, with the GIL": lambda: ctypes.PyDLL(None).sleep(1000),
    "in a regular expression": lambda: re.match(r"(a+)+$", 60 * "a" + "b"),
}
PHASES = ("start-up", "index", "forward", "backward", "exchange", "optimizer step", "evaluation", "save")


def main() -> int:
    import pretrain_gpt2
    from megatron.distributed.process_group import read_environment
    from megatron.distributed.rank_status import STATUS
    from megatron.distributed.signals import StopListener

    kind, phase, rank = os.environ["MEGATRON_FAULT"].split("|")
    is_faulty = read_environment().rank == int(rank)
    path = Path(os.environ["FAULT_AT"])
    path.with_suffix(f".{read_environment().rank}").write_text(str(os.getpid()))

    def fault() -> None:
        if not path.exists():  # a signal may end a sleep in C
            path.write_text(str(time.monotonic()))
        KINDS[kind]()

    def before(owner: Any, name: str, is_here: Callable[[], bool] = lambda: True) -> None:
        """The fault, before this function is called there."""
        usual = getattr(owner, name)

        @wraps(usual)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            if is_here():
                fault()
            return usual(*args, **kwargs)

        setattr(owner, name, faulty)

    def at_step() -> bool:
        return STATUS.snapshot.step == STEP

    if is_faulty and phase == "start-up":
        before(pretrain_gpt2, "check_package_shadowing")
    elif is_faulty:
        import mpu.collectives
        from megatron.model.transformer import Block
        from megatron.train import build
        from megatron.zero.api import engine
        from megatron.zero.update import OptimizerUpdate

        if phase == "index":
            before(build, "open_datasets")
        elif phase == "forward":
            before(Block, "forward", at_step)
        elif phase == "evaluation":
            before(Block, "forward", lambda: STATUS.snapshot.activity == phase)
        elif phase == "backward":
            usual = Block.forward

            def with_hook(*args: Any, **kwargs: Any) -> Any:
                out = usual(*args, **kwargs)
                if at_step() and out.requires_grad:
                    out.register_hook(lambda gradient: fault())
                return out

            Block.forward = with_hook  # type: ignore[method-assign]
        elif phase == "exchange":
            for name in ("_segments", "_reduce_scatter_by_sends"):
                before(mpu.collectives, name, lambda: at_step() and STATUS.snapshot.phase == "backward")
        elif phase == "optimizer step":
            before(OptimizerUpdate, "__call__", at_step)
        elif phase == "save":
            before(engine, "begin_engine_save")
    return pretrain_gpt2.main(StopListener().listen())


if __name__ == "__main__":
    from megatron.distributed.exit_codes import run
    sys.exit(run(main, is_job=True))
