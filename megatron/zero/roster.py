"""Roster: whether the model still has the parameters that the engine trains, as it took them over.

What happens to a module behind the engine's back (`half()`, `load_state_dict(assign=True)`, a new layer, an unfrozen
weight) would otherwise train nothing, and no step would say so. References are compared, on the host; what was written
to the weights is the business of edits.py. What one rank finds, the others may not see: callers agree on it before they
exchange anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket

_HOW_TO_CHANGE_PARAMS = "do it before zero.initialize, or destroy() the engine and initialize again"


class ModelParamGuard:
    def __init__(self, model: nn.Module, buckets: Sequence[FlatBucket]) -> None:
        self._model, self._buckets = model, buckets
        self._trained_names = {id(p): slot.name for bucket in buckets
                               for slot, p in zip(bucket.layout.slots, bucket.parameters, strict=True)}
        self._param_ids = _collect_param_ids(model)
        self._steps = 0  # since the weights were loaded

    def veto_error(self) -> str | None:
        """What this rank has against a step; the others may see nothing of it."""
        try:
            self.check_before_step()
        except ConfigError as error:
            return str(error)
        return None

    def check_before_step(self) -> None:
        """Raise where a step would leave out a parameter of the model, or undo what was written to it. 1,200
        parameters: 1 ms on a CPU core."""
        param_ids = _collect_param_ids(self._model)
        if param_ids != self._param_ids:
            self._raise_if_trained_params_changed(param_ids)
            self._param_ids = param_ids
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                bucket.check_not_gathered_by_user("engine.step()")
                bucket.check_params_unchanged()
        self._steps += 1
        self.check_user_writes(compare_values=self._steps.bit_count() == 1)  # steps 1, 2, 4, 8 ...

    def check_user_writes(self, *, compare_values: bool) -> None:
        """Raise where something was written to a parameter that would not last."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                bucket.check_user_writes(compare_values=compare_values)

    def begin_load(self) -> None:
        self.check_before_load()
        self._steps = 0

    def check_before_load(self) -> None:
        """Raise where new weights would not reach a parameter of the model."""
        for bucket in self._buckets:
            bucket.check_not_gathered_by_user("a load")
        self.check_params_in_buffers()

    def check_params_in_buffers(self) -> None:
        """Raise where a parameter of the model is no longer in the buffers."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                if not bucket.is_offloaded:
                    bucket.check_params_in_buffer()

    def _raise_if_trained_params_changed(self, param_ids: list[int]) -> None:
        gone = self._trained_names.keys() - param_ids
        if gone:
            name = next(name for key, name in self._trained_names.items() if key in gone)
            raise ConfigError(f"{name} is another Parameter than at zero.initialize, or is gone: the engine trains the "
                              "old one (load_state_dict(assign=True) does this; engine.load_module_state_dict() loads "
                              f"weights); {_HOW_TO_CHANGE_PARAMS}")
        new = [
            name for name, p in self._model.named_parameters() if id(p) not in self._trained_names and p.requires_grad
        ]
        if new:
            raise ConfigError(f"{new[0]} came to the model after zero.initialize: the engine does not train it; add "
                              "it before, freeze it, or destroy() the engine and initialize again")


def _collect_param_ids(model: nn.Module) -> list[int]:
    """Identities of the parameters in the model, in a fixed order. (`model.parameters()` is ten times slower.)"""
    found: list[int] = []
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            found.extend(map(id, module._parameters.values()))
            waiting.extend(module._modules.values())
    return found
