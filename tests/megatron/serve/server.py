"""A server of its own process, and what a client says to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.megatron.helpers import ROOT, train

FLAGS = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 2048 --seq-length 32 "
         "--tokenizer-type ByteLevelTokenizer --mock-data --train-iters 2 --eval-interval 0 --batch-size 2")
JSON = {"Content-Type": "application/json"}


def trained(folder: Path) -> Path:
    """A model that makes noise, quickly, and for long if it is asked to."""
    train([*FLAGS.split(), "--save", folder])
    return folder


class Server:
    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process, self._errors = process, errors
        assert process.stdout is not None
        line = ""
        if select.select([process.stdout], [], [], 60)[0]:
            line = process.stdout.readline()
        match = re.fullmatch(r"listening on http://(127\.0\.0\.1):(\d+)\n", line)
        assert match, (line, self.said())
        self.host, self.port = match[1], int(match[2])

    def said(self) -> str:
        """On standard error."""
        return self._errors.read_text()

    def ask(self, path: str, body: Any = None, method: str | None = None, headers: dict[str, str] = JSON,
            timeout: float = 30) -> tuple[int, Any]:
        """(status, answer): JSON where it is."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        response = connection.getresponse()
        found = response.read()
        connection.close()
        is_json = response.getheader("Content-Type") == "application/json"
        return response.status, json.loads(found) if is_json else found.decode()

    def complete(self, **asked: Any) -> dict[str, Any]:
        status, found = self.ask("/v1/completions", asked)
        assert status == 200, found
        return dict(found)

    def text(self, **asked: Any) -> str:
        return str(self.complete(**asked)["choices"][0]["text"])

    def events(self, **asked: Any) -> Iterator[dict[str, Any]]:
        """Of a stream, as they come."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request("POST", "/v1/completions", json.dumps({**asked, "stream": True}), JSON)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("Content-Type") == "text/event-stream"
        try:
            for line in response:
                if line == b"data: [DONE]\n":
                    return
                if line != b"\n":
                    yield json.loads(line.removeprefix(b"data: "))
            raise AssertionError("the stream broke off")
        finally:
            response.close()
            connection.close()

    def raw(self, data: bytes, timeout: float = 10, half_closed: bool = False) -> bytes:
        """All that comes back for these bytes."""
        with socket.create_connection((self.host, self.port), timeout=timeout) as wire:
            found = b""
            try:
                wire.sendall(data)
                if half_closed:
                    wire.shutdown(socket.SHUT_WR)
                while part := wire.recv(1 << 16):
                    found += part
            except (ConnectionResetError, BrokenPipeError):
                pass
            return found

    def metric(self, name: str) -> float:
        _, text = self.ask("/metrics")
        match = re.search(rf"^gpt2_{name} (\S+)$", text, re.MULTILINE)
        assert match, text
        return float(match[1])

    def wait_for(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 20
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, expected {value}"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def served(folder: Path, tmp: Path, *flags: object, ranks: int = 1, **environment: str) -> Iterator[Server]:
    launcher = ["-m", "megatron.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "megatron.serve", "--load", str(folder), "--port", "0", "--dtype",
               "fp32", *map(str, flags)]
    if ranks > 1:
        command += ["--model-parallel-size", str(ranks)]
    errors, variables = tmp / "stderr", {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with open(errors, "w") as file, subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=file,
                                                     env=variables) as process:
        try:
            yield Server(process, errors)
        except BaseException as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)  # where it failed as well, it has its last word
            error.add_note(f"the server said:\n{errors.read_text()}")
            raise
        finally:
            process.kill()
    assert "Traceback" not in errors.read_text()
