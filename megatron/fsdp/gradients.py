"""What a backward leaves: the fp16 loss scale, and `p.grad` as a view of this rank's segment of the gradients.

Parameters that no rank reached keep no gradient. After an overflow no rank has gradients. `p.grad` may be changed in
place, replaced, or set to None. Gradients from inside `no_sync` are shown as `UnreducedGrad`: they can be cleared, not
read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from megatron.errors import ConfigError, NumericsError
from megatron.fsdp.sharded_tensor import ParamSegment, UnreducedGrad, local_params, local_tensor, make_segment
from megatron.optim.loss_scale import LossScaleRule, LossScaleState
from megatron.zero.bucket import FlatBucket

# The largest initial scale at which a loss fits fp16; the window of clean steps is that of torch's GradScaler.
INITIAL_SCALE, SCALE_WINDOW, MIN_SCALE = 2.0**15, 2000, 1.0
MAX_OVERFLOWS_IN_A_ROW = 20


class FSDPLossScaler:
    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._rule = LossScaleRule(INITIAL_SCALE, SCALE_WINDOW, 1, MIN_SCALE, dynamic=True,
                                   is_enabled=True) if is_enabled else LossScaleRule()
        self._state = self._rule.initial_state()
        self._overflows_in_a_row = 0

    @property
    def scale(self) -> float:
        return self._state.scale

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.scale, "clean_steps": self._state.clean_steps,
                "hysteresis_left": self._state.hysteresis_left}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; a scale of 1 comes from another precision and is ignored."""
        if self.is_enabled and saved["loss_scale"] > 1:
            self._state = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])

    def update(self, overflow: bool) -> None:
        """Update the scale after a reduced backward. Raises NumericsError if it cannot fall further."""
        exhausted = overflow and self._rule.is_exhausted(self._state)
        self._state = self._rule.next_state(self._state, overflow=overflow)
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if exhausted else 0
        if self._overflows_in_a_row > MAX_OVERFLOWS_IN_A_ROW:
            raise NumericsError(f"{self._overflows_in_a_row} backwards in a row overflowed at the least loss scale "
                                f"({MIN_SCALE:g}): use bf16, or a lower learning rate")


class ParamGradViews:
    """`p.grad` of the parameters of one bucket."""

    def __init__(self, bucket: FlatBucket) -> None:
        self._bucket = bucket
        self._views: dict[int, ParamSegment] = {}

    def free_cleared_grads(self) -> None:
        """Before a forward: if the user cleared all gradients, free their memory for activations."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._views and all(parameter.grad is None for parameter in self._bucket.parameters):
                self._views = {}
                self._bucket.grads.discard()

    def take_user_grads(self) -> None:
        """Before a backward: accumulate onto what the user made of the gradients (edited, replaced or None)."""
        grads, parameters = self._bucket.grads, self._bucket.parameters
        before, self._views = self._views, {}
        with torch._C.DisableTorchFunctionSubclass():
            user_grads = [None if isinstance(one.grad, UnreducedGrad) and one.grad.is_cleared else one.grad
                          for one in parameters]
            for parameter in parameters:
                parameter.grad = None
        if all(one is None for one in user_grads):
            grads.discard()
            return
        for index, gradient in enumerate(user_grads):
            view = before.get(index)
            if gradient is None:
                if view is not None:
                    grads.zero_param_grad(index)
            elif gradient is not view:
                values = local_tensor(gradient)
                if view is None or isinstance(view, UnreducedGrad) or values.shape != local_tensor(view).shape:
                    raise ConfigError(f"{self._bucket.layout.slots[index].name}.grad was set by hand to a tensor of "
                                      f"shape {list(values.shape)} that does not replace a gradient of this model: "
                                      "change p.grad in place or multiply it, after a backward")
                local_tensor(view).copy_(values)

    def set_param_grads(self, reached: Collection[int]) -> None:
        """After a backward, with the parameters sharded: set `p.grad` of those that some rank has reached."""
        grads = self._bucket.grads
        for index, one in enumerate(local_params(self._bucket)):
            if index not in reached:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                if grads.is_reduced:
                    view = make_segment(grads.shard[one.range], one.location)
                else:
                    blank = torch.full((1,), torch.nan, dtype=one.parameter.dtype, device=one.parameter.device)
                    view = make_segment(blank.expand(local_tensor(one.parameter).shape), one.location, UnreducedGrad)
                one.parameter.grad = self._views[index] = view
