"""Update rules from the configuration, and from optimizers of torch, the user's own, and DeepSpeedCPUAdam.

    build_rule(optim, tile) -> UpdateRule, defaults of a param group        from_torch(optimizer) -> UpdateRule

An optimizer becomes a `TorchRule`: a copy of it steps one tile at a time as its only parameter. State of the
parameter's shape lives in flat buffers; scalar state (`step`, ...) is kept once for each param group. The optimizer
must be elementwise: a small random matrix, split in two, must give the same bits as unsplit. Optimizers that look at
whole parameters, and hooks on `step`, are not supported. `DeepSpeedCPUAdam` is torch's Adam with DeepSpeed's arguments;
nothing is compiled.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from megatron.config.optimizer_config import OPTIMIZERS
from megatron.config.tree import OptimConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.optim.adam import MAX_TILE_NUMEL, AdamW, Lion
from megatron.optim.lamb import Lamb
from megatron.optim.muon import Muon
from megatron.optim.one_bit import OneBitAdam, OneBitLamb
from megatron.optim.rule import UpdateRule, UpdateSegment

FUSED_CLASSES = ("Adam", "AdamW", "SGD")  # torch.optim classes with a fused kernel on each kind of device


def build_rule(optim: OptimConfig, tile: int) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule, and the default hyper-parameters of a param group except the learning rate, which is the schedule's.
    Raises ConfigError if torch's optimizer refuses them."""
    hyper = optim.hyper_parameters()
    native: dict[str, Callable[[int], UpdateRule]] = {"lamb": Lamb, "lion": Lion, "muon": Muon}
    if optim.optimizer in native:
        return native[optim.optimizer](tile), hyper
    hyper.pop("freeze_step", None)  # passed from `optim` below
    if optim.optimizer == "onebit_lamb":
        return OneBitLamb(tile, freeze_step=optim.freeze_step), hyper
    if optim.optimizer == "onebit_adam":
        return OneBitAdam(tile, hyper.pop("bias_correction"), freeze_step=optim.freeze_step), hyper
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


class DeepSpeedCPUAdam(torch.optim.Adam):
    """torch's Adam with DeepSpeed's arguments; `adamw_mode` decouples the weight decay."""

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
        """Of all groups. Raises ConfigError if they differ."""
        values = {group["bias_correction"] for group in self.param_groups}
        if len(values) > 1:
            raise ConfigError("DeepSpeedCPUAdam: bias_correction differs between param groups; give all the same")
        return bool(values.pop())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """For use without an engine."""
        if not self.bias_correction:
            raise ConfigError("DeepSpeedCPUAdam: only an engine steps with bias_correction=False; give the optimizer "
                              "to zero.initialize")
        return super().step(closure)


ParamState = dict[str, Any]  # what torch.optim stores for one parameter, or the scalars among it


def from_torch(optimizer: Optimizer, tile: int = MAX_TILE_NUMEL) -> UpdateRule:
    """The rule of this optimizer, for the hyper-parameters in its param groups. Raises ConfigError if it is not
    supported."""
    try:
        ours = _native_rule(optimizer, tile)
        if ours is not None:
            _initial_state(optimizer)  # raises if it has taken steps
            return ours
        if not isinstance(optimizer, DeepSpeedCPUAdam):
            return _tested_rule(optimizer, tile)
        plain = torch.optim.Adam(optimizer.param_groups, decoupled_weight_decay=optimizer.adam_w_mode)
        plain.state = optimizer.state
        return _tested_rule(plain, tile)
    except ConfigError:
        raise
    except Exception as error:  # the optimizer may fail on 1-dimensional parameters
        raise _unsupported(optimizer, f"{type(error).__name__}: {error}") from error


