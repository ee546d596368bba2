"""The optimizers that flags and JSON can name, and their parameters. No torch: flags are checked without it.

All have `lr`, and all but one `weight_decay`. Other parameters are either *fields*, with a flag of their own
(--adam-beta1), or *own* ones, given as --optimizer-params NAME=VALUE. Their names, and the defaults of own ones, are
those of torch.optim and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Name = Literal["adam", "adamw", "sgd", "lamb", "lion", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta",
               "asgd", "rprop", "onebit_adam", "onebit_lamb", "zeroone_adam", "muon"]

AUTO = "auto"
"""A number of steps that is found while a run goes on."""
NEVER = "never"
"""No number of steps is enough."""


@dataclass(frozen=True)
class Takes:
    """The parameters of one optimizer."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the names of its fields."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Parameter -> default, whose type is the parameter's."""
    torch_name: str = ""
    """The class of torch.optim, where there is one."""
    decays: bool = True
    """It takes `weight_decay`."""
    lr: float = 1e-3
    """DeepSpeed's default, and torch's where the class is torch's. The trainer has one of its own (--lr)."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("lr", *(["weight_decay"] if self.decays else []), *self.fields, *self.own)


_ADAM = {"betas": "adam_beta1 adam_beta2", "eps": "adam_eps"}
_ONE_BIT = {**_ADAM, "freeze_step": "onebit_freeze_step"}
_LAMB = {"max_coeff": 10.0, "min_coeff": 0.01, "bias_correction": True, "eps_inside_sqrt": False}

OPTIMIZERS: dict[str, Takes] = {
    "adam": Takes({**_ADAM, "adam_w_mode": "adam_w_mode"}, {"amsgrad": False, "bias_correction": True}, "Adam"),
    "adamw": Takes({**_ADAM, "adam_w_mode": "adam_w_mode"}, {"amsgrad": False, "bias_correction": True}, "AdamW"),
    "sgd": Takes({"momentum": "sgd_momentum"}, {"dampening": 0.0, "nesterov": False}, "SGD"),
    "lamb": Takes(_ADAM, _LAMB),
    "lion": Takes({}, {"betas": (0.9, 0.99)}),
    "adagrad": Takes({}, {"eps": 1e-10, "lr_decay": 0.0, "initial_accumulator_value": 0.0}, "Adagrad", lr=1e-2),
    "rmsprop": Takes({}, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False}, "RMSprop", lr=1e-2),
    "nadam": Takes(_ADAM, {"momentum_decay": 4e-3, "decoupled_weight_decay": False}, "NAdam", lr=2e-3),
    "radam": Takes(_ADAM, {"decoupled_weight_decay": False}, "RAdam"),
    "adamax": Takes(_ADAM, {}, "Adamax", lr=2e-3),
    "adadelta": Takes({}, {"rho": 0.9, "eps": 1e-6}, "Adadelta", lr=1.0),
    "asgd": Takes({}, {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6}, "ASGD", lr=1e-2),
    "rprop": Takes({}, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}, "Rprop", decays=False, lr=1e-2),
    "onebit_adam": Takes(_ONE_BIT, {"bias_correction": True}),
    "onebit_lamb": Takes(_ONE_BIT, {**_LAMB, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5,
                                    "factor_threshold": 0.1}),
    "zeroone_adam": Takes({**_ADAM, "var_freeze_step": "onebit_freeze_step"},
                          {"bias_correction": True, "var_update_scaler": 16, "local_step_scaler": 32678,
                           "local_step_clipper": 16}),
    "muon": Takes(_ADAM, {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "original",
                          "split_qkv": True, "muon_lr": None, "adam_lr": None}),
}

WORDS = {"adjust_lr_fn": ("original", "match_rms_adamw")}
"""Own parameter that is a text -> what it may be."""

ONE_BIT = ("onebit_adam", "onebit_lamb", "zeroone_adam")
"""Those with an exchange of their own, at one bit a number."""


DEEPSPEED_TYPES = {
    "Adam": "adam", "AdamW": "adamw", "FusedAdam": "adam", "DeepSpeed_Adam": "adam", "DeepSpeedCPUAdam": "adam",
    "SGD": "sgd", "Lamb": "lamb", "FusedLamb": "lamb", "Lion": "lion", "FusedLion": "lion", "DeepSpeedCPULion": "lion",
    "Adagrad": "adagrad", "DeepSpeedCPUAdagrad": "adagrad", "RMSprop": "rmsprop", "NAdam": "nadam", "RAdam": "radam",
    "Adamax": "adamax", "Adadelta": "adadelta", "ASGD": "asgd", "Rprop": "rprop", "OneBitAdam": "onebit_adam",
    "OneBitLamb": "onebit_lamb", "ZeroOneAdam": "zeroone_adam", "Muon": "muon",
}
"""optimizer.type of a DeepSpeed file -> --optimizer"""
REFUSED_TYPES = {
    **dict.fromkeys(("muadam", "muadamw", "musgd"),
                    "learning rates do not depend on a layer's width; use Adam, AdamW or SGD"),
    "adafactor": "it keeps a row and a column of a matrix in the place of its second moment, and states here have the "
                 "shape of their weights; use AdamW, or Muon",
    "lbfgs": "it evaluates the loss several times a step; use Adam", "sparseadam": "gradients are dense here; use Adam",
}
"""Types, in lower case, that DeepSpeed has and we do not -> why."""


def own_parameter(optimizer: str, name: str, value: Any) -> Any:
    """The value as this optimizer takes it; ValueError says what is wrong with it."""
    own = OPTIMIZERS[optimizer].own
    if name not in own:
        raise ValueError(f"{name} is not a parameter of --optimizer {optimizer}: expected {', '.join(own) or 'none'}")
    default = own[name]
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name} is {value!r}: expected true or false")
    if isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**12:
            return value
        raise ValueError(f"{name} is {value!r}: expected a whole number from 1 on")
    if isinstance(default, str):
        if value in WORDS[name]:
            return value
        raise ValueError(f"{name} is {value!r}: expected {' or '.join(WORDS[name])}")
    if default is None and value is None:
        return None
    if isinstance(default, float | None):
        if _is_number(value):
            return float(value)
        raise ValueError(f"{name} is {value!r}: expected a number")
    if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
        return float(value[0]), float(value[1])
    raise ValueError(f"{name} is {value!r}: expected a list of two numbers")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
