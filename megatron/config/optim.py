"""The section `optim`: which optimizer, its hyper-parameters, and clipping. Which there are: optimizers.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.config.kinds import COUNT, NUMBER_FROM_0, one_of
from megatron.config.optimizers import (AUTO_STEPS, DEEPSPEED_TYPES, ONE_BIT_OPTIMIZERS, OPTIMIZER_SWITCHES, OPTIMIZERS,
                                        REFUSED_TYPES, OptimizerName, ordering_errors, parse_extra_param)
from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, require, setting
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer. Weight decay applies to matrices and embeddings, not to biases and LayerNorms."""

    optimizer: OptimizerName = setting(
        "adam", "adam and adamw are both AdamW",
        json=JsonKey("optimizer.type", one_of(*DEEPSPEED_TYPES), lambda given: DEEPSPEED_TYPES[given],
                     refused=REFUSED_TYPES))
    weight_decay: float = setting(
        0.01, "weight decay; decoupled from the gradient in adam, adamw and lion",
        json=JsonKey("optimizer.params.weight_decay", help="otherwise added to the gradient (in Lamb: to the update)"))
    adam_beta1: float = setting(0.9, "first moment's decay in adam, adamw, lamb, nadam, radam and adamax",
                                "beta1")
    adam_beta2: float = setting(0.999, "second moment's decay in the same optimizers", "beta2")
    adam_eps: float = setting(1e-8, "epsilon of the same optimizers", "adam-epsilon")
    adam_w_mode: bool = setting(True, "adam: decoupled weight decay (--no-adam-w-mode: added to the gradient)")
    sgd_momentum: float = setting(0.9, "momentum of sgd")
    onebit_freeze_step: str = setting(
        "100000", "steps after which the variance of onebit_adam and onebit_lamb is frozen: the momentum then travels "
        "at one bit a number; auto: once the variance has settled", metavar="N|auto",
        json=JsonKey("optimizer.params.freeze_step", COUNT, is_independent=False))
    optimizer_params: tuple[str, ...] = setting(
        (), "further parameters of the optimizer, such as nesterov=true", metavar="NAME=VALUE")
    clip_grad: float = setting(1.0, "largest global gradient norm; 0 turns clipping off",
                               "grad-clip", "max-grad-norm", json=JsonKey("gradient_clipping", NUMBER_FROM_0))

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "weight_decay clip_grad", 0)
        problems.require_range(self, "adam_beta1 adam_beta2 sgd_momentum", 0, 0.9999999)
        problems.require_range(self, "adam_eps", 0, open_low=True)
        freeze = self.onebit_freeze_step
        problems.require(freeze == AUTO_STEPS or freeze.isascii() and freeze.isdigit() and 0 < int(freeze) < 10**12,
                         f"--onebit-freeze-step is {freeze}: expected a number of steps from 1 on, or {AUTO_STEPS}")
        problems.require(self.optimizer in OPTIMIZERS,
                         f"--optimizer is {self.optimizer}: expected {', '.join(OPTIMIZERS)}")
        problems.raise_if_any()
        require(self.adam_w_mode or self.optimizer != "adamw",
                "--no-adam-w-mode contradicts --optimizer adamw: give --optimizer adam")
        require(self.adam_w_mode or self.optimizer not in ONE_BIT_OPTIMIZERS,
                f"--no-adam-w-mode and --optimizer {self.optimizer} exclude each other: a weight's decay cannot be "
                "added to a momentum that travels at one bit; leave it out")
        own = self._parse_optimizer_params()
        for sentence in ordering_errors({**OPTIMIZERS[self.optimizer].extra, **own}):
            raise ConfigError(f"--optimizer-params {sentence}")
        require(not own.get("amsgrad") or own.get("bias_correction", True),
                f"--optimizer-params amsgrad=true needs bias_correction=true in {self.optimizer}: leave one out")
        if self.optimizer == "muon":
            require(self.adam_w_mode, "--no-adam-w-mode and --optimizer muon exclude each other: its decay is "
                    "decoupled from the gradient, which is made orthogonal; leave it out")

    @property
    def freeze_step(self) -> int | None:
        """Steps before the variance is frozen; None where they are to be found."""
        return None if self.onebit_freeze_step == AUTO_STEPS else int(self.onebit_freeze_step)

    def hyper_parameters(self) -> dict[str, Any]:
        """The optimizer's hyper-parameters by the names of torch.optim, without the learning rate."""
        params = OPTIMIZERS[self.optimizer]
        named = {
            name: tuple(getattr(self, field) for field in fields.split())
            for name, fields in params.fields.items()
        }
        hyper = {name: values if len(values) > 1 else values[0] for name, values in named.items()}
        hyper |= {"weight_decay": self.weight_decay} if params.has_weight_decay else {}
        hyper.pop("adam_w_mode", None)  # says which Adam it is
        return {**hyper, **params.extra, **self._parse_optimizer_params()}

    def _parse_optimizer_params(self) -> dict[str, Any]:
        """`optimizer_params`, parsed and checked."""
        found: dict[str, Any] = {}
        for text in self.optimizer_params:
            name, equals, value = text.partition("=")
            require(bool(equals), f"--optimizer-params {text}: expected NAME=VALUE")
            require(name not in found, f"--optimizer-params {name} is given twice; leave one of them out")
            if name in OPTIMIZER_SWITCHES and name not in OPTIMIZERS[self.optimizer].extra and value == "false":
                continue
            try:
                is_text = isinstance(OPTIMIZERS[self.optimizer].extra.get(name), str)
                found[name] = parse_extra_param(self.optimizer, name,
                                                value.strip('"') if is_text else json.loads(value))
            except json.JSONDecodeError:
                raise ConfigError(f"--optimizer-params {name} is {value}: expected a number, true or false") from None
            except ValueError as error:
                raise ConfigError(f"--optimizer-params {error}") from None
        return found
