"""Hyper-parameters of the param groups in a checkpoint: learning rates, betas, weight decay. Not the optimizer's state.

torch's schedulers keep the rate there and nowhere else, and so does a script that sets `group["lr"]` by hand. Those of
SCHEDULED come with the scheduler's state, the others with the optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.errors import CheckpointError
from megatron.optim.rule import ParamGroup

SCHEDULED = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "base_momentum",
                       "max_momentum"})
"""What schedulers move, or keep in a group for themselves."""

OF_THE_RUN = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""What a group is of, and how it is computed: never another run's."""


def hyper_parameters(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Those of each group that a checkpoint can hold: numbers, texts, tensors, and lists or tuples of them."""
    return [{name: value for name, value in group.items() if name not in OF_THE_RUN and _is_plain(value)}
            for group in groups]


def check_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[ParamGroup], where: str) -> None:
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{where} holds the hyper-parameters of {len(saved)} param groups, the optimizer has {len(groups)}: give "
            "it the same groups, or load_optimizer_states=False and load_lr_scheduler_states=False")


def restore_groups(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]],
                   wanted: Callable[[str], bool]) -> None:
    for group, values in zip(groups, saved, strict=True):
        for name, value in values.items():
            if not wanted(name):
                continue
            kept = group.get(name)
            if isinstance(kept, Tensor):  # a compiled step or a scheduler holds this very tensor
                kept.fill_(value)
            else:
                group[name] = value.item() if isinstance(value, Tensor) and isinstance(kept, float) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)
