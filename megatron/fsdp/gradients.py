"""The gradients of a bucket as the user sees them between two backwards: `p.grad` is this rank's run of the mean.

It is a view of the bucket's own: what is done to it in place counts, `None` (`zero_grad()`) forgets it, and another
tensor replaces it. A backward takes them all (`take`), since autograd would add whole gradients to them, and gives them
back with what it has added (`show`). Gradients that a backward inside `no_sync` has left unsummed are shown as well, so
that they can be forgotten, but not read (`UnreducedGrad`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.fsdp.shard import (ParamSegment, UnreducedGrad, gradient_of, local_tensor, make_segment, param_ranges,
                                 set_gradient)
from megatron.zero.bucket import FlatBucket


def check_grads_are_reduced(parameters: Iterable[Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        if any(isinstance(one.grad, UnreducedGrad) for one in parameters):
            raise UnreducedGrad.error()


class ParamGradViews:
    """Of one bucket."""

    def __init__(self, bucket: FlatBucket) -> None:
        self._bucket = bucket
        self._views: dict[int, ParamSegment] = {}

    def free_cleared_grads(self) -> None:
        """Before a forward: where all have been forgotten, their memory is for its activations."""
        if self._views and all(gradient_of(parameter) is None for parameter in self._bucket.parameters):
            self._views = {}
            self._bucket.grads.discard()

    def take_user_grads(self) -> None:
        """Before a backward: what the user made of them counts from now on."""
        grads, parameters = self._bucket.grads, self._bucket.parameters
        user_grads = [None if isinstance(one := gradient_of(parameter), UnreducedGrad) and one.is_cleared else one
                      for parameter in parameters]
        shown, self._views = self._views, {}
        for parameter in parameters:
            set_gradient(parameter, None)
        if all(one is None for one in user_grads):
            grads.discard()
            return
        for index, gradient in enumerate(user_grads):
            run = shown.get(index)
            if gradient is None:
                if run is not None:
                    grads.zero_param_grad(index)
            elif gradient is not run:
                self._copy_replacement(index, run, gradient)

    def _copy_replacement(self, index: int, view: ParamSegment | None, gradient: Tensor) -> None:
        if view is None or isinstance(view, UnreducedGrad) or local_tensor(gradient).shape != local_tensor(view).shape:
            raise ConfigError(
                f"{self._bucket.layout.slots[index].name}.grad was set by hand to a tensor of shape "
                f"{list(local_tensor(gradient).shape)} that does not replace a gradient of this model: change p.grad in place "
                "or multiply it, after a backward")
        local_tensor(view).copy_(local_tensor(gradient))

    def set_param_grads(self, reached: Collection[int]) -> None:
        """After a backward, with the parameters away: those of the parameters that some rank has `reached`."""
        grads = self._bucket.grads
        ranges, summed = param_ranges(self._bucket), grads.is_reduced
        for index in sorted(reached):
            parameter, slot = self._bucket.parameters[index], self._bucket.layout.slots[index]
            start, stop, offset = ranges[index]
            run = make_segment(grads.shard[start:stop], torch.Size(slot.shape), slot.name,
                               offset) if summed else UnreducedGrad.for_param(parameter)
            set_gradient(parameter, run)
            self._views[index] = run
