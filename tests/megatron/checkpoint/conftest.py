"""No test can see whether bytes reached the platter, so fsync is free here; that it is called, and when, is tested. Old
checkpoints are deleted at once; that they are deleted in the background is tested in test_trash.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint.commit import BackgroundDeleter
from tests.megatron.checkpoint.made import Grid, save_grid


@pytest.fixture(autouse=True, scope="session")
def free_fsync() -> Iterator[None]:
    with mock.patch.object(os, "fsync", lambda descriptor: None), \
            mock.patch.object(BackgroundDeleter, "delete", BackgroundDeleter._delete):
        yield


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save root with tags of steps 1 and 2 on two ranks, to copy."""
    root = tmp_path_factory.mktemp("pristine")
    for step in (1, 2):
        save_grid(root, Grid(2, 1), step=step)
    return root
