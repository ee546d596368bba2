"""Any elementwise optimizer of torch.optim, or of the user's own code, as a rule over flat spans.

    from_torch(optimizer) -> Rule

The optimizer never sees the model. A *worker*, a copy of it without parameters, is lent one tile of a span after the
other as its only parameter, with the tile's gradient and state, and steps it. State is of two kinds: tensors of the
parameter's shape live in the span's flat buffers (`states`); numbers (`step`, `mu_product`, ...) are kept here, once
for each hyper-parameter group.

*Elementwise* means that the update of a weight depends on no other weight. Nobody declares that, so it is tried: a
small random matrix, cut in two and stepped flat, must become what the optimizer makes of it whole.

Not here: optimizers that look at whole parameters (Lamb and Muon are rules of their own; Adafactor and LBFGS have
none). Hooks on an optimizer's `step` are not called.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron.errors import CheckpointError, ConfigError
from megatron.optim.adam import LARGEST_TILE, AdamW
from megatron.optim.cpu_adam import DeepSpeedCPUAdam
from megatron.optim.rule import OneByOne, Rule, Span

State = dict[str, Any]
"""What torch.optim keeps for one parameter, or the numbers among it."""


def from_torch(optimizer: Optimizer, tile: int = LARGEST_TILE) -> Rule:
    """The rule of this optimizer, for the hyper-parameters in its param groups; ConfigError if there can be none."""
    try:
        ours = _as_ours(optimizer, tile)
        if ours is not None:
            _initial_state(optimizer)  # refuses one that has taken steps
            return ours
        return _tried(optimizer.as_torch() if isinstance(optimizer, DeepSpeedCPUAdam) else optimizer, tile)
    except ConfigError:
        raise
    except Exception as error:  # whatever the optimizer's code raises where a parameter is one-dimensional
        raise _refusal(optimizer, f"{type(error).__name__}: {error}") from error


@final
class TorchRule(OneByOne):
    elementwise = True

    def __init__(self, optimizer: Optimizer, states: Iterable[str], tile: int) -> None:
        self.name, self.states = type(optimizer).__name__, tuple(states)
        self._worker = _Worker(optimizer)
        self._tile = tile
        self._numbers: dict[int, dict[int, State]] = {}
        """Group -> steps taken -> numbers. Every span of a group starts from the same ones, so the last are kept."""
        self._kinds: dict[tuple[int, torch.device], State] = {}
        """What the optimizer has where we keep numbers: 0-dimensional tensors, on one device or another."""

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        before = self._before(span, hyper, steps_taken) if steps_taken else {}
        for start in range(0, span.master.numel(), self._tile):
            tile = slice(start, start + self._tile)
            master, kept = span.master[tile], {name: flat[tile] for name, flat in span.states.items()}
            state = {**kept, **_copies(before)} if steps_taken else self._worker.fresh(master)
            self._worker.step(master, span.grad[tile].to(torch.float32).mul_(factor), state, hyper)
            for name, run in kept.items():
                if state.get(name, run) is not run:
                    run.copy_(state[name])
            self._after(span, state, steps_taken)

    def _before(self, span: Span, hyper: Mapping[str, Any], steps_taken: int) -> State:
        """The group's numbers after so many steps, as the optimizer has them."""
        place = span.group, span.master.device
        if place not in self._kinds:  # restored: see what a first step makes
            seed = torch.zeros(1, device=span.master.device)
            state = self._worker.fresh(seed)
            self._worker.step(seed, torch.zeros_like(seed), state, hyper)
            self._kinds[place] = self._numbers_of(state)
        kinds, known = self._kinds[place], self._numbers.get(span.group, {}).get(steps_taken, {})
        missing = [name for name in kinds if name not in known]
        if missing:
            raise CheckpointError(
                f"{', '.join(missing)} of parameter group {span.group} after {steps_taken} steps is not known: the "
                "checkpoint is of another optimizer; go on without its optimizer state (--no-load-optim)")
        return {name: _like(kind, known[name]) for name, kind in kinds.items()}

    def _after(self, span: Span, state: State, steps_taken: int) -> None:
        known = self._numbers.get(span.group, {})
        numbers = self._numbers_of(state)
        if numbers and steps_taken + 1 not in known:  # once a step is enough: reading waits for the device
            self._numbers[span.group] = {steps: known[steps] for steps in known if steps == steps_taken}
            self._numbers[span.group][steps_taken + 1] = {name: _number(value) for name, value in numbers.items()}
            self._kinds[span.group, span.master.device] = numbers

    def _numbers_of(self, state: State) -> State:
        return {name: value for name, value in state.items() if name not in self.states and value is not None}

    def scalars(self) -> dict[str, Any]:
        """Numbers by "GROUP/STEPS", for the groups that this rank has spans of. The whole is the union over ranks:
        what an idle rank still remembers has a smaller number of steps as its key, and does no harm."""
        return {f"{group}/{max(known)}": known[max(known)] for group, known in self._numbers.items()}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self._numbers = {}
        for key, numbers in scalars.items():
            group, steps = map(int, key.split("/"))
            self._numbers.setdefault(group, {})[steps] = dict(numbers)


