"""Two nodes with a wire that loses packets: a job ends with the numbers of a good wire, or names the other node.

Each node is a network namespace with a tap device; a thread carries frames between them and drops some by a seed.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.megatron.helpers import ROOT, TINY, lines, total_digest
from tests.megatron.launch.processes import begin, wait_until

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
STEPS = 6


class Wire:
    """Two namespaces, 10.78.0.1 and 10.78.0.2, and the share of frames that is lost between them."""

    def __init__(self) -> None:
        self.names = [f"lossy{side}{os.getpid()}" for side in "ab"]
        self.devices = [f"tap{side}{os.getpid()}" for side in "ab"]
        self.loss, self.carried, self.lost = 0.0, 0, 0
        self._draw, self._is_over = random.Random(7), threading.Event()
        self._ends: list[int] = []
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self) -> Wire:
        for number, (name, device) in enumerate(zip(self.names, self.devices)):
            self._ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(self._ends[-1], TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
            for command in (f"netns add {name}", f"link set {device} netns {name}", f"-n {name} link set lo up",
                            f"-n {name} addr add 10.78.0.{number + 1}/24 dev {device}",
                            f"-n {name} link set {device} up"):
                subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._ends:
            os.close(end)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _carry(self) -> None:
        while not self._is_over.is_set():
            for end in select.select(self._ends, [], [], 0.1)[0]:
                frame = os.read(end, 1 << 16)
                if self._draw.random() < self.loss:
                    self.lost += 1
                    continue
                self.carried += 1
                os.write(self._ends[1 - self._ends.index(end)], frame)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Wire())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces or tap devices here: {error}")
        yield made


def nodes(wire: Wire, folder: Path, *flags: object) -> list[subprocess.Popen[str]]:
    """The launchers of a job of two ranks, one on each node."""
    argv = [*TINY, "--mock-data", "--batch-size", 2, "--log-interval", 1, "--zero-stage", 2, *flags]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return [begin(["ip", "netns", "exec", wire.names[node], sys.executable, "-m", "megatron.launch", "--nnodes", "2",
                   "--node-rank", str(node), "--master-addr", "10.78.0.1", "--master-port", "6000",
                   "pretrain_gpt2.py", *map(str, argv)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                  text=True, env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                                                "GLOO_SOCKET_IFNAME": wire.devices[node]}) for node in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.02, 0.1, 0.25])
def test_a_wire_that_loses_packets_changes_no_number(loss: float, wire: Wire, tmp_path: Path) -> None:
    said = {}
    for name in ("good", "bad"):
        wire.loss = loss if name == "bad" else 0.0
        began = time.monotonic()
        jobs = nodes(wire, tmp_path, "--train-iters", STEPS, "--save", tmp_path / name, "--metrics-file",
                     tmp_path / f"{name}.jsonl")
        said[name] = [(job.communicate(timeout=240)[1], job.returncode) for job in jobs]
        assert [code for _, code in said[name]] == [0, 0], said[name]
        print(name, f"{time.monotonic() - began:.1f} s, {wire.carried} frames carried, {wire.lost} lost")
    assert wire.lost > 10 and not any("error" in err or "Traceback" in err for err, _ in said["bad"]), said
    assert lines(tmp_path / "bad.jsonl") == lines(tmp_path / "good.jsonl")
    assert total_digest(tmp_path / "bad") == total_digest(tmp_path / "good")


@pytest.mark.slow  # the kernel asks a silent peer for 20 seconds
def test_a_wire_that_loses_everything_names_the_other_node(wire: Wire, tmp_path: Path) -> None:
    metrics = tmp_path / "m"
    jobs = nodes(wire, tmp_path, "--train-iters", 1_000_000, "--metrics-file", metrics)
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    wire.loss = 1.0
    for node, job in enumerate(jobs):
        _, err = job.communicate(timeout=90)
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        assert job.returncode == 5 and len(errors) == 1 and "Traceback" not in err, err
        assert f"node {1 - node} " in errors[0], errors
