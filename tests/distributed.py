"""run_ranks: call one function on several ranks of a real gloo job and return what each of them returned.

    def work(rank: int, world_size: int, factor: float) -> torch.Tensor: ...

    def test_something() -> None:
        first, second = run_ranks(work, 2, 0.5)

The ranks are forked from a *fork server*, a process that has imported torch and the trainer but never ran an
operation: a job costs about a tenth of a second, and no rank inherits the OpenMP threads of the test process (forking
those hangs).
So the function must be importable by name (module level; no lambda, no closure), and its arguments and results
must pickle. Pickle is fine here: this is test code talking to itself.

A test of which every rank makes the same checks is its body:

    @on_ranks(2)
    def test_something(rank: int, world_size: int, tmp_path: Path) -> None: ...

A failure names the *culprit*, the rank that failed first; its peers' "connection closed" is not shown.
"""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_GRACE = 0.5
"""Seconds given to the other ranks to report after the first failure, so that the culprit can be told from victims."""

_PR_SET_PDEATHSIG = 1

_PRELOAD = ["numpy", "pytest", "safetensors.torch", "torch._dynamo", "torch.fx.experimental.symbolic_shapes",
            "torch.distributed.checkpoint", "transformers.models.gpt2.modeling_gpt2", "megatron.zero.api.initialize",
            "megatron.fsdp", "megatron.train.resume", "megatron.inference.api.init_inference",
            "megatron.checkpoint.convert", "tests.megatron.zero.models", __name__, "tests.frozen"]
"""What the fork server imports once, where each rank would take half a second: also the parts of torch that a first
backward or optimizer step would import. What cannot be imported is left to the test that needs it."""


class RankError(AssertionError):
    """A rank failed: the message holds its number and its traceback; `error` is the exception if it could travel."""

    def __init__(self, message: str, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass
class _Report:
    """What a rank sends back once."""

    time: float
    result: Any = None
    trace: str | None = None
    error: BaseException | None = None


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60, init: bool = True) -> list[T]:
    """Return [fn(rank, world_size, *args) for every rank], each run in its own process of one gloo job.

    `init=False` leaves torch.distributed alone (for tests of code that must work without it).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    payload = pickle.dumps((fn, args))  # by plain pickle: multiprocessing would share the memory of tensors
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        children: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                child: BaseProcess = context.Process(
                    target=_rank_main, args=(theirs, payload, rank, world_size, folder, timeout, init), daemon=True
                )
                child.start()
                theirs.close()
                children.append(child)
                pipes.append(ours)
            reports = _collect(pipes, timeout, Path(folder))
            _raise_first_failure(reports, pipes, children)
            return [report.result for report in reports.values() if report is not None]
        finally:
            for pipe in pipes:
                pipe.close()  # a rank that has reported waits for this, so none leaves while another still needs it
            for child in children:
                child.kill()
                child.join()


def on_ranks(world_size: int, timeout: float = 60) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test whose body runs on every rank. After the rank and the number of ranks it takes fixtures and
    parameters that pickle."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        _, _, *given = inspect.signature(body).parameters.values()

        def test(**values: Any) -> None:
            run_ranks(body, world_size, *(values[parameter.name] for parameter in given), timeout=timeout)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        body.__name__ = body.__qualname__ = f"_on_rank_{body.__name__}"
        body.__globals__[body.__name__] = body  # where pickle looks for it
        return test

    return decorate


def _collect(pipes: list[Connection], timeout: float, folder: Path) -> dict[int, _Report | None]:
    """Reports by rank, in rank order; None where a rank died without a word."""
    reports: dict[int, _Report | None] = {}
    deadline = time.monotonic() + timeout
    while len(reports) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in reports]
        ready = wait([pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
        for rank in missing:
            if pipes[rank] in ready:
                try:
                    reports[rank] = pickle.loads(pipes[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    reports[rank] = None
        if any(report is None or report.trace for report in reports.values()):
            deadline = min(deadline, time.monotonic() + _GRACE)
        if not ready:
            if not any(report is None or report.trace for report in reports.values()):
                raise RankError(_timeout_text(missing, timeout, folder), missing[0])
            break
    return dict(sorted(reports.items()))


def _raise_first_failure(
    reports: dict[int, _Report | None], pipes: list[Connection], children: list[BaseProcess]
) -> None:
    for rank, report in reports.items():
        if report is None:  # killed or exited: it cannot be the victim of a rank that raised
            children[rank].join(1)
            raise RankError(f"rank {rank} of {len(pipes)} died with exit code {children[rank].exitcode}", rank)
    failed = {rank: report for rank, report in reports.items() if report is not None and report.trace}
    if failed:
        rank, report = min(failed.items(), key=lambda item: item[1].time)
        raise RankError(f"rank {rank} of {len(pipes)} failed:\n{report.trace}", rank, report.error) from report.error


def _timeout_text(ranks: list[int], timeout: float, folder: Path) -> str:
    paths = {rank: folder / f"{rank}.stack" for rank in ranks}
    end = time.monotonic() + 10
    while time.monotonic() < end and not all(path.exists() and path.stat().st_size for path in paths.values()):
        time.sleep(0.05)  # the ranks write their stacks when the same time has passed on their clock
    time.sleep(_GRACE)  # one that has begun to write
    stacks = [f"rank {rank}:\n{path.read_text()}" for rank, path in paths.items() if path.exists()]
    return f"ranks {ranks} still ran after {timeout} s\n" + "\n".join(stacks)


def _rank_main(
    pipe: Connection, payload: bytes, rank: int, world_size: int, folder: str, timeout: float, init: bool
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the fork server, nor it the test run
    stack = open(Path(folder) / f"{rank}.stack", "w")
    faulthandler.dump_traceback_later(timeout, file=stack)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size),
                      GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        if init:
            store = f"file://{folder}/store"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        fn, args = pickle.loads(payload)
        message = pickle.dumps(_Report(time.monotonic(), result=fn(rank, world_size, *args)))
    except BaseException as error:
        message = _failure(error)
    try:
        pipe.send_bytes(message)
        pipe.recv_bytes()  # ends with EOFError when the parent has heard every rank
    except (EOFError, OSError):
        pass
    os._exit(0)


def _failure(error: BaseException) -> bytes:
    report = _Report(time.monotonic(), trace="".join(traceback.format_exception(error)), error=error)
    try:
        message = pickle.dumps(report)
        pickle.loads(message)  # some exceptions pickle but cannot be rebuilt
    except Exception:
        report.error = None
        message = pickle.dumps(report)
    return message