class TorchRule(UpdateRule):
    elementwise = True

    def __init__(self, optimizer: Optimizer, states: Iterable[str], tile: int) -> None:
        self.name, self.states, self._tile = type(optimizer).__name__, tuple(states), tile
        self._optimizer: Optimizer = object.__new__(type(optimizer))  # a copy that steps the tensors it is given
        no_hooks = {f"_optimizer_step_{when}_hooks": OrderedDict[int, Any]() for when in ("pre", "post")}
        vars(self._optimizer).update({**vars(optimizer), **no_hooks})
        self._initial_fills, self._initial_scalars = _initial_state(optimizer)
        # Group -> steps taken -> scalars. All segments of a group start from the same ones, so the previous step's are
        # kept.
        self._scalars_by_group: dict[int, dict[int, ParamState]] = {}
        # (group, device) -> the optimizer's own types of these scalars, such as 0-dimensional tensors.
        self._scalar_templates: dict[tuple[int, torch.device], ParamState] = {}

    def step_segment(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                     steps_taken: int) -> None:
        before = self._scalars_before_step(segment, hyper, steps_taken) if steps_taken else {}
        for start in range(0, segment.master.numel(), self._tile):
            tile = slice(start, start + self._tile)
            master, flat_states = segment.master[tile], {name: flat[tile] for name, flat in segment.states.items()}
            state = {**flat_states, **_clone_scalars(before)} if steps_taken else self.initial_state(master)
            self.step_tensor(master, segment.grad[tile].to(torch.float32).mul_(factor), state, hyper)
            for name, state_tile in flat_states.items():
                if state.get(name, state_tile) is not state_tile:
                    state_tile.copy_(state[name])
            numbers, known = self._scalars_in(state), self._scalars_by_group.get(segment.group, {})
            if numbers and steps_taken + 1 not in known:  # once per step: reading synchronizes with the device
                self._scalars_by_group[segment.group] = {
                    **{steps: known[steps] for steps in known if steps == steps_taken},
                    steps_taken + 1: {name: value.item() if isinstance(value, Tensor) else value
                                      for name, value in numbers.items()}}
                self._scalar_templates[segment.group, segment.master.device] = numbers

    def initial_state(self, weights: Tensor) -> ParamState:
        """The state before the first step; empty for most optimizers, which create it in `step`."""
        return {**{name: torch.full_like(weights, fill) for name, fill in self._initial_fills.items()},
                **_clone_scalars(self._initial_scalars)}

    def step_tensor(self, weights: Tensor, grad: Tensor, state: ParamState, hyper: Mapping[str, Any]) -> None:
        """Update weights and state in place; the optimizer may also replace tensors in the state."""
        parameter = Parameter(weights)
        parameter.grad = grad
        self._optimizer.param_groups = [{**hyper, "params": [parameter]}]
        self._optimizer.state = defaultdict(dict, {parameter: state})
        type(self._optimizer).step(self._optimizer)  # torch's schedulers patch `step` on the instance
        if parameter.data_ptr() != weights.data_ptr():  # the optimizer replaced parameter.data
            weights.copy_(parameter.detach())
        self._optimizer.param_groups, self._optimizer.state = [], defaultdict(dict)

    def _scalars_before_step(self, segment: UpdateSegment, hyper: Mapping[str, Any], steps_taken: int) -> ParamState:
        """The group's scalars after `steps_taken` steps, in the optimizer's types. Raises CheckpointError if they are
        unknown."""
        place = segment.group, segment.master.device
        if place not in self._scalar_templates:  # after a restore: run a first step to see the types
            seed = torch.zeros(1, device=segment.master.device)
            state = self.initial_state(seed)
            self.step_tensor(seed, torch.zeros_like(seed), state, hyper)
            self._scalar_templates[place] = self._scalars_in(state)
        templates = self._scalar_templates[place]
        known = self._scalars_by_group.get(segment.group, {}).get(steps_taken, {})
        missing = [name for name in templates if name not in known]
        if missing:
            raise CheckpointError(
                f"{', '.join(missing)} of parameter group {segment.group} after {steps_taken} steps is not known: the "
                "checkpoint is of another optimizer; go on without its optimizer state (--no-load-optim)")
        return {name: torch.full_like(template, known[name]) if isinstance(template, Tensor)
                else type(template)(known[name]) for name, template in templates.items()}

    def _scalars_in(self, state: ParamState) -> ParamState:
        return {name: value for name, value in state.items() if name not in self.states and value is not None}

    def scalars(self) -> dict[str, Any]:
        """{"GROUP/STEPS": scalars} for groups with segments on this rank; a checkpoint merges all ranks. A rank that
        had none lately contributes an outdated, smaller STEPS, which is harmless."""
        return {f"{group}/{max(known)}": known[max(known)] for group, known in self._scalars_by_group.items()}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self._scalars_by_group = {}
        for key, numbers in scalars.items():
            group, steps = map(int, key.split("/"))
            self._scalars_by_group.setdefault(group, {})[steps] = dict(numbers)


def _native_rule(optimizer: Optimizer, tile: int) -> AdamW | None:
    """The equivalent native rule, as a configuration would select it (build_rule), or None."""
    if any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups):
        return None
    if isinstance(optimizer, DeepSpeedCPUAdam):
        if not optimizer.bias_correction:
            return AdamW(tile, bias_correction=False, decoupled=optimizer.adam_w_mode)
        return AdamW(tile) if optimizer.adam_w_mode else None
    return AdamW(tile) if type(optimizer) is torch.optim.AdamW else None


