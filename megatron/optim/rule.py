"""The interface between the engine and an optimizer: an `UpdateRule` updates segments of flat shards in place.

An `UpdateSegment` is a contiguous part of a bucket's shard whose parameters share one set of hyper-parameters (a torch
param group without "params"). Masters and states are fp32; the gradient may be 16-bit, and the rule may overwrite it.
`factor` is what the gradient is multiplied by: unscaling, averaging and clipping in one number. A rule that reads only
the tensors of the step's `StepScalars` never waits for the device; the others need the host numbers. Lamb finds
parameter borders in `slot_ranges` and reduces with `sum_over_shards`; Muon uses `gather_full_params`. A 1-bit rule
(one_bit.py) replaces the gradient all-reduce once `is_compressed`: it adds what this rank sends to an error buffer, and
`step` gets the mean over ranks as the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpu.groups import Group

ParamGroup = dict[str, Any]  # as in torch.optim: "params" and the hyper-parameters they share, such as "lr"


@dataclass(frozen=True)
class SlotRange:
    """Elements [start, stop) of a segment belong to parameter number `slot` of the bucket."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class FullParam:
    """The gathered values of one parameter, of which the segment holds `local_range`."""

    name: str
    local_range: slice  # elements of the segment; never empty
    # In the parameter's logical shape, without tensor parallel partitioning or padding. May be changed in place.
    values: Tensor
    num_fused: int  # number of equal tensors concatenated along `dim`: 3 for a fused q, k, v projection
    dim: int
    local_values: Callable[[], Tensor]  # the segment's part of the current values, on the segment's device


def _no_full_params(values: Tensor) -> Iterator[FullParam]:
    raise AssertionError("the parameters of this segment cannot be gathered")


@dataclass(frozen=True)
class UpdateSegment:
    """The unit of work of a rule: 1-dimensional tensors of equal length, updated in place."""

    group: int  # index of the hyper-parameter group
    master: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]
    slot_ranges: Sequence[SlotRange]
    num_slots: int  # parameters of the bucket: the length of the argument of `sum_over_shards`
    # [slots] sums over this rank's elements -> sums over full parameters. Collective.
    sum_over_shards: Callable[[Tensor], Tensor]
    # 16-bit output for the new weights, if it is on the same device. A rule need not write it.
    lp_out: Tensor | None = None
    # [slots] maxima over this rank's elements -> maxima over full parameters. Collective.
    max_over_shards: Callable[[Tensor], Tensor] = lambda maxima: maxima
    param_names: Sequence[str] = ()  # names of the bucket's parameters, for rules that need full ones
    # Values for the segment's elements -> the full values of each parameter with elements in the segment, one parameter
    # after the other. Collective by the call itself, so a rank with an empty segment must call it too. Values are sent
    # in their own dtype: of P elements in s shards a rank sends (s - 1) / s P, and (t - 1) P more if tensor parallelism
    # splits them over t ranks.
    gather_full_params: Callable[[Tensor], Iterator[FullParam]] = _no_full_params


@dataclass(frozen=True)
class StepScalars:
    """The scalars of one step: 0-dimensional fp32 tensors on the segments' device, and host numbers if the step is
    certainly taken."""

    count: Tensor  # steps taken, including this one
    divisor: Tensor | None = None  # 1 / factor; None if the factor is 1
    skip: Tensor | None = None  # 1 to change nothing, 0 otherwise; None if the step is certainly taken
    on_host: tuple[float, int] | None = None  # (factor, steps taken without this one)

    @staticmethod
    def for_applied_step(factor: float, steps_taken: int, device: torch.device) -> StepScalars:
        """For a step that is certainly taken; `steps_taken` does not include it."""
        divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, device=device)
        return StepScalars(torch.full((), float(steps_taken + 1), device=device), divisor,
                           on_host=(factor, steps_taken))


class UpdateRule:
    """An optimizer as the engine sees it. By default the gradients are all-reduced in every step, and segments are
    updated one at a time (`step_segment`), with the step's scalars on the host."""

    # Kind of optimizer. States are not interchangeable between kinds.
    name: str
    states: tuple[str, ...]  # names of the tensors stored for each weight
    elementwise: bool  # segments may be split anywhere, and empty ones skipped
    needs_host_scalars = True  # the rule needs `StepScalars.on_host`

    @property
    def is_compressed(self) -> bool:
        """From this step on, compressed messages of each rank replace the all-reduce of gradients."""
        return False

    def bind_device(self, device: torch.device, world: Group) -> None:
        """Choose the implementation for segments on `device`. It must be the same on all ranks, or replicas would
        diverge. Collective."""

    def step(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        """Update at least one segment of one hyper-parameter group, in as few kernels as possible. True if it also
        wrote `lp_out`; otherwise the caller copies the weights there."""
        assert scalars.on_host is not None, "the step of a rule that waits is not deferred"
        factor, steps_taken = scalars.on_host
        for segment in segments:
            self.step_segment(segment, hyper, factor=factor, steps_taken=steps_taken)
        return False

    def step_segment(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                     steps_taken: int) -> None:
        """What the default `step` does with each segment; `steps_taken` does not include this step."""
        raise NotImplementedError

    def scalars(self) -> dict[str, Any]:
        """State other than tensors, as JSON values for `restore`."""
        return {}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Restore what `scalars` returned."""
