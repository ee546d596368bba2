"""What tests do to file operations: fail one, die at one, hold one back, or write all of them down."""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = ("mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir")
"""Operations that change a folder. Created files are seen by their writing."""


@contextmanager
def before_each(root: Path, act: Callable[[str, str], None], operations: Sequence[str] = CHANGES) -> Iterator[None]:
    """Call `act(operation, path)` ahead of every operation of this process on `root` or below it."""
    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(first: Any, *rest: Any, **more: Any) -> Any:
            path = _path_of(first, more.get("dir_fd"))
            if f"{path}/".startswith(f"{root}/"):
                act(name, path)
            return real(first, *rest, **more)
        return operation

    with ExitStack() as stack:
        for name in operations:
            for owner in (builtins, io) if name == "open" else (os,):
                stack.enter_context(mock.patch.object(owner, name, watched(name, getattr(owner, name))))
        yield


def _path_of(name_or_descriptor: Any, folder: int | None) -> str:
    if isinstance(name_or_descriptor, int):
        return os.readlink(f"/proc/self/fd/{name_or_descriptor}")
    name = os.fsdecode(name_or_descriptor)
    return os.path.abspath(name if folder is None else f"{os.readlink(f'/proc/self/fd/{folder}')}/{name}")


class Killed(BaseException):
    """The process is no more."""


@contextmanager
def dying_at(root: Path, call: int) -> Iterator[list[str]]:
    """Raise Killed in place of the `call`-th (from 0) change below `root` and of every later one, those of a clean-up
    included; yields the changes that were made."""
    made: list[str] = []

    def die(operation: str, path: str) -> None:
        if len(made) >= call:
            raise Killed
        made.append(operation)

    with before_each(root, die):
        yield made


@contextmanager
def failing(root: Path, error: int, fails: Callable[[str, str], bool], operations: Sequence[str] = CHANGES
            ) -> Iterator[None]:
    """Operations of which `fails(operation, path)` is true raise this error."""
    def act(operation: str, path: str) -> None:
        if fails(operation, path):
            raise OSError(error, os.strerror(error), path)

    with before_each(root, act, operations):
        yield


@contextmanager
def held_back(root: Path) -> Iterator[threading.Event]:
    """No file of tensors below `root` is complete until the event is set."""
    go = threading.Event()

    def wait(operation: str, path: str) -> None:
        assert not path.endswith(".safetensors") or go.wait(60)

    with before_each(root, wait, ["fsync"]):
        yield go
