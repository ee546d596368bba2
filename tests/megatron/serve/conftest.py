"""One trained model for all tests of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.serve.server import trained


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))
