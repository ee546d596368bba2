"""Builds the update rule and the default hyper-parameters from the optimizer section of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from megatron.config.optimizer_config import OPTIMIZERS
from megatron.config.tree import OptimConfig
from megatron.errors import ConfigError
from megatron.optim.adam import AdamW
from megatron.optim.lamb import Lamb
from megatron.optim.lion import Lion
from megatron.optim.muon import Muon
from megatron.optim.one_bit import OneBitAdam, OneBitLamb
from megatron.optim.rule import UpdateRule
from megatron.optim.torch_rule import from_torch

FUSED_CLASSES = ("Adam", "AdamW", "SGD")
"""torch.optim classes with a fused kernel on each kind of device."""


def build_rule(optim: OptimConfig, tile: int) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule, and the default hyper-parameters of a param group except the learning rate, which is the schedule's.
    Raises ConfigError if torch's optimizer refuses them."""
    hyper = optim.hyper_parameters()
    native: dict[str, Callable[[int], UpdateRule]] = {"lamb": Lamb, "lion": Lion, "muon": Muon}
    if optim.optimizer in native:
        return native[optim.optimizer](tile), hyper
    hyper.pop("freeze_step", None)  # passed from `optim` below
    if optim.optimizer == "onebit_lamb":
        return OneBitLamb(optim.freeze_step, tile), hyper
    if optim.optimizer == "onebit_adam":
        return OneBitAdam(optim.freeze_step, tile, bias_correction=hyper.pop("bias_correction")), hyper
    adam = optim.optimizer in ("adam", "adamw")
    decoupled = adam and optim.adam_w_mode
    if adam and not hyper.pop("bias_correction"):
        return AdamW(tile, bias_correction=False, decoupled=decoupled), hyper
    if decoupled and not hyper["amsgrad"]:
        return AdamW(tile), hyper
    name = "AdamW" if decoupled else OPTIMIZERS[optim.optimizer].torch_name
    if name in FUSED_CLASSES:
        hyper["fused"] = True
    try:
        optimizer = getattr(torch.optim, name)([Parameter(torch.zeros(2))], lr=1e-3, **hyper)
    except ValueError as error:
        raise ConfigError(f"--optimizer {optim.optimizer}: {error}") from error
    defaults = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "lr")}
    return from_torch(optimizer, tile), defaults
