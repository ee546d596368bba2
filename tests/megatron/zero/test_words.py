"""What an engine says of its settings is in the words of whoever gave them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from megatron import zero
from megatron.errors import ConfigError

KEYS = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def initialized(**keys: Any) -> zero.Engine:
    """Of a dict, at stage 3."""
    return zero.initialize(model=nn.Linear(8, 8), config={**KEYS, "zero_optimization": {"stage": 3, **keys}})[0]


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize(("more", "told"), [
    ({}, "{}.device nvme needs {}.nvme_path"),
    ({"nvme_path": "/nowhere"}, "{}.nvme_path /nowhere: there is no such folder"),
])
def test_an_error_about_a_drive_names_keys_alone(section: str, more: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        initialized(**{section: {"device": "nvme", **more}})
    assert told.replace("{}", f"zero_optimization.{section}") in str(caught.value) and "--" not in str(caught.value)


def test_an_error_about_the_host_names_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise ConfigError("--offload-optimizer-device cpu: there is no room")

    monkeypatch.setattr("megatron.zero.api.initialize.homes_of", full)
    with pytest.raises(ConfigError, match=r"^zero_optimization.offload_optimizer.device cpu: there is no room$"):
        initialized()
