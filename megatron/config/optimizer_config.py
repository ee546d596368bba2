"""Sections `optim` and `schedule`: the optimizers with their parameters, and the learning rate schedule. No torch.

Every optimizer has `lr`, nearly all `weight_decay`. Other parameters are fields with a flag (--adam-beta1) or extra
ones given as --optimizer-params NAME=VALUE; names and defaults are those of torch.optim and DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.config.schema import (BOOLEAN, COUNT, COUNT_FROM_0, FRACTION, JSON_TYPE_OF, NUMBER, NUMBER_FROM_0,
                                    ConfigSection, ErrorList, JsonKey, JsonType, NumberRange, flag_name, one_of,
                                    setting)
from megatron.errors import ConfigError

OptimizerName = Literal["adam", "adamw", "sgd", "lamb", "lion", "adagrad", "rmsprop", "nadam", "radam", "adamax",
                        "adadelta", "asgd", "rprop", "onebit_adam", "onebit_lamb", "muon"]

AUTO_STEPS = "auto"  # value of a number of steps that is determined during the run


@dataclass(frozen=True)
class OptimizerParams:
    """The parameters of one optimizer."""

    fields: Mapping[str, str] = field(default_factory=dict)  # parameter -> its field names, separated by spaces
    extra: Mapping[str, Any] = field(default_factory=dict)  # parameter without a field -> default, of its type
    torch_name: str = ""  # the class in torch.optim, if there is one
    has_weight_decay: bool = True  # whether it takes `weight_decay`
    lr: float = 1e-3  # DeepSpeed's default, or torch's for its classes. The trainer has its own (--lr).

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("lr", *(["weight_decay"] if self.has_weight_decay else []), *self.fields, *self.extra)


_ADAM_FIELDS = {"betas": "adam_beta1 adam_beta2", "eps": "adam_eps"}
_ONE_BIT_FIELDS = {**_ADAM_FIELDS, "freeze_step": "onebit_freeze_step"}
_LAMB_EXTRA = {"max_coeff": 10.0, "min_coeff": 0.01, "bias_correction": True, "eps_inside_sqrt": False}

OPTIMIZERS: dict[str, OptimizerParams] = {
    "adam": OptimizerParams({**_ADAM_FIELDS, "adam_w_mode": "adam_w_mode"},
                            {"amsgrad": False, "bias_correction": True}, "Adam"),
    "adamw": OptimizerParams({**_ADAM_FIELDS, "adam_w_mode": "adam_w_mode"},
                             {"amsgrad": False, "bias_correction": True}, "AdamW"),
    "sgd": OptimizerParams({"momentum": "sgd_momentum"}, {"dampening": 0.0, "nesterov": False}, "SGD"),
    "lamb": OptimizerParams(_ADAM_FIELDS, _LAMB_EXTRA),
    "lion": OptimizerParams({}, {"betas": (0.9, 0.99)}),
    "adagrad": OptimizerParams({}, {"eps": 1e-10, "lr_decay": 0.0, "initial_accumulator_value": 0.0},
                               "Adagrad", lr=1e-2),
    "rmsprop": OptimizerParams({}, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False},
                               "RMSprop", lr=1e-2),
    "nadam": OptimizerParams(_ADAM_FIELDS, {"momentum_decay": 4e-3, "decoupled_weight_decay": False}, "NAdam", lr=2e-3),
    "radam": OptimizerParams(_ADAM_FIELDS, {"decoupled_weight_decay": False}, "RAdam"),
    "adamax": OptimizerParams(_ADAM_FIELDS, {}, "Adamax", lr=2e-3),
    "adadelta": OptimizerParams({}, {"rho": 0.9, "eps": 1e-6}, "Adadelta", lr=1.0),
    "asgd": OptimizerParams({}, {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6}, "ASGD", lr=1e-2),
    "rprop": OptimizerParams({}, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
                             "Rprop", has_weight_decay=False, lr=1e-2),
    "onebit_adam": OptimizerParams(_ONE_BIT_FIELDS, {"bias_correction": True}),
    "onebit_lamb": OptimizerParams(_ONE_BIT_FIELDS, {**_LAMB_EXTRA, "coeff_beta": 0.9, "factor_max": 4.0,
                                                     "factor_min": 0.5, "factor_threshold": 0.1}),
    "muon": OptimizerParams(_ADAM_FIELDS,
                            {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "original",
                             "split_qkv": True, "muon_lr": None, "adam_lr": None})}

TEXT_CHOICES = {"adjust_lr_fn": ("original", "match_rms_adamw")}  # extra parameter of type text -> its choices

ONE_BIT_OPTIMIZERS = ("onebit_adam", "onebit_lamb")  # they communicate 1 bit per element
_POSITIVE, _DECAY = NumberRange(excludes_low=True), NumberRange(high=1.0, excludes_high=True)
# Extra parameter -> its range, which holds for each number of a pair.
EXTRA_RANGES: dict[str, NumberRange] = {
    **dict.fromkeys(("max_coeff", "factor_max", "step_sizes", "etas"), _POSITIVE),
    **dict.fromkeys(("min_coeff", "factor_min", "factor_threshold", "eps", "lr_decay", "initial_accumulator_value",
                     "momentum_decay", "lambd", "t0"), NumberRange()),
    **dict.fromkeys(("coeff_beta", "betas", "momentum", "rho"), _DECAY),
    **dict.fromkeys(("dampening", "alpha"), NumberRange(high=1.0)),
    **dict.fromkeys(("muon_lr", "adam_lr"), NumberRange()), "ns_steps": NumberRange(1, 99)}
ORDERED_EXTRAS = (("min_coeff", "max_coeff"), ("factor_min", "factor_max"))  # the first must not be above the second
OPTIMIZER_SWITCHES = ("amsgrad", "eps_inside_sqrt", "nesterov", "centered")  # false is accepted by all optimizers

# optimizer.type of a DeepSpeed file -> --optimizer
DEEPSPEED_TYPES = {
    "Adam": "adam", "AdamW": "adamw", "FusedAdam": "adam", "DeepSpeed_Adam": "adam", "DeepSpeedCPUAdam": "adam",
    "SGD": "sgd", "Lamb": "lamb", "FusedLamb": "lamb", "Lion": "lion", "FusedLion": "lion", "DeepSpeedCPULion": "lion",
    "Adagrad": "adagrad", "DeepSpeedCPUAdagrad": "adagrad", "RMSprop": "rmsprop", "NAdam": "nadam", "RAdam": "radam",
    "Adamax": "adamax", "Adadelta": "adadelta", "ASGD": "asgd", "Rprop": "rprop", "OneBitAdam": "onebit_adam",
    "OneBitLamb": "onebit_lamb", "Muon": "muon",
}
# Types of DeepSpeed that we do not support, in lower case -> reason.
REFUSED_TYPES = {
    **dict.fromkeys(("muadam", "muadamw", "musgd"),
                    "learning rates do not depend on a layer's width; use Adam, AdamW or SGD"),
    "adafactor": "it keeps a row and a column of a matrix in the place of its second moment, and states here have the "
                 "shape of their weights; use AdamW, or Muon",
    "zerooneadam": "0/1 Adam was retired; use OneBitAdam (onebit_adam)",
    "lbfgs": "it evaluates the loss several times a step; use Adam", "sparseadam": "gradients are dense here; use Adam",
}


def extra_param_type(name: str, default: Any) -> JsonType:
    if name in TEXT_CHOICES:
        return one_of(*TEXT_CHOICES[name])
    return NUMBER_FROM_0 if default is None else JSON_TYPE_OF[type(default)]


@dataclass(frozen=True, kw_only=True)
class OptimConfig(ConfigSection):
    """The optimizer. Weight decay applies to matrices and embeddings, not to biases and LayerNorms."""

    optimizer: OptimizerName = setting("adam", "adam and adamw are both AdamW", json=JsonKey(
        "optimizer.type", one_of(*DEEPSPEED_TYPES), lambda given: DEEPSPEED_TYPES[given], refused=REFUSED_TYPES))
    weight_decay: float = setting(
        0.01, "weight decay; decoupled from the gradient in adam, adamw and lion",
        json=JsonKey("optimizer.params.weight_decay",
                     help="in other optimizers added to the gradient (in Lamb: to the update)"),
        ge=0)
    adam_beta1: float = setting(0.9, "first moment's decay in adam, adamw, lamb, nadam, radam and adamax", "beta1",
                                ge=0, le=0.9999999)
    adam_beta2: float = setting(0.999, "second moment's decay in the same optimizers", "beta2", ge=0, le=0.9999999)
    adam_eps: float = setting(1e-8, "epsilon of the same optimizers", "adam-epsilon", gt=0)
    adam_w_mode: bool = setting(True, "adam: decoupled weight decay (--no-adam-w-mode: added to the gradient)")
    sgd_momentum: float = setting(0.9, "momentum of sgd", ge=0, le=0.9999999)
    onebit_freeze_step: str = setting(
        "100000", "steps after which the variance of onebit_adam and onebit_lamb is frozen: the momentum then travels "
        "at one bit a number; auto: once the variance has settled", metavar="N|auto",
        json=JsonKey("optimizer.params.freeze_step", COUNT, is_independent=False))
    optimizer_params: tuple[str, ...] = setting(
        (), "further parameters of the optimizer, such as nesterov=true", metavar="NAME=VALUE")
    clip_grad: float = setting(1.0, "largest global gradient norm; 0 turns clipping off", "grad-clip", "max-grad-norm",
                               "clip-grad-norm", "gradient-clipping",
                               json=JsonKey("gradient_clipping", NUMBER_FROM_0), ge=0, common=True)
    skip_step_on_spike: float | None = setting(
        None, "skip a step whose gradient norm is more than this many standard deviations above the mean of the last "
        "128 steps (6 is usual; default: skip none)", gt=0)

    def check(self, errors: ErrorList) -> None:
        freeze, optimizer = self.onebit_freeze_step, self.optimizer
        errors.require(freeze == AUTO_STEPS or freeze.isascii() and freeze.isdigit() and 0 < int(freeze) < 10**12,
                       "{onebit_freeze_step} is {freeze}: expected a number of steps from 1 on, or {auto}",
                       freeze=freeze, auto=AUTO_STEPS)
        errors.require(optimizer in OPTIMIZERS, "{optimizer} is {found}: expected {choices}", found=optimizer,
                       choices=", ".join(OPTIMIZERS))
        errors.raise_if_any()
        if not self.adam_w_mode:
            errors.require(optimizer != "adamw", "{no adam_w_mode} contradicts {optimizer=}: give {optimizer} adam")
            errors.require(optimizer not in ONE_BIT_OPTIMIZERS, "{no adam_w_mode} and {optimizer=} exclude each other: "
                           "a weight's decay cannot be added to a momentum that travels at one bit; leave it out")
            errors.require(optimizer != "muon", "{no adam_w_mode} and {optimizer=} exclude each other: its decay is "
                           "decoupled from the gradient, which is made orthogonal; leave it out")
            errors.raise_if_any()
        own = {**OPTIMIZERS[optimizer].extra, **self._parse_optimizer_params()}
        for low, high in ORDERED_EXTRAS:
            errors.require(low not in own or own[low] <= own[high],
                           "{optimizer_params} {low} {least:g} is above {high} {most:g}: it is the lower bound",
                           low=low, high=high, least=own.get(low), most=own.get(high))
        if optimizer == "rprop":
            (shrink, grow), (smallest, largest) = own["etas"], own["step_sizes"]
            errors.require(shrink < 1 < grow, "{optimizer_params} etas is [{shrink}, {grow}]: expected one below 1 and "
                           "one above it", shrink=shrink, grow=grow)
            errors.require(smallest <= largest, "{optimizer_params} step_sizes is [{smallest}, {largest}]: the first "
                           "number is above the second one", smallest=smallest, largest=largest)
        errors.require(not own.get("amsgrad") or own.get("bias_correction", True),
                       "{optimizer_params} amsgrad=true needs bias_correction=true in {name}: leave one out",
                       name=optimizer)

    @property
    def freeze_step(self) -> int | None:
        """Steps before the variance is frozen; None: determined during the run."""
        return None if self.onebit_freeze_step == AUTO_STEPS else int(self.onebit_freeze_step)

    def hyper_parameters(self) -> dict[str, Any]:
        """Hyper-parameters under torch.optim's names, without the learning rate."""
        params = OPTIMIZERS[self.optimizer]
        named = {name: tuple(getattr(self, field) for field in fields.split())
                 for name, fields in params.fields.items()}
        hyper = {name: values if len(values) > 1 else values[0] for name, values in named.items()}
        hyper |= {"weight_decay": self.weight_decay} if params.has_weight_decay else {}
        hyper.pop("adam_w_mode", None)  # selects the Adam variant
        return {**hyper, **params.extra, **self._parse_optimizer_params()}

    def _parse_optimizer_params(self) -> dict[str, Any]:
        takes, params = OPTIMIZERS[self.optimizer], dict[str, Any]()

        def require(condition: bool, problem: str) -> None:
            if not condition:
                raise ConfigError(f"--optimizer-params {name}{problem}")

        for text in self.optimizer_params:
            name, equals, value = text.partition("=")
            require(bool(equals), ": expected NAME=VALUE")
            require(name not in params, " is given twice; leave one of them out")
            if name in OPTIMIZER_SWITCHES and name not in takes.extra and value == "false":
                continue
            require(name not in takes.fields, " has a flag of its own: give "
                    + " and ".join(map(flag_name, takes.fields.get(name, "").split())))
            require(name in takes.extra, f" is not a parameter of --optimizer {self.optimizer}: expected "
                    + (", ".join(takes.extra) or "none"))
            kind, given = extra_param_type(name, takes.extra[name]), value
            try:
                given = value.strip('"') if isinstance(takes.extra[name], str) else json.loads(value)
                params[name] = kind.convert(given)
            except json.JSONDecodeError:
                require(False, f" is {value}: expected a number, true or false")
            except ValueError:
                require(False, f" is {given!r}: expected {kind.expected}")
            allowed = EXTRA_RANGES.get(name)
            numbers = params[name] if isinstance(params[name], tuple) else (params[name],)
            require(allowed is None or all(allowed.least <= number <= allowed.most for number in numbers),
                    f" is {f'{given:g}' if isinstance(given, float) else given}: expected {allowed}")
        return params


