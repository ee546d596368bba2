"""What programs that tests start inherit. They hear SIGHUP, also where the tests themselves run under `nohup`: what a
process ignores its children ignore, but what it listens to they do not inherit. And they write whole lines, also where
PYTHONUNBUFFERED is set: an unbuffered `print` writes its text and its line end apart, and those of two ranks mix."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.megatron.launch.processes import Job, end_all


@pytest.fixture(scope="session", autouse=True)
def hears_hang_ups() -> Iterator[None]:
    former = signal.getsignal(signal.SIGHUP)
    if former == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.fixture(scope="session", autouse=True)
def writes_whole_lines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        yield


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def port() -> Iterator[int]:
    """One that the kernel gives to nobody else during the test: it is bound here, and nobody listens. Programs that
    reuse addresses, as all of ours and torch do, may listen there, and until then who knocks is refused."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Job]:
    """Starts a launcher whose ranks run a text."""
    return partial(Job, tmp_path)
