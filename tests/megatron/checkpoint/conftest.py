"""No test can see whether bytes reached the platter, so fsync is free here; that it is called, and when, is tested."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="session")
def free_fsync() -> Iterator[None]:
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        yield
