"""Five flows, and how many functions and files of the product each passes. Lower a limit when a flow gets shorter.

A function counts once, however often it is called. Lambdas, comprehensions and generated methods do not count, nor does
the model's own forward (`megatron/model` and the layers of `mpu`), nor what a collective does on gloo: NCCL does it in
one call.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from megatron.serve import cli
from megatron.train.loop import Trainer
from megatron.train.resume import RunCheckpoints
from megatron.zero.api.engine import Engine
from tests.distributed import run_ranks
from tests.megatron.helpers import ROOT, TINY, train
from tests.megatron.serve.server import trained

PRODUCT = tuple(f"{ROOT / name}/" for name in ("megatron", "mpu", "data")) + (str(ROOT / "pretrain_gpt2.py"),)
MODEL = ("megatron/model/", "megatron/recompute/", "mpu/layers.py", "mpu/regions.py", "mpu/partition.py",
         "mpu/cross_entropy.py", "mpu/random.py", "mpu/kernels.py")


Functions = list[tuple[str, str]]
"""(file, name), in the order of their first return."""


class Flow:
    def __init__(self, counts: Callable[[FrameType, Any], bool] = lambda frame, value: True) -> None:
        """`counts` chooses calls, from a frame at its end and what it returns."""
        self.is_recording, self.functions, self._counts = True, Functions(), counts

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if not self.is_recording or event != "return" or not code.co_filename.startswith(PRODUCT) \
                or code.co_name.startswith("<"):
            return
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_qualname.startswith("GlooBackend."):
                return
            caller = caller.f_back
        function = str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname
        if function not in self.functions and not function[0].startswith(MODEL) and self._counts(frame, value):
            self.functions.append(function)

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


RUN = [*TINY, "--mock-data", "--batch-size", "2", "--bf16", "--train-iters", "4", "--lr", "0.000123"]
LIMITS = {"step": (165, 34), "gradient": (59, 14), "save and resume": (256, 43), "--lr": (19, 9),
          "completion": (53, 13)}
"""(functions, files)"""


def last_call(owner: type, name: str, calls: int, run: Callable[[], object]) -> Functions:
    """What call number `calls` of a method passes in a run."""
    flow, original, count = Flow(), getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count != calls:
            return original(*args, **kwargs)
        with flow.of_this_thread():
            return original(*args, **kwargs)

    with patch.object(owner, name, counted):
        run()
    return flow.functions


def step_of_rank(rank: int, world: int) -> Functions:
    """The third step: the first two allocate."""
    return last_call(Trainer, "train_step", 3, lambda: train([*RUN, "--zero-stage", 2]))


def gradient_of_rank(rank: int, world: int) -> Functions:
    return last_call(Engine, "backward", 3, lambda: train([*RUN, "--zero-stage", 3]))


def save_and_resume_of_rank(rank: int, world: int, folder: Path) -> Functions:
    flags = [*RUN, "--zero-stage", 2, "--lr-decay-iters", 4, "--save", folder, "--load", folder]
    saved = last_call(RunCheckpoints, "_save", 1, lambda: train(flags))
    resumed = last_call(RunCheckpoints, "resume", 1, lambda: train([*flags, "--train-iters", 5]))
    return list(dict.fromkeys(saved + resumed))


def setting_of_rank(rank: int, world: int) -> Functions:
    """The functions that hold the value of --lr, from the command line to the first step."""
    def holds(frame: FrameType, value: Any) -> bool:
        for found in (*frame.f_locals.values(), value):
            several = found.values() if type(found) is dict else found if type(found) in (list, tuple) else [found]
            if any(type(one) in (float, str) and one in (0.000123, "0.000123") for one in several):
                return True
        return False

    flow = Flow(holds)

    def stop(*args: Any) -> Any:
        sys.setprofile(None)
        return original(*args)

    original = Trainer.train_step
    with patch.object(Trainer, "train_step", stop), flow.of_this_thread():
        train(RUN)
    return flow.functions


def completion_of_rank(rank: int, world: int, folder: Path) -> Functions:
    """What a second completion passes, on the threads of the clients and of the model."""
    flow = Flow()
    flow.is_recording = False

    def ask(address: tuple[str, int]) -> None:
        try:
            while True:  # until the model is loaded
                with suppress(ConnectionRefusedError), socket.create_connection(address):
                    break
                time.sleep(0.05)
            for is_second in (False, True):
                flow.is_recording = is_second
                client = http.client.HTTPConnection(*address)
                client.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 4}),
                               {"Content-Type": "application/json"})
                assert client.getresponse().status == 200
            flow.is_recording = False
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def bind(host: str, port: int) -> socket.socket:
        listener = original(host, port)
        threading.Thread(target=ask, args=[listener.getsockname()[:2]]).start()
        return listener

    original = cli.bind_listener
    threading.setprofile(flow)  # of the threads that start from now on
    with patch.object(cli, "bind_listener", bind), flow.of_this_thread():
        assert cli.main(["--load", str(folder), "--port", "0", "--quiet"]) == 0
    return flow.functions


@pytest.mark.parametrize("name", LIMITS)
def test_a_flow_stays_short(name: str, tmp_path: Path) -> None:
    if name == "completion":
        [functions] = run_ranks(completion_of_rank, 1, trained(tmp_path / "run"), init=False)
    elif name == "--lr":
        [functions] = run_ranks(setting_of_rank, 1)
    elif name == "save and resume":
        functions = run_ranks(save_and_resume_of_rank, 2, tmp_path)[0]
    else:
        functions = run_ranks({"step": step_of_rank, "gradient": gradient_of_rank}[name], 2)[0]
    files = {file for file, _ in functions}
    most, most_files = LIMITS[name]
    assert len(functions) <= most and len(files) <= most_files, \
        f"{name}: {len(functions)} functions in {len(files)} files:\n" + "\n".join(map(" ".join, functions))
