"""--deterministic is of one run: what the process had chosen before is in force again afterwards."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.train.loop import Trainer
from tests.megatron.helpers import TINY, train


def in_force() -> tuple[int, bool, str | None]:
    return (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


@pytest.mark.parametrize(("mode", "workspace"), [(0, None), (1, ":16:8")])
@pytest.mark.parametrize("fails", [False, True])
def test_a_later_run_of_the_process_has_what_its_own_flags_say(mode: int, workspace: str | None, fails: bool,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[tuple[int, bool, str | None]] = []

    def step(trainer: Trainer, batches: list[Any]) -> Any:
        during.append(in_force())
        if fails:
            raise ZeroDivisionError
        return real(trainer, batches)

    real = Trainer.train_step
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(mode > 0, warn_only=True)
    before = in_force()
    try:
        with patch.object(Trainer, "train_step", step):
            try:
                train([*TINY, "--mock-data", "--train-iters", 1, "--deterministic"])
            except ZeroDivisionError:
                assert fails
        assert in_force() == before and during == [(2, False, workspace or ":4096:8")]
    finally:
        torch.use_deterministic_algorithms(False)
