"""Hyper-parameters of the param groups in a checkpoint: learning rates, betas, weight decay. Not the optimizer's state.

torch's schedulers keep the rate there and nowhere else, and so does a script that sets `group["lr"]` by hand. Those of
SCHEDULED_HYPER_PARAMETERS come with the scheduler's state, the others with the optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.errors import CheckpointError
from megatron.optim.rule import ParamGroup

SCHEDULED_HYPER_PARAMETERS = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "base_momentum", "max_momentum"})
"""What schedulers move, or keep in a group for themselves."""

RUN_SPECIFIC_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""What a group is of, and how it is computed: never another run's."""


def hyper_parameters(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Those of each group that a checkpoint can hold: numbers, texts, tensors, and lists or tuples of them."""
    return [{name: value for name, value in group.items() if name not in RUN_SPECIFIC_KEYS and _is_serializable(value)}
            for group in groups]


def check_param_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[ParamGroup], where: str) -> None:
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{where} holds the hyper-parameters of {len(saved)} param groups, the optimizer has {len(groups)}: give "
            "it the same groups, or load_optimizer_states=False and load_lr_scheduler_states=False")


def restore_param_groups(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]],
                         should_restore: Callable[[str], bool]) -> None:
    for group, values in zip(groups, saved, strict=True):
        for name, value in values.items():
            if not should_restore(name):
                continue
            current = group.get(name)
            if isinstance(current, Tensor):  # a compiled step or a scheduler holds this very tensor
                current.fill_(value)
            else:
                group[name] = value.item() if isinstance(value, Tensor) and isinstance(current, float) else value


def _is_serializable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_serializable, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)