# scheduler.type -> --lr-decay-style
SCHEDULER_TYPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine",
                   "OneCycle": "one-cycle", "LRRangeTest": "range-test"}
DEFAULT_WARMUP_FRACTION = 0.01


def _scheduler_key(name: str, json_type: JsonType | None, default: str | None = None, help: str = "",
                   nullable: bool = False) -> JsonKey:
    """A parameter of the scheduler section, whose meaning depends on scheduler.type (ds_cross_keys.py)."""
    return JsonKey(f"scheduler.params.{name}", json_type, is_independent=False, nullable=nullable, default=default,
                   help=help)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(ConfigSection):
    """The learning rate: warm up, then decay until --lr-decay-iters."""

    lr: float = setting(1.5e-4, "peak learning rate", "learning-rate", common=True, ge=0, json=(
        JsonKey("optimizer.params.lr", NUMBER),
        JsonKey("scheduler.params.warmup_max_lr", NUMBER,
                help="of `WarmupLR` and `WarmupDecayLR`; the peak of `WarmupCosineLR` is the optimizer's `lr`"),
        _scheduler_key("cycle_max_lr", NUMBER, "", "of `OneCycle`")))
    min_lr: float = setting(0.0, "learning rate at the end of the decay", ge=0, common=True, json=(
        _scheduler_key("cos_min_ratio", FRACTION, "0.0001", "of `WarmupCosineLR`, as a share of the peak"),
        _scheduler_key("cycle_min_lr", NUMBER, "", "of `OneCycle`"),
        _scheduler_key("lr_range_test_min_lr", NUMBER, "0.001", "of `LRRangeTest`: the first rate")))
    lr_decay_style: Literal[
        "constant", "linear", "cosine", "exponential", "inverse-square-root", "WSD", "one-cycle", "range-test",
        "range-test-stairs"] = setting("cosine", "shape of the decay", common=True, json=(
            JsonKey("scheduler.type", one_of(*SCHEDULER_TYPES), is_independent=False, default="",
                    help="`WarmupLR`: constant; `WarmupDecayLR`: linear down to 0; `WarmupCosineLR`: cosine; "
                    "`OneCycle`: one-cycle; `LRRangeTest`: range-test"),
            _scheduler_key("lr_range_test_staircase", BOOLEAN, "false", "of `LRRangeTest`: range-test-stairs")))
    lr_decay_iters: int | None = setting(
        None, "step at which --min-lr is reached (default: --train-iters)", ge=1, json=(
            _scheduler_key("total_num_steps", COUNT, None, "of `WarmupDecayLR` and `WarmupCosineLR`", nullable=True),
            _scheduler_key("cycle_second_step_size", COUNT, None, "of `OneCycle`: the steps from the peak to the end "
                           "of the cycle; by default those before it", nullable=True),
            _scheduler_key("lr_range_test_step_size", COUNT, "2000",
                           "of `LRRangeTest`: steps in which the rate grows by `lr_range_test_step_rate`")))
    warmup: float | None = setting(None, "share of --lr-decay-iters spent warming up (default: 0.01)",
                                   "lr-warmup-fraction", "warmup-ratio", ge=0, le=1)
    lr_warmup_iters: int | None = setting(
        None, "steps spent warming up, in place of --warmup", "warmup-iters", "warmup-steps", ge=0, json=(
            _scheduler_key("warmup_num_steps", COUNT_FROM_0, "1000", "of the warm-up schedules"),
            _scheduler_key("cycle_first_step_size", COUNT, "2000",
                           "of `OneCycle`: the steps from the start to the peak")))
    warmup_type: Literal["linear", "log"] = setting(
        "linear", "shape of the warm-up; log rises fast at first",
        json=JsonKey("scheduler.params.warmup_type", default='"log"', help="the flag's own default is linear"))
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", "WSD: shape of the decay", needs={"lr_decay_style": ("WSD",)})
    lr_wsd_decay_iters: int | None = setting(None, "WSD: steps of the decay, the last ones of --lr-decay-iters", ge=1,
                                             needs={"lr_decay_style": ("WSD",)})
    cycle_decay: float = setting(0.0, "one-cycle: after the cycle the rate is --min-lr / (1 + this x steps); "
                                 "range-test: growth of the rate, as a share of --min-lr, in --lr-decay-iters steps",
                                 ge=0, json=(
                                     _scheduler_key("decay_lr_rate", NUMBER_FROM_0, "0",
                                                    "of `OneCycle`, per `decay_step_size` steps"),
                                     _scheduler_key("lr_range_test_step_rate", NUMBER, "1", "of `LRRangeTest`")))
    cycle_momentum: bool = setting(
        False, "one-cycle: move beta1 against the learning rate, with beta2 0.99",
        json=_scheduler_key("cycle_momentum", None, "true", "DeepSpeed's default for `OneCycle`"))
    cycle_min_mom: float = setting(0.8, "one-cycle: beta1 at the peak of the learning rate", ge=0, le=0.9999999,
                                   json=_scheduler_key("cycle_min_mom", None))
    cycle_max_mom: float = setting(0.9, "one-cycle: beta1 at the ends of the cycle", ge=0, le=0.9999999,
                                   json=_scheduler_key("cycle_max_mom", None))
    cycle_mom_growth: float = setting(
        0.0, "one-cycle: after the cycle beta1 is --cycle-max-mom x (1 + this x steps), below 1",
        ge=0, json=_scheduler_key("decay_mom_rate", NUMBER_FROM_0, "0", "of `OneCycle`, per `decay_step_size` steps"))
    override_lr_scheduler: bool = setting(False, "on resume, use these flags and not the checkpoint's schedule")
    use_checkpoint_lr_scheduler: bool = setting(False, "on resume, use the checkpoint's schedule and not these flags",
                                                "use-checkpoint-opt-param-scheduler")

    def check(self, errors: ErrorList) -> None:
        errors.require(self.min_lr <= self.lr, "{min_lr=} is above {lr=}")
        errors.require(self.lr_decay_style != "WSD" or self.lr_wsd_decay_iters is not None,
                       "{lr_decay_style=} needs {lr_wsd_decay_iters}: the number of steps of its decay")
        errors.require(not (self.override_lr_scheduler and self.use_checkpoint_lr_scheduler),
                       "{override_lr_scheduler} and {use_checkpoint_lr_scheduler} exclude each other: give at most one")
