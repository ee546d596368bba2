"""The optimizers that flags and JSON can name, and their parameters. No torch: flags are checked without it.

All have `lr`, and all but one `weight_decay`. Other parameters are either *fields*, with a flag of their own
(--adam-beta1), or *own* ones, given as --optimizer-params NAME=VALUE. Their names, and the defaults of own ones, are
those of torch.optim and DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OptimizerName = Literal["adam", "adamw", "sgd", "lamb", "lion", "adagrad", "rmsprop", "nadam", "radam", "adamax",
                        "adadelta", "asgd", "rprop", "onebit_adam", "onebit_lamb", "muon"]

AUTO_STEPS = "auto"
"""A number of steps that is found while a run goes on."""


@dataclass(frozen=True)
class OptimizerParams:
    """The parameters of one optimizer."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the names of its fields."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Parameter -> default, whose type is the parameter's."""
    torch_name: str = ""
    """The class of torch.optim, where there is one."""
    has_weight_decay: bool = True
    """It takes `weight_decay`."""
    lr: float = 1e-3
    """DeepSpeed's default, and torch's where the class is torch's. The trainer has one of its own (--lr)."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("lr", *(["weight_decay"] if self.has_weight_decay else []), *self.fields, *self.extra)


_ADAM_FIELDS = {"betas": "adam_beta1 adam_beta2", "eps": "adam_eps"}
_ONE_BIT_FIELDS = {**_ADAM_FIELDS, "freeze_step": "onebit_freeze_step"}
_LAMB_EXTRA = {"max_coeff": 10.0, "min_coeff": 0.01, "bias_correction": True, "eps_inside_sqrt": False}

OPTIMIZERS: dict[str, OptimizerParams] = {
    "adam": OptimizerParams({**_ADAM_FIELDS, "adam_w_mode": "adam_w_mode"}, {"amsgrad": False, "bias_correction": True},
                            "Adam"),
    "adamw": OptimizerParams({**_ADAM_FIELDS, "adam_w_mode": "adam_w_mode"},
                             {"amsgrad": False, "bias_correction": True}, "AdamW"),
    "sgd": OptimizerParams({"momentum": "sgd_momentum"}, {"dampening": 0.0, "nesterov": False}, "SGD"),
    "lamb": OptimizerParams(_ADAM_FIELDS, _LAMB_EXTRA),
    "lion": OptimizerParams({}, {"betas": (0.9, 0.99)}),
    "adagrad": OptimizerParams({}, {"eps": 1e-10, "lr_decay": 0.0, "initial_accumulator_value": 0.0},
                               "Adagrad",
                               lr=1e-2),
    "rmsprop": OptimizerParams({}, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False}, "RMSprop",
                               lr=1e-2),
    "nadam": OptimizerParams(_ADAM_FIELDS, {"momentum_decay": 4e-3, "decoupled_weight_decay": False}, "NAdam", lr=2e-3),
    "radam": OptimizerParams(_ADAM_FIELDS, {"decoupled_weight_decay": False}, "RAdam"),
    "adamax": OptimizerParams(_ADAM_FIELDS, {}, "Adamax", lr=2e-3),
    "adadelta": OptimizerParams({}, {"rho": 0.9, "eps": 1e-6}, "Adadelta", lr=1.0),
    "asgd": OptimizerParams({}, {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6}, "ASGD", lr=1e-2),
    "rprop": OptimizerParams({}, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
                             "Rprop",
                             has_weight_decay=False,
                             lr=1e-2),
    "onebit_adam": OptimizerParams(_ONE_BIT_FIELDS, {"bias_correction": True}),
    "onebit_lamb": OptimizerParams(_ONE_BIT_FIELDS, {
        **_LAMB_EXTRA, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1
    }),
    "muon": OptimizerParams(
        _ADAM_FIELDS, {
            "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "original", "split_qkv": True,
            "muon_lr": None, "adam_lr": None
        }),
}

TEXT_CHOICES = {"adjust_lr_fn": ("original", "match_rms_adamw")}
"""Own parameter that is a text -> what it may be."""

ONE_BIT_OPTIMIZERS = ("onebit_adam", "onebit_lamb")
"""Those with an exchange of their own, at one bit a number."""


@dataclass(frozen=True)
class NumberRange:
    low: float = 0.0
    high: float = math.inf
    excludes_low: bool = False
    excludes_high: bool = False

    def contains(self, number: float) -> bool:
        return (number > self.low or number == self.low and not self.excludes_low) and \
            (number < self.high or number == self.high and not self.excludes_high)

    def __str__(self) -> str:
        above = f"a number {'>' if self.excludes_low else '>='} {self.low:g}"
        return above if self.high == math.inf else f"{above} and {'<' if self.excludes_high else '<='} {self.high:g}"


_POSITIVE, _DECAY = NumberRange(excludes_low=True), NumberRange(high=1.0, excludes_high=True)
EXTRA_RANGES: dict[str, NumberRange] = {
    **dict.fromkeys(("max_coeff", "factor_max", "step_sizes", "etas"), _POSITIVE),
    **dict.fromkeys(("min_coeff", "factor_min", "factor_threshold", "eps", "lr_decay", "initial_accumulator_value",
                     "momentum_decay", "lambd", "t0"), NumberRange()),
    **dict.fromkeys(("coeff_beta", "betas", "momentum", "rho"), _DECAY),
    **dict.fromkeys(("dampening", "alpha"), NumberRange(high=1.0)),
    **dict.fromkeys(("muon_lr", "adam_lr"), NumberRange()), "ns_steps": NumberRange(1, 99),
}
"""Own parameter -> the numbers it may be, each of them where it has two."""
ORDERED_EXTRAS = (("min_coeff", "max_coeff"), ("factor_min", "factor_max"))
"""Own parameters of which the first is not above the second."""
OPTIMIZER_SWITCHES = ("amsgrad", "eps_inside_sqrt", "nesterov", "centered")
"""Variants that some optimizers have; switched off they mean the same to all."""


DEEPSPEED_TYPES = {
    "Adam": "adam", "AdamW": "adamw", "FusedAdam": "adam", "DeepSpeed_Adam": "adam", "DeepSpeedCPUAdam": "adam",
    "SGD": "sgd", "Lamb": "lamb", "FusedLamb": "lamb", "Lion": "lion", "FusedLion": "lion", "DeepSpeedCPULion": "lion",
    "Adagrad": "adagrad", "DeepSpeedCPUAdagrad": "adagrad", "RMSprop": "rmsprop", "NAdam": "nadam", "RAdam": "radam",
    "Adamax": "adamax", "Adadelta": "adadelta", "ASGD": "asgd", "Rprop": "rprop", "OneBitAdam": "onebit_adam",
    "OneBitLamb": "onebit_lamb", "Muon": "muon",
}
"""optimizer.type of a DeepSpeed file -> --optimizer"""
REFUSED_TYPES = {
    **dict.fromkeys(("muadam", "muadamw", "musgd"),
                    "learning rates do not depend on a layer's width; use Adam, AdamW or SGD"),
    "adafactor": "it keeps a row and a column of a matrix in the place of its second moment, and states here have the "
                 "shape of their weights; use AdamW, or Muon",
    "zerooneadam": "0/1 Adam was retired; use OneBitAdam (onebit_adam)",
    "lbfgs": "it evaluates the loss several times a step; use Adam", "sparseadam": "gradients are dense here; use Adam",
}
"""Types, in lower case, that DeepSpeed has and we do not -> why."""


def parse_extra_param(optimizer: str, name: str, value: Any) -> Any:
    """The value as this optimizer takes it; ValueError says what is wrong with it."""
    takes = OPTIMIZERS[optimizer]
    if name in takes.fields:
        flags = " and ".join(f"--{field.replace('_', '-')}" for field in takes.fields[name].split())
        raise ValueError(f"{name} has a flag of its own: give {flags}")
    if name not in takes.extra:
        raise ValueError(f"{name} is not a parameter of --optimizer {optimizer}: expected "
                         f"{', '.join(takes.extra) or 'none'}")
    number = _convert_extra_param(name, value, takes.extra[name])
    numbers = number if isinstance(number, tuple) else () if number is None else (number,)
    if name in EXTRA_RANGES and not all(map(EXTRA_RANGES[name].contains, numbers)):
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ValueError(f"{name} is {shown}: expected {EXTRA_RANGES[name]}")
    return number


def ordering_errors(own: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with own parameters beside each other."""
    for low, high in ORDERED_EXTRAS:
        if low in own and own[low] > own[high]:
            yield f"{low} {own[low]:g} is above {high} {own[high]:g}: it is the lower bound"
    if "etas" in own and not own["etas"][0] < 1 < own["etas"][1]:
        yield f"etas is {list(own['etas'])}: expected one below 1 and one above it"
    if "step_sizes" in own and own["step_sizes"][0] > own["step_sizes"][1]:
        yield f"step_sizes is {list(own['step_sizes'])}: the first number is above the second one"


def _convert_extra_param(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name} is {value!r}: expected true or false")
    if isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise ValueError(f"{name} is {value!r}: expected a whole number")
    if isinstance(default, str):
        if value in TEXT_CHOICES[name]:
            return value
        raise ValueError(f"{name} is {value!r}: expected {' or '.join(TEXT_CHOICES[name])}")
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
