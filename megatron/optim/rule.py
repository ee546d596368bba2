"""The interface between the engine and an optimizer: an `UpdateRule` updates segments of flat shards in place.

An `UpdateSegment` is a contiguous part of a bucket's shard whose parameters share one set of hyper-parameters (a torch param group
without "params"). Masters and states are fp32; the gradient may be 16-bit, and the rule may overwrite it. `factor` is what the
gradient is multiplied by: unscaling, averaging and clipping in one number.
A rule that takes the step's scalars as device tensors (`StepScalars`) never waits for the device; `SegmentwiseRule` needs host
numbers. Lamb finds parameter borders in `slot_ranges` and reduces with `sum_over_shards`; Muon uses `gather_full_params`.
A 1-bit rule replaces the gradient all-reduce once `is_compressed`: it adds what this rank sends to an error buffer
(`add_compression_input`), and `step` gets the mean over ranks as the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mpu.groups import Group

ParamGroup = dict[str, Any]
"""As torch's optimizers have them: "params", and the hyper-parameters these share ("lr" is one of them)."""


def _identity(of_parts: Tensor) -> Tensor:
    return of_parts


@dataclass(frozen=True)
class SlotRange:
    """Elements [start, stop) of a span are of the parameter number `slot` of the bucket."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class FullParam:
    """Numbers of all of a parameter, of which the span has the `part`."""

    name: str
    local_range: slice
    """In the span; never empty."""
    values: Tensor
    """In the shape that the parameter has before it is cut or padded. May be changed in place."""
    num_fused: int
    """So many tensors of one shape are one behind the other along `dim`: q, k and v of a fused projection."""
    dim: int
    _read_local_values: Callable[[], Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Each of those that are joined, as views of `values`."""
        return self.values.chunk(self.num_fused, self.dim)

    def local_values(self) -> Tensor:
        """Of the values as they are now, those of the part; on the device of the span."""
        return self._read_local_values()


def _no_full_params(values: Tensor) -> Iterator[FullParam]:
    raise AssertionError("a span that nobody can bring together")


@dataclass(frozen=True)
class UpdateSegment:
    """One piece of work for a rule; the tensors are one-dimensional, of one length, and updated in place."""

    group: int
    """Number of the hyper-parameter group."""
    master: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]
    slot_ranges: Sequence[SlotRange]
    num_slots: int
    """Parameters of the bucket: the length of what `total` takes."""
    sum_over_shards: Callable[[Tensor], Tensor]
    """[slots] sums over this rank's parts -> sums over whole parameters. Collective."""
    lp_out: Tensor | None = None
    """Where the new weights are wanted in 16 bits, if that is on the same device. Only `step_many` may write there."""
    max_over_shards: Callable[[Tensor], Tensor] = _identity
    """[slots] maxima over this rank's parts -> maxima over whole parameters. Collective."""
    param_names: Sequence[str] = ()
    """Those of the bucket's parameters, where the rule looks at whole ones."""
    gather_full_params: Callable[[Tensor], Iterator[FullParam]] = _no_full_params
    """A number for each of the span's -> all numbers of every parameter that the span has a part of, one parameter
    after the other. Collective, by the call and not by what comes of it: a rank with an empty span calls it, too. The
    numbers travel as they are given, in as many bytes as weights of their precision that are gathered: of P numbers in
    s shards a rank sends (s - 1) / s P, and (t - 1) P more where tensor parallelism cuts them over t ranks."""


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step, as 0-dimensional fp32 tensors on the device of the spans."""

    count: Tensor
    """Steps behind the states once this one is taken."""
    divisor: Tensor | None = None
    """1 / factor; None where the gradients are right as they are."""
    skip: Tensor | None = None
    """1 where nothing is to change, 0 otherwise; None where the step is known to be taken."""

    @staticmethod
    def for_applied_step(factor: float, steps_taken: int, device: torch.device) -> StepScalars:
        """For a step that is known to be taken."""
        divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, device=device)
        return StepScalars(torch.full((), float(steps_taken + 1), device=device), divisor)


@dataclass(frozen=True)
class CompressionInput:
    """A part of a bucket whose parameters share their hyper-parameters, as one rank has it: whole."""

    error_buffer: Tensor
    """fp32; what is to travel is added to it."""
    grad: Tensor
    """What this rank made, of any precision."""
    read_first_state: Callable[[], Tensor]
    """The first of the rule's states, in fp32. It may have to be fetched, and is not to be written to."""


class UpdateRule(Protocol):
    """`states` names the tensors kept beside each weight."""

    @property
    def name(self) -> str:
        """What kind of optimizer this is; states of one kind mean nothing to another."""

    @property
    def states(self) -> tuple[str, ...]: ...

    @property
    def elementwise(self) -> bool:
        """Spans may be cut anywhere, and empty ones left out."""

    @property
    def needs_host_scalars(self) -> bool:
        """It wants the numbers of a step on the host: `step_many` raises."""

    @property
    def supports_compression(self) -> bool:
        """Something else than the sum may travel some day; its states are then on the device."""

    @property
    def is_compressed(self) -> bool:
        """What each rank says of its gradients travels, not their sum: at this step, and at all that follow."""

    @property
    def compression_note(self) -> str:
        """What travels now, and why."""

    @property
    def compression_mask_state(self) -> str:
        """The state that is 0 where there never was a gradient; nothing is said there."""

    def begin_step(self, steps_taken: int, groups: Sequence[ParamGroup], sum_of_state: Callable[[str], float]) -> None:
        """Another step begins, after `taken` ones: decide what travels. `gpt2_size` a state is its sum over the whole
        model; collective, so all ranks ask it or none. A step that was skipped begins again."""

    def add_compression_input(self, target: CompressionInput, hyper: Mapping[str, Any], *, factor: float) -> None:
        """Add to what is owed. `factor` makes this rank's gradient of `grad`."""

    def bind_device(self, device: torch.device, world: Group) -> None:
        """Choose how spans on `device` are updated, where that is a choice: alike on all ranks, or copies of one weight
        would drift apart. Collective."""

    def step(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        """Update the span after `steps_taken` steps before this one."""

    def step_many(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        """Update spans of one hyper-parameter group, at least one, with as few operations as can be. True: the new
        weights are in `narrow` too. False: whoever wants them there copies them."""

    def scalars(self) -> dict[str, Any]:
        """State other than tensors, as JSON values; what `restore` is given."""

    def restore(self, scalars: Mapping[str, Any]) -> None: ...


class AllReducedRule:
    """Part of a rule whose gradients are summed over the ranks, at every step."""

    supports_compression = is_compressed = False
    compression_mask_state = compression_note = ""

    def scalars(self) -> dict[str, Any]:
        return {}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """There is nothing to restore."""

    def begin_step(self, steps_taken: int, groups: Sequence[ParamGroup], sum_of_state: Callable[[str], float]) -> None:
        """Nothing changes."""

    def add_compression_input(self, target: CompressionInput, hyper: Mapping[str, Any], *, factor: float) -> None:
        raise AssertionError(f"the gradients of {type(self).__name__} are summed")


class SegmentwiseRule(AllReducedRule):
    """Part of a rule that steps one span after the other, by numbers on the host."""

    needs_host_scalars = True

    def bind_device(self, device: torch.device, world: Group) -> None:
        """There is one way."""

    def step_many(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        raise AssertionError(f"{type(self).__name__} steps one span at a time, by numbers on the host")