def _initial_state(optimizer: Optimizer) -> tuple[dict[str, float], ParamState]:
    """(fill value of each elementwise state, scalars) that the constructor creates for every parameter, as Adagrad's
    does. Raises ConfigError if parameters differ, as after a step."""
    found: list[tuple[dict[str, float], ParamState]] = []
    shown = [(parameter, state) for parameter, state in optimizer.state.items()
             if parameter.numel() and parameter.dim()]  # a 0-dimensional parameter has only scalar state
    for parameter, state in shown or optimizer.state.items():  # if all are 0-dimensional or empty, use those
        tensors = {name: value for name, value in state.items()
                   if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape}
        fills = {name: value.flatten()[0].item() if value.numel() else 0.0 for name, value in tensors.items()}
        numbers = {name: value for name, value in state.items() if name not in tensors}
        even = all(bool((value == fills[name]).all()) for name, value in tensors.items())
        if not even or found and (fills, numbers) != found[0]:
            raise _unsupported(optimizer,
                               "it has taken steps already, or starts parameters differently; give a new one")
        found.append((fills, numbers))
    return found[0] if found else ({}, {})


# ---- the trial ---------------------------------------------------------------------------------------------------

TRIAL_SHAPE = (16, 16)
TRIAL_STEPS = 8  # enough for every branch on the number of steps (RAdam's is after the fifth)


def _tested_rule(optimizer: Optimizer, tile: int) -> TorchRule:
    # with a nonzero learning rate: warm-ups start at 0
    groups = [{**{key: value for key, value in group.items() if key != "params"},
               "lr": float(group.get("lr", 0)) or 1e-3} for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(0)
    start, grads = (torch.randn(shape, generator=generator) for shape in (TRIAL_SHAPE, (TRIAL_STEPS, *TRIAL_SHAPE)))
    unsplit: list[tuple[Tensor, ParamState]] = []
    for hyper in groups:
        trial, weights = TorchRule(optimizer, (), tile), start.clone()
        state = trial.initial_state(weights)
        for grad in grads.clone():  # which the optimizer may overwrite
            trial.step_tensor(weights, grad, state, hyper)
        unsplit.append((weights, state))
    states = dict.fromkeys(name for _, state in unsplit for name in _elementwise_state_names(optimizer, state))
    for hyper, (weights, state) in zip(groups, unsplit, strict=True):
        rule, flat = TorchRule(optimizer, states, tile), start.flatten().clone()
        flat_states = {name: torch.zeros(len(flat)) for name in states}
        for steps_taken, grad in enumerate(grads.flatten(1).clone()):
            for half in (slice(0, len(flat) // 2), slice(len(flat) // 2, None)):
                segment = UpdateSegment(0, flat[half], grad[half],
                                        {name: flat_states[name][half] for name in states}, (), 1, lambda sums: sums)
                rule.step_segment(segment, hyper, factor=1.0, steps_taken=steps_taken)
        halves = {**flat_states, **rule.scalars().get(f"0/{TRIAL_STEPS}", {}), "": flat}
        # exact: an elementwise update rounds the same way in halves
        if not all(torch.allclose(torch.as_tensor(halves[name]).view(-1), torch.as_tensor(value).view(-1), rtol=0,
                                  atol=0, equal_nan=True)
                   for name, value in {**state, "": weights}.items() if value is not None):
            raise _unsupported(optimizer, "it does not update every weight by itself: a parameter that is cut in two "
                               "becomes another one, and ranks hold cut parameters")
    return TorchRule(optimizer, states, tile)


def _elementwise_state_names(optimizer: Optimizer, state: ParamState) -> list[str]:
    """States with one fp32 value per weight. Raises ConfigError for states that are neither that nor scalars."""
    names = []
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == TRIAL_SHAPE and value.dtype == torch.float32:
            names.append(name)
        elif not (value is None or isinstance(value, int | float) or isinstance(value, Tensor) and value.numel() == 1):
            raise _unsupported(optimizer,
                               f"its state {name!r} is neither a float32 tensor of the parameter's shape nor a number")
    return names


def _unsupported(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(f"the optimizer {type(optimizer).__name__} cannot be used here: {why}")


def _clone_scalars(scalars: ParamState) -> ParamState:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in scalars.items()}
