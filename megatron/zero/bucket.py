"""FlatBucket: the parameters that travel together, in flat buffers with a state that has a name.

Vocabulary
    whole     all parameters of the bucket in the working precision; every `parameter.data` is a view into it
    shard     this rank's part of `whole`: a view of it, or, where parameters are split, the only thing that lasts
    master    the shard in fp32, which the optimizer updates; `shard` itself when the working precision is fp32
    grads     gradients of the whole bucket as backward leaves them; `grad_shard` is what this rank's optimizer needs
    shard group / replicas   the ranks a bucket is cut over / the ranks that hold the same shard

One of the two groups is always a group of one: at stage 0 the shard is everything and the replicas are all of data
parallel. This file moves numbers; *when* is decided by hooks.py and engine.py, *what is split* by policy.py.

A parameter that is not here has a placeholder of no elements, which fits no operation: used outside its unit, it fails
instead of broadcasting. The memory of `whole` is then given back, but its storage object lives on, because what
autograd saved in forward are views of it: gathering again for backward fills the same storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.holders import hold, let_go
from megatron.zero.layout import FlatLayout, Segment, Slot
from megatron.zero.parked import whole_value
from megatron.zero.policy import Policy, Wire
from mpu.collectives import Pending, all_gather_into, all_reduce_into, broadcast_into, reduce_scatter_into
from mpu.groups import SOLO, Group
from mpu.sinks import Claim, GradSink


class Phase(Enum):
    """Where a bucket stands in a pass."""

    SHARDED = "at rest"
    GATHERED = "whole, in use by a forward or backward"
    REDUCING = "its gradients are on their way to their owners"


LEGAL_MOVES = {
    (Phase.SHARDED, Phase.GATHERED), (Phase.GATHERED, Phase.SHARDED),
    (Phase.SHARDED, Phase.REDUCING), (Phase.GATHERED, Phase.REDUCING), (Phase.REDUCING, Phase.SHARDED),
}


@dataclass(frozen=True)
class Dtypes:
    """Precisions of a bucket: weights at work, gradients as backward leaves them, gradients as they are summed up."""

    work: torch.dtype = torch.float32
    grads: torch.dtype = torch.float32
    grad_shard: torch.dtype = torch.float32


class FlatBucket:
    """The buffers of one unit; see the module docstring for the vocabulary."""

    def __init__(self, name: str, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], *, policy: Policy,
                 dp: Group, device: torch.device, dtypes: Dtypes, wire: Wire) -> None:
        self.name, self._dtypes, self._wire, self._dp = name, dtypes, wire, dp
        self.trainable = parameters[0].requires_grad
        self._policy = policy
        self.shard_group, self.replicas = (dp, SOLO) if policy.split_optim else (SOLO, dp)
        self.layout = FlatLayout(slots, self.shard_group.size)
        by_name = dict(zip((slot.name for slot in slots), parameters, strict=True))
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        self.phase = Phase.SHARDED
        self._arrived: set[int] = set()  # gradients of this backward
        self.filled: set[int] = set()  # slots of `grads` that hold something to add to
        self._claims: dict[int, ReferenceType[_SlotClaim]] = {}  # slots that a forward has written to
        self._arrival: Pending | None = None  # parameters on their way
        self._departure: Pending | None = None  # gradients on their way
        self._grads: Tensor | None = None
        self._sum: Tensor | None = None  # where the reduction under way puts this rank's part
        self._grad_shard: Tensor | None = None
        self._lent: Tensor | None = None  # what the user was given
        self._take_over(device)

    @property
    def comes_and_goes(self) -> bool:
        """The parameters are whole only while they are used."""
        return self._policy.split_params

    def _take_over(self, device: torch.device) -> None:
        """Move the values of the first rank into the flat buffers, one parameter at a time: little exists twice, and
        the fp32 model never stands on the device."""
        work = self._dtypes.work
        self._whole = torch.zeros(self.layout.numel, dtype=work, device=device)
        self._views = [self._whole[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]
        self.is_here = not self.comes_and_goes
        if self.comes_and_goes:
            self._whole.untyped_storage().resize_(0)
        keeps_master = self.trainable and work != torch.float32
        wide = None
        if self.comes_and_goes or keeps_master:
            wide = torch.zeros(self.layout.shard_numel, dtype=torch.float32, device=device)
        own = {segment.slot.name: segment for segment in self.layout.segments(self.shard_group.rank)}
        for slot, view, parameter in zip(self.layout.slots, self._views, self.parameters, strict=True):
            value = whole_value(parameter, self._dp, device)
            if wide is not None and (part := own.get(slot.name)) is not None:
                flat = value.flatten()[part.slot_offset : part.slot_offset + part.count]
                wide[part.shard_offset : part.shard_offset + part.count] = flat
            if self.is_here:
                view.copy_(value)
            parameter.data = view if self.is_here else self._whole.new_empty(0)
            hold(parameter, self)
        self.shard = self._span(self._whole) if wide is None or self.is_here else wide.to(work)
        self.master = wide if wide is not None and keeps_master else self.shard

    def _span(self, flat: Tensor) -> Tensor:
        start = self.shard_group.rank * self.layout.shard_numel
        return flat[start : start + self.layout.shard_numel]

    def _point_parameters_at(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def _move(self, wanted: Phase) -> None:
        assert (self.phase, wanted) in LEGAL_MOVES, f"bucket {self.name} cannot go from {self.phase} to {wanted}"
        self.phase = wanted

    # ---- parameters -------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin to make the parameters whole; `gather` completes it."""
        if not self.is_here:
            self.is_here = True
            self._whole.untyped_storage().resize_(self.layout.numel * self._whole.element_size())
            self._point_parameters_at(self._views)
            self._start_gather()

    def _start_gather(self) -> None:
        self._arrival = all_gather_into(self._whole, self.shard, self.shard_group, self._wire.parameters_at_a_time,
                                        self._wire.broadcasts)
        if not self._wire.overlap:
            self.await_parameters()

    def gather(self) -> None:
        """Parameters are whole and in use when this returns."""
        if self.phase is Phase.SHARDED:
            self._move(Phase.GATHERED)
        self.prefetch()
        self.await_parameters()

    def rest(self) -> None:
        """The parameters are in use no more; they are still whole."""
        if self.phase is Phase.GATHERED:
            self._move(Phase.SHARDED)

    def leave(self) -> None:
        """Where parameters are split: keep the shard only."""
        if self.comes_and_goes and self.is_here:
            self.await_parameters()
            self._point_parameters_at([self._whole.new_empty(0)] * len(self.parameters))
            self._whole.untyped_storage().resize_(0)
            self.is_here = False

    def publish(self) -> None:
        """After the optimizer: bring the new master into the working copy, on every rank that holds one."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if not self.comes_and_goes and self.shard_group.size > 1:
            self._start_gather()

    def await_parameters(self) -> None:
        """Nothing is on its way to the parameters when this returns."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    # ---- lending parameters to the user (holders.py) ----------------------------------------------------------

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return next(view.shape for view, held in zip(self._views, self.parameters) if held is parameter)

    def lend(self) -> None:
        self.gather()
        self._lent = self._whole.clone()

    def take_back(self, editor: int | None) -> None:
        assert self._lent is not None, f"bucket {self.name} was not lent"
        if editor is not None:
            broadcast_into(self._whole, editor, self._dp).wait()
            own = self._span(self._whole)
            edited = own != self._span(self._lent)
            self.shard.copy_(own)
            self.master[edited] = own[edited].to(self.master.dtype)  # others keep the bits that `own` has not
        elif not torch.equal(self._whole.view(torch.uint8), self._lent.view(torch.uint8)):  # bits: nan is not nan
            raise ConfigError(f"parameters of {self.name} were edited inside GatheredParameters without modifier_rank: "
                              "the edits would be lost; say which rank's edits count")
        self._lent = None
        self.rest()
        self.leave()

    def give_back(self) -> None:
        """The parameters are ordinary tensors again, whole, and nobody's."""
        self.gather()
        for parameter in self.parameters:
            let_go(parameter)

    # ---- gradients --------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """All gradients of this backward have arrived."""
        return len(self._arrived) == len(self.parameters)

    def accept(self, index: int) -> bool:
        """Take the gradient of one parameter; True when it was the last one of this backward."""
        self._arrived.add(index)
        if self._wire.contiguous:
            self._pour(index)
        elif self.complete:
            self._pour_all()
        return self.complete

    def _pour(self, index: int) -> None:
        """Move a gradient that autograd left into the flat buffer."""
        grad = self.parameters[index].grad
        if grad is not None:  # otherwise a sink has it already
            self._free(index)
            view = self.grad_view(index)
            if index in self.filled:
                view.add_(grad)
            else:
                view.copy_(grad)
                self.filled.add(index)
            self.parameters[index].grad = None

    def _pour_all(self) -> None:
        for index in range(len(self.parameters)):
            self._pour(index)

    def sink(self, index: int) -> GradSink:
        """Lets the operation that makes the gradient of one parameter write it in place (mpu/sinks.py)."""
        return _SlotSink(self, index)

    def claim(self, index: int) -> _SlotClaim | None:
        """The slot for a forward to write to, where no gradient stands yet."""
        self._free(index)
        if index in self.filled:
            return None
        claim = _SlotClaim(self, index)
        self._claims[index] = ref(claim)
        return claim

    def keep_claim(self, index: int) -> None:
        """What was written to the claimed slot is its gradient so far."""
        del self._claims[index]
        self.filled.add(index)

    def total(self, index: int) -> Tensor:
        """The gradient so far, zeros if there is none."""
        self._free(index)
        view = self.grad_view(index)
        if index not in self.filled:
            view.zero_()
            self.filled.add(index)
        return view

    def _free(self, index: int) -> None:
        """Somebody needs the slot: a claim whose backward has not come, but may, takes its numbers away."""
        claim = self._claims.pop(index, None)
        if claim is not None and (alive := claim()) is not None:
            alive.move_away()

    def _free_all(self) -> None:
        for index in [*self._claims]:
            self._free(index)

    def grad_view(self, index: int) -> Tensor:
        slot = self.layout.slots[index]
        return self._grad_buffer()[slot.offset : slot.end].view(slot.shape)

    def _grad_buffer(self) -> Tensor:
        if self._grads is None:
            self._grads = torch.empty(self.layout.numel, dtype=self._dtypes.grads, device=self.shard.device)
            for start, stop in self.layout.gaps():  # the slots are written by whoever fills them
                self._grads[start:stop].zero_()
        return self._grads

    def unused(self) -> list[str]:
        """Names of the parameters no gradient has reached."""
        return [slot.name for index, slot in enumerate(self.layout.slots) if index not in self.filled]

    def reduce(self) -> None:
        """Send the gradients to their owners; parameters nobody used count as zero."""
        self._move(Phase.REDUCING)
        self._pour_all()
        self._free_all()
        grads = self._grad_buffer()
        for index, slot in enumerate(self.layout.slots):
            if index not in self.filled:
                grads[slot.offset : slot.end].zero_()
        mine = self._span(grads)
        if self._dtypes.grad_shard != self._dtypes.grads:
            mine = torch.empty_like(mine, dtype=self._dtypes.grad_shard)
        self._sum, at_a_time = mine, self._wire.gradients_at_a_time
        if self.shard_group.size == 1 and mine.dtype == grads.dtype:
            self._departure = all_reduce_into(grads, self.replicas, at_a_time=at_a_time)
        elif self._wire.scatter:
            self._departure = reduce_scatter_into(mine, grads, self.shard_group, at_a_time)
        else:
            everything = all_reduce_into(grads, self.shard_group, at_a_time=at_a_time)
            self._departure = Pending([everything], partial(_fill, mine, self._span(grads)))
        if not self._wire.overlap:
            self._departure.wait()

    def finish_reduce(self) -> None:
        """The sum over data parallel stands in `grad_shard` when this returns."""
        if self.phase is not Phase.REDUCING:
            return
        assert self._departure is not None and self._sum is not None
        self._departure.wait()
        self._move(Phase.SHARDED)
        if self._policy.split_grads:
            self._keep_shard(self._sum)
        else:
            self._grad_shard = self._sum
        self._departure = self._sum = None

    def _keep_shard(self, part: Tensor) -> None:
        """Add up the shard and give the whole gradient's memory back."""
        if self._grad_shard is None:
            self._grad_shard = part.clone()  # `part` may be a view of the whole gradient, which goes
        else:
            self._grad_shard.add_(part)
        self._grads = None
        self.filled.clear()

    @property
    def grad_shard(self) -> Tensor:
        assert self._grad_shard is not None, f"bucket {self.name} has no reduced gradient"
        return self._grad_shard

    def grad_parts(self) -> Iterator[tuple[Segment, Tensor]]:
        """(segment, its run of the reduced gradient) for everything this rank owns."""
        for segment in self.layout.segments(self.shard_group.rank):
            yield segment, self.grad_shard[segment.shard_offset : segment.shard_offset + segment.count]

    def settle_reduce(self) -> None:
        """Let a reduction under way end without using its result."""
        if self._departure is not None:
            self._departure.wait()
            self._move(Phase.SHARDED)
            self._departure = self._sum = None

    def end_backward(self) -> None:
        """Forget who has arrived; what was accumulated stays."""
        self._pour_all()
        self.finish_reduce()
        self._arrived.clear()

    def discard_grads(self) -> None:
        """The next backward starts from nothing."""
        self._free_all()
        self._arrived.clear()
        self.filled.clear()
        self._grads = self._grad_shard = None


def _fill(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


class _SlotSink:
    """The place of one parameter's gradient in its bucket."""

    def __init__(self, bucket: FlatBucket, index: int) -> None:
        self._bucket, self._index = bucket, index

    def claim(self) -> Claim | None:
        return self._bucket.claim(self._index)

    def total(self) -> Tensor:
        return self._bucket.total(self._index)


class _SlotClaim:
    """A slot that a forward has written to. If anything else needs the slot before the backward of that forward, what
    was written moves to a tensor of its own."""

    def __init__(self, bucket: FlatBucket, index: int) -> None:
        self._bucket, self._index = bucket, index
        self.place = bucket.grad_view(index)
        self._has_moved = False

    def move_away(self) -> None:
        self.place, self._has_moved = self.place.clone(), True

    def keep(self, factor: Tensor | None = None) -> None:
        if factor is not None:
            self.place.mul_(factor)
        if self._has_moved:
            self._bucket.total(self._index).add_(self.place)
        else:
            self._bucket.keep_claim(self._index)
