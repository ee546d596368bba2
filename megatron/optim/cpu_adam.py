"""DeepSpeedCPUAdam: the Adam that DeepSpeed's scripts pass in where optimizer state is offloaded.

It is torch's Adam with DeepSpeed's arguments. The engine makes the same rule of it as of "optimizer": {"type":
"DeepSpeedCPUAdam"} in a file (torch_rule.py); where the state lives is the configuration's affair, and on which device
it is stepped the engine's. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim.optimizer import ParamsT

from megatron.errors import ConfigError


@final
class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam; with `adamw_mode` its weight decay is decoupled."""

    def __init__(self, model_params: ParamsT, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True) -> None:
        if amsgrad:
            raise ConfigError("DeepSpeedCPUAdam: amsgrad=True is not supported, as in DeepSpeed; leave it out, or pass "
                              "torch.optim.AdamW(..., amsgrad=True)")
        if not fp32_optimizer_states:
            raise ConfigError("DeepSpeedCPUAdam: fp32_optimizer_states=False is not supported: masters and moments "
                              "are fp32 here; leave it out")
        super().__init__(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True,
                         decoupled_weight_decay=adamw_mode)
        self.adam_w_mode = adamw_mode
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    @property
    def bias_correction(self) -> bool:
        """One for all groups."""
        values = {group["bias_correction"] for group in self.param_groups}
        if len(values) > 1:
            raise ConfigError("DeepSpeedCPUAdam: bias_correction differs between param groups; give all the same")
        return bool(values.pop())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Without an engine."""
        if not self.bias_correction:
            raise ConfigError("DeepSpeedCPUAdam: only an engine steps with bias_correction=False; give the optimizer "
                              "to zero.initialize")
        return super().step(closure)

    def as_torch(self) -> torch.optim.Adam:
        """Torch's own of the same groups and state."""
        plain = torch.optim.Adam(self.param_groups, decoupled_weight_decay=self.adam_w_mode)
        plain.state = self.state
        return plain
