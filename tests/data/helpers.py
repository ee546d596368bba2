"""What a corpus holds; a function that is killed at a chosen moment.

Moments are counted in *events*: renames, syncs, cuts, removals and folders made. Between two of them nothing changes
that another process could see, but for bytes in files under temporary names.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedCorpus
from data.tokenizer import ByteLevelTokenizer

BYTE = ByteLevelTokenizer()


def files_of(prefix: Path | str) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


def documents_of(prefix: Path | str) -> list[list[int]]:
    corpus = IndexedCorpus(prefix)
    return [corpus.document(number).tolist() for number in range(corpus.num_documents)]


def sizes_of(corpus: IndexedCorpus) -> list[int]:
    """Tokens of each document."""
    return np.diff(corpus.first_tokens(0, corpus.num_documents)).tolist()


EVENTS = ("replace", "fsync", "unlink", "truncate", "mkdir", "rmdir", "link")


def in_a_fork(function: Callable[[], object], stop: int | None = None) -> int:
    """Run the function, killed before its `stop`-th event. Returns how many events it met; -1 if it was killed."""
    read, write = os.pipe()
    with warnings.catch_warnings():  # of Python 3.12, that threads do not live on in the child: it needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code = 1
        try:
            seen = count_events(stop)
            with open(os.devnull, "w") as nowhere:
                sys.stdout = sys.stderr = nowhere
                function()
            os.write(write, str(seen[0]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return -1
    assert os.WEXITSTATUS(status) == 0
    return int(said)


def count_events(stop: int | None) -> list[int]:
    """From now on, in this process for good."""
    seen = [0]

    def wrapped(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            seen[0] += 1
            if seen[0] == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)
        return call

    patch = pytest.MonkeyPatch()
    for name in EVENTS:
        patch.setattr(os, name, wrapped(getattr(os, name)))
    return seen
