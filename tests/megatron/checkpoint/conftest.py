"""No test can see whether bytes reached the platter, so fsync is free here; that it is called, and when, is tested. Old
checkpoints are deleted at once; that they are deleted in the background is tested in test_trash.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from megatron.checkpoint.commit import BackgroundDeleter


@pytest.fixture(autouse=True, scope="session")
def free_fsync() -> Iterator[None]:
    with mock.patch.object(os, "fsync", lambda descriptor: None), \
            mock.patch.object(BackgroundDeleter, "delete", BackgroundDeleter._delete):
        yield
