"""What programs that tests start inherit. They hear SIGHUP, also where the tests themselves run under `nohup`: what a
process ignores its children ignore, but what it listens to they do not inherit. And they write whole lines, also where
PYTHONUNBUFFERED is set: an unbuffered `print` writes its text and its line end apart, and those of two ranks mix."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


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
