"""Progressive layer dropping, as an engine offers it: theta of the step under way, handed to the model's forward.

In training the forward gets the keyword arguments `progressive_layer_drop=True, pld_theta=theta`, as DeepSpeed gives
them, and where it names it also `pld_step`, the number of steps before this one: with that a model draws alike on every
rank (megatron/layer_drop.py). In evaluation it gets none of them, and the model is whole. The engine leaves out nothing
by itself: which blocks a model has is the model's business.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from megatron.config.layer_drop import LayerDropConfig
from megatron.errors import ConfigError

FORWARD_ARGUMENTS = ("progressive_layer_drop", "pld_theta")
STEP_ARGUMENT = "pld_step"


class ProgressiveLayerDrop:
    """`engine.progressive_layer_drop`, with the names that DeepSpeed's has. It holds no state: the step is the
    engine's, so that a resumed run goes on where it was."""

    def __init__(self, config: LayerDropConfig, module: nn.Module, step: Callable[[], int]) -> None:
        schedule = config.schedule
        assert schedule is not None, "it is made where blocks are left out"
        self._schedule, self._step, self._passes_step = schedule, step, check_forward_signature(module)
        self.theta, self.gamma = config.pld_theta, config.pld_gamma

    @property
    def step(self) -> int:
        """Optimizer steps before the one under way."""
        return self._step()

    def get_theta(self, step: int | None = None) -> float:
        """theta of the step under way, or of that one."""
        return self._schedule.theta_at(self.step if step is None else step)

    current_theta = property(get_theta)

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments of the forward."""
        return dict(zip(FORWARD_ARGUMENTS, (True, self.get_theta()), strict=True))

    def forward_arguments(self) -> dict[str, Any]:
        """Those, and the step for a forward that names it."""
        return {**self.get_state(), **({STEP_ARGUMENT: self.step} if self._passes_step else {})}


def check_forward_signature(module: nn.Module) -> bool:
    """The forward takes what is given to it, or it is refused; whether it asks for the step as well."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    missing = [name for name in FORWARD_ARGUMENTS if name not in parameters and not takes_any]
    if missing:
        raise ConfigError(
            f"--progressive-layer-drop: forward of {type(module).__name__} takes no {' and no '.join(missing)}, and it "
            "is the model that leaves out its layers: give its forward the keyword arguments "
            "progressive_layer_drop=False, pld_theta=1.0 (docs/methods.md), or leave the setting out")
    return STEP_ARGUMENT in parameters
