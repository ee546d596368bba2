"""The gradients of a bucket as the user sees them between two backwards: `p.grad` is this rank's run of the mean.

It is a view of the bucket's own: what is done to it in place counts, `None` (`zero_grad()`) forgets it, and another
tensor replaces it. A backward takes them all (`take`), since autograd would add whole gradients to them, and gives them
back with what it has added (`show`). Gradients that a backward inside `no_sync` has left unsummed are shown as well, so
that they can be forgotten, but not read (`Unsummed`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.fsdp.shard import Run, Unsummed, gradient_of, local, run_of, runs, set_gradient
from megatron.zero.bucket import FlatBucket


def check_summed(parameters: Iterable[Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        if any(isinstance(one.grad, Unsummed) for one in parameters):
            raise Unsummed.refusal()


class ShownGradients:
    """Of one bucket."""

    def __init__(self, bucket: FlatBucket) -> None:
        self._bucket = bucket
        self._shown: dict[int, Run] = {}

    def let_go_of_forgotten(self) -> None:
        """Before a forward: where all have been forgotten, their memory is for its activations."""
        if self._shown and all(gradient_of(parameter) is None for parameter in self._bucket.parameters):
            self._shown = {}
            self._bucket.grads.discard()

    def take(self) -> None:
        """Before a backward: what the user made of them counts from now on."""
        grads, parameters = self._bucket.grads, self._bucket.parameters
        given = [None if isinstance(one := gradient_of(parameter), Unsummed) and one.is_forgotten else one
                 for parameter in parameters]
        shown, self._shown = self._shown, {}
        for parameter in parameters:
            set_gradient(parameter, None)
        if all(one is None for one in given):
            grads.discard()
            return
        for index, gradient in enumerate(given):
            run = shown.get(index)
            if gradient is None:
                if run is not None:
                    grads.zero_param_grad(index)
            elif gradient is not run:
                self._replace(index, run, gradient)

    def _replace(self, index: int, run: Run | None, gradient: Tensor) -> None:
        if run is None or isinstance(run, Unsummed) or local(gradient).shape != local(run).shape:
            raise ConfigError(
                f"{self._bucket.layout.slots[index].name}.grad was set by hand to a tensor of shape "
                f"{list(local(gradient).shape)} that does not replace a gradient of this model: change p.grad in place "
                "or multiply it, after a backward")
        local(run).copy_(local(gradient))

    def show(self, reached: Collection[int]) -> None:
        """After a backward, with the parameters away: those of the parameters that some rank has `reached`."""
        grads = self._bucket.grads
        parts, summed = runs(self._bucket), grads.is_reduced
        for index in sorted(reached):
            parameter, slot = self._bucket.parameters[index], self._bucket.layout.slots[index]
            start, stop, offset = parts[index]
            run = run_of(grads.shard[start:stop], torch.Size(slot.shape), slot.name,
                         offset) if summed else Unsummed.of(parameter)
            set_gradient(parameter, run)
            self._shown[index] = run
