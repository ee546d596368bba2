"""The optimizer as scripts know it: param groups for schedulers, the loss scale to look at. The engine takes the steps.

Its `param_groups` are the engine's: setting `group["lr"]` there, as torch's and our schedulers do, changes learning
rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from megatron.errors import ConfigError
from megatron.zero.engine import ZeroEngine


class ZeroOptimizer(torch.optim.Optimizer):
    """What `zero.initialize` returns beside the engine."""

    _is_built = False

    def __init__(self, engine: ZeroEngine, defaults: Mapping[str, Any] | None = None,
                 client: torch.optim.Optimizer | None = None) -> None:
        """`defaults` are those of the optimizer behind it: torch's cyclic schedulers look there for momentum. `client`
        is the one that the user gave; a scheduler may have been made for it."""
        super().__init__([{"params": group["params"]} for group in engine.param_groups], {})
        self.defaults, self.param_groups = {**(defaults or {})}, engine.param_groups
        self._engine, self._client, self._is_built = engine, client, True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            raise ConfigError("add_param_group after zero.initialize: its buffers hold the parameters it began with; "
                              "give all groups to initialize, frozen ones excepted")
        super().add_param_group(param_group)

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self._engine.scaler.scale

    loss_scale = cur_scale

    @property
    def overflow(self) -> bool:
        """The last step was skipped because a gradient was not finite."""
        report = self._engine.last_report
        return report is not None and not report.applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad()

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        raise ConfigError("the engine steps the optimizer: call engine.step() instead of optimizer.step()")

    def note_step(self) -> None:
        """A step was taken: torch's schedulers warn where one of theirs comes before it, and look for this mark."""
        for optimizer in (self, self._client):
            if optimizer is not None:
                optimizer._opt_called = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        raise ConfigError("optimizer state is split over ranks: engine.save_checkpoint() saves it")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ConfigError("optimizer state is split over ranks: engine.load_checkpoint() loads it")
