"""call_within: the result or the error of a function, within bounds of time and memory that end it even in C."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from data.parallel import call_within
from data.storage import ResumableError


def endless(_: object) -> object:
    return re.match("(a|a)*b", "a" * 100)


def crash(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def open_files(_: object) -> int:
    return sum(os.path.exists(f"/proc/self/fd/{number}") for number in range(1000))


def test_results_and_errors_are_those_of_the_function() -> None:
    assert call_within(len, "x" * 1_000_000, 10, 1 << 30) == 1_000_000
    with pytest.raises(ZeroDivisionError):
        call_within((1).__truediv__, 0, 10, 1 << 30)


def test_what_needs_more_gives_none_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    children, fork = list[int](), os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(child := fork()) or child)
    assert call_within(endless, None, 0.1, 1 << 30) is None
    assert call_within(crash, None, 10, 1 << 30) is None
    with pytest.raises(MemoryError):
        call_within(bytes, 1 << 30, 10, 1 << 28)
    assert len(children) == 3 and not any(Path(f"/proc/{child}").exists() for child in children)


def test_files_of_the_caller_are_closed(tmp_path: Path) -> None:
    """So that a lock goes with the process that holds it."""
    with (tmp_path / "lock").open("w"):
        assert call_within(open_files, None, 10, 1 << 30) == 1  # the pipe


def test_a_process_that_cannot_be_started_is_no_word_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(ResumableError, match="cannot start a process: Resource"):
        call_within(len, "x", 10, 1 << 30)