def _as_ours(optimizer: Optimizer, tile: int) -> AdamW | None:
    """The rule of ours that does the same, as a configuration would have it (build.py)."""
    if _has_extras(optimizer):
        return None
    if isinstance(optimizer, DeepSpeedCPUAdam):
        if not optimizer.bias_correction:
            return AdamW(tile, bias_correction=False, decoupled=optimizer.adam_w_mode)
        return AdamW(tile) if optimizer.adam_w_mode else None
    return AdamW(tile) if type(optimizer) is torch.optim.AdamW else None


def _has_extras(optimizer: Optimizer) -> bool:
    return any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups)


@final
class _Worker:
    """An optimizer without parameters: it steps what it is lent."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Optimizer = object.__new__(type(optimizer))
        no_hooks = {f"_optimizer_step_{when}_hooks": OrderedDict[int, Any]() for when in ("pre", "post")}
        vars(self._optimizer).update({**vars(optimizer), **no_hooks})
        self._fills, self._numbers = _initial_state(optimizer)

    def fresh(self, weights: Tensor) -> State:
        """The state before the first step. Nearly every optimizer makes it in `step`, and then this is empty."""
        return {**{name: torch.full_like(weights, fill) for name, fill in self._fills.items()},
                **_copies(self._numbers)}

    def step(self, weights: Tensor, grad: Tensor, state: State, hyper: Mapping[str, Any]) -> None:
        """Update weights and state in place, or leave other tensors in the state."""
        parameter = Parameter(weights)
        parameter.grad = grad
        self._optimizer.param_groups = [{**hyper, "params": [parameter]}]
        self._optimizer.state = defaultdict(dict, {parameter: state})
        type(self._optimizer).step(self._optimizer)  # not what a torch scheduler may have put on the instance
        if parameter.data_ptr() != weights.data_ptr():  # the optimizer has given the parameter new data
            weights.copy_(parameter.detach())
        self._optimizer.param_groups, self._optimizer.state = [], defaultdict(dict)


def _initial_state(optimizer: Optimizer) -> tuple[dict[str, float], State]:
    """What the optimizer's constructor keeps for every parameter (Adagrad's does): a number for each weight, the same
    for all, and numbers."""
    found: list[tuple[dict[str, float], State]] = []
    shown = [(parameter, state) for parameter, state in optimizer.state.items()
             if parameter.numel() and parameter.dim()]  # of a parameter that is a number all state is numbers
    for parameter, state in shown or optimizer.state.items():  # where there is no other, any number will do
        tensors = {name: value for name, value in state.items()
                   if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape}
        fills = {name: value.flatten()[0].item() if value.numel() else 0.0 for name, value in tensors.items()}
        numbers = {name: value for name, value in state.items() if name not in tensors}
        even = all(bool((value == fills[name]).all()) for name, value in tensors.items())
        if not even or found and (fills, numbers) != found[0]:
            raise _refusal(optimizer, "it has taken steps already, or starts parameters differently; give a new one")
        found.append((fills, numbers))
    return found[0] if found else ({}, {})


# ---- the trial ---------------------------------------------------------------------------------------------------

TRIAL_SHAPE = (16, 16)
TRIAL_STEPS = 8
"""Enough for every branch on the number of steps (RAdam's is after the fifth)."""


def _tried(optimizer: Optimizer, tile: int) -> TorchRule:
    groups = [_for_trial(group) for group in optimizer.param_groups]
    wholes = [_whole(_Worker(optimizer), hyper) for hyper in groups]
    states = dict.fromkeys(name for _, state in wholes for name in _names(optimizer, state))
    for hyper, (weights, state) in zip(groups, wholes, strict=True):
        if not _same(_in_two(TorchRule(optimizer, states, tile), hyper), {**state, "": weights}):
            raise _refusal(optimizer, "it does not update every weight by itself: a parameter that is cut in two "
                           "becomes another one, and ranks hold cut parameters")
    return TorchRule(optimizer, states, tile)


def _for_trial(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group's hyper-parameters, with a learning rate that shows something: warm-ups start at 0."""
    return {**{key: value for key, value in group.items() if key != "params"}, "lr": float(group.get("lr", 0)) or 1e-3}


def _random_matrices() -> tuple[Tensor, Tensor]:
    """Weights, and a gradient for each step."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(TRIAL_SHAPE, generator=generator),
            torch.randn((TRIAL_STEPS, *TRIAL_SHAPE), generator=generator))


def _whole(worker: _Worker, hyper: Mapping[str, Any]) -> tuple[Tensor, State]:
    weights, grads = _random_matrices()
    state = worker.fresh(weights)
    for grad in grads:
        worker.step(weights, grad, state, hyper)
    return weights, state


def _in_two(rule: TorchRule, hyper: Mapping[str, Any]) -> State:
    """The same, flat and in two spans: states, numbers, and the weights under ""."""
    weights, grads = _random_matrices()
    flats = {"": weights.view(-1), **{name: torch.zeros(weights.numel()) for name in rule.states}}
    middle = weights.numel() // 2
    for steps_taken, grad in enumerate(grads):
        for half in (slice(0, middle), slice(middle, None)):
            span = Span(0, flats[""][half], grad.view(-1)[half], {name: flats[name][half] for name in rule.states},
                        (), 1, lambda sums: sums)
            rule.step(span, hyper, factor=1.0, steps_taken=steps_taken)
    return {**flats, **rule.scalars().get(f"0/{TRIAL_STEPS}", {})}


def _same(flat: State, whole: State) -> bool:
    """To the bit: where each weight is updated by itself, nothing is rounded differently."""
    return all(torch.allclose(torch.as_tensor(flat[name]).view(-1), torch.as_tensor(value).view(-1), rtol=0, atol=0,
                              equal_nan=True)
               for name, value in whole.items() if value is not None)


def _names(optimizer: Optimizer, state: State) -> list[str]:
    """The states that are one number for each weight."""
    names = []
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == TRIAL_SHAPE and value.dtype == torch.float32:
            names.append(name)
        elif not (value is None or isinstance(value, int | float) or isinstance(value, Tensor) and value.numel() == 1):
            raise _refusal(optimizer, f"its state {name!r} is neither a float32 tensor of the parameter's shape nor a "
                           "number")
    return names


def _refusal(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(f"the optimizer {type(optimizer).__name__} cannot be used here: {why}")


# ---- numbers -----------------------------------------------------------------------------------------------------


def _copies(numbers: State) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in numbers.items()}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _like(kind: Any, number: Any) -> Any:
    return torch.full_like(kind, number) if isinstance(kind, Tensor) else type(kind)(number)
