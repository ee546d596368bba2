"""FlatBucket: the parameters that travel together, in flat buffers with a place that has a name.

Vocabulary
    whole     all parameters of the bucket in the working precision; every `parameter.data` is a view into it
    shard     this rank's part of `whole`: a view of it, or, where parameters are split, the only thing that lasts
    master    the shard in fp32, which the optimizer updates; `shard` itself when the working precision is fp32
    grads     the gradients (gradients.py); frozen parameters have none, and no master
    shard group / replicas   the ranks a bucket is cut over / the ranks that hold the same shard

One of the two groups is always a group of one: at stage 0 the shard is everything and the replicas are all of data
parallel. This file moves numbers; *when* is decided by residency.py and passes.py, *what is split* by policy.py.

A parameter that is away is a placeholder (placeholder.py): used outside its unit, it raises. The memory of `whole` is
then given back, but its storage object lives on, because what autograd saved in forward are views of it: gathering
again for backward fills the same storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.drawn import draw_shard, sources_of
from megatron.zero.edits import Edits
from megatron.zero.exchanges import NOTHING, ExchangeLog
from megatron.zero.gradients import FlatGradients
from megatron.zero.holders import hold, let_go
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.placeholder import fill, vacate
from megatron.zero.policy import Policy, Wire
from megatron.zero.precision import Dtypes
from megatron.zero.turns import Turns
from megatron.zero.waiting import whole_value
from mpu.collectives import Pending, all_gather_into, broadcast_into
from mpu.groups import SOLO, Group


class Place(Enum):
    """Where the parameters of a bucket are."""

    AWAY = "split: each rank has its shard"
    ARRIVING = "on their way from the other ranks"
    WHOLE = "all here"


LEGAL_MOVES = {(Place.AWAY, Place.ARRIVING), (Place.ARRIVING, Place.WHOLE), (Place.WHOLE, Place.AWAY),
               (Place.WHOLE, Place.ARRIVING)}  # the last one: the optimizer has changed them


class FlatBucket:
    """The buffers of one unit; see the module docstring for the vocabulary."""

    is_settled = True

    def __init__(self, name: str, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], *, policy: Policy,
                 dp: Group, device: torch.device, dtypes: Dtypes, wire: Wire, turns: Turns,
                 log: ExchangeLog) -> None:
        self.name, self._dtypes, self._wire, self._dp, self._log = name, dtypes, wire, dp, log
        self.trainable = parameters[0].requires_grad
        self._policy = policy
        self.shard_group, self.replicas = (dp, SOLO) if policy.split_optim else (SOLO, dp)
        self.layout = FlatLayout(slots, self.shard_group.size)
        by_name = dict(zip((slot.name for slot in slots), parameters, strict=True))
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        self.place = Place.WHOLE
        self._arrival: Pending | None = None
        self.grads = FlatGradients(name, self.layout, self.parameters, policy=policy, owners=self.shard_group,
                                   replicas=self.replicas, device=device, dtypes=dtypes, wire=wire, turns=turns,
                                   log=log)
        self.states: Mapping[str, Tensor] = {}
        """What the optimizer keeps beside the master: name -> a tensor like it."""
        self.gradient_unit: Callable[[], float] = lambda: 1.0
        """What a sum of gradients is multiplied by to be their mean."""
        self._lent: Tensor | None = None  # what the user was given
        self._has_left = False  # since the parameters were whole
        self._came_to_be_lent = False
        self._take_over(device)
        self._edits = Edits(self.layout, self.parameters, self.shard_group.rank)

    @property
    def forgets_edits(self) -> bool:
        """What is written to the parameters now is overwritten by the masters at the next step."""
        return self.keeps_masters and self._lent is None

    @property
    def keeps_masters(self) -> bool:
        return self.master is not self.shard

    @property
    def comes_and_goes(self) -> bool:
        """The parameters are whole only while they are used."""
        return self._policy.split_params

    def _take_over(self, device: torch.device) -> None:
        """Move the values of the first rank into the flat buffers, one parameter at a time: little exists twice,
        and the whole fp32 model is never on the device."""
        work = self._dtypes.work
        self._whole = torch.zeros(self.layout.numel, dtype=work, device=device)
        self._views = [self._whole[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]
        if self.comes_and_goes:
            self._whole.untyped_storage().resize_(0)
            self.place = Place.AWAY
        keeps_master = self.trainable and work != torch.float32
        wide = None
        if self.comes_and_goes or keeps_master:
            wide = torch.zeros(self.layout.shard_numel, dtype=torch.float32, device=device)
        sources = sources_of(self.parameters)
        if sources is not None:
            draw_shard(self._span(self._whole) if wide is None else wide, self.layout, self.shard_group.rank, sources)
        own = {segment.slot.name: segment for segment in self.layout.segments(self.shard_group.rank)}
        for slot, view, parameter in zip(self.layout.slots, self._views, self.parameters, strict=True):
            value = None if sources is not None else whole_value(parameter, self._dp, device)
            if value is not None and wide is not None and (part := own.get(slot.name)) is not None:
                flat = value.flatten()[part.slot_offset : part.slot_offset + part.count]
                wide[part.shard_offset : part.shard_offset + part.count] = flat
            if self.is_here:
                if value is not None:
                    view.copy_(value)
                fill(parameter, view)
            else:
                vacate(parameter, self._whole.new_empty(0))
            hold(parameter, self)
        self.shard = self._span(self._whole) if wide is None or self.is_here else wide.to(work)
        self.master = wide if wide is not None and keeps_master else self.shard
        if sources is not None and self.is_here:  # the other shards are drawn by the other ranks
            if wide is not None:
                self.shard.copy_(wide)
            all_gather_into(self._whole, self.shard, self.shard_group).wait()

    def _span(self, flat: Tensor) -> Tensor:
        start = self.shard_group.rank * self.layout.shard_numel
        return flat[start : start + self.layout.shard_numel]

    def _move(self, wanted: Place) -> None:
        assert (self.place, wanted) in LEGAL_MOVES, f"{self.name} cannot go from {self.place} to {wanted}"
        self.place = wanted

    @property
    def is_here(self) -> bool:
        """All here, or on their way."""
        return self.place is not Place.AWAY

    # ---- parameters -------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin to make the parameters whole; `gather` completes it."""
        if not self.is_here:
            self._whole.untyped_storage().resize_(self.layout.numel * self._whole.element_size())
            for parameter, view in zip(self.parameters, self._views, strict=True):
                fill(parameter, view)
            self._start_gather()

    def _start_gather(self) -> None:
        self._move(Place.ARRIVING)
        self._number = self._log.note(self.name)
        self._arrival = all_gather_into(self._whole, self.shard, self.shard_group, self._wire.parameters_at_a_time)
        if not self._wire.overlap:
            self.await_parameters()

    def await_parameters(self) -> None:
        """Nothing is on its way to the parameters when this returns."""
        if self._arrival is not None:
            self._log.entry_awaited = self._number
            self._arrival.wait()
            self._log.entry_awaited = NOTHING
            self._arrival = None
            self._move(Place.WHOLE)
            if self._has_left:
                self._edits.shift(-1)
                self._has_left = False

    def gather(self) -> None:
        """Parameters are whole when this returns."""
        self.prefetch()
        self.await_parameters()

    def leave(self) -> None:
        """Where parameters are split: keep the shard only; but what is lent stays."""
        if self.comes_and_goes and self.is_here and self._lent is None:
            self.await_parameters()
            self._edits.shift(+1)
            self._has_left = True
            nothing = self._whole.new_empty(0)
            for parameter in self.parameters:
                vacate(parameter, nothing)
            self._whole.untyped_storage().resize_(0)
            self._move(Place.AWAY)

    def check(self) -> None:
        """Refuse parameters that are no longer what was taken over. (Nothing can be put into one that is away.)"""
        for slot, parameter in zip(self.layout.slots, self.parameters):
            if parameter.requires_grad != self.trainable:
                raise ConfigError(
                    f"{slot.name} was {'frozen' if self.trainable else 'unfrozen'} after zero.initialize, and the "
                    f"engine would {'go on changing it' if self.trainable else 'not train it'}: set requires_grad "
                    "before, or destroy() the engine and initialize again")
        self.check_places()

    def check_places(self) -> None:
        """Refuse parameters that are whole, and elsewhere than in the buffers."""
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self._views if self.is_here else ()):
            if parameter.data_ptr() != view.data_ptr():
                raise ConfigError(
                    f"{slot.name} has left the engine's buffers (half(), to() and `p.data = ...` do this), and would "
                    "not be trained: choose fp16 or bf16 in the configuration, and edit weights in place inside "
                    "zero.GatheredParameters")

    def check_edits(self, *, thoroughly: bool) -> None:
        """Refuse what was written to the parameters, where it would not last (edits.py), or does not count yet."""
        if self._lent is not None:
            if self._is_edited():
                self.check_not_lent("a save")
        elif self.comes_and_goes or self.keeps_masters:
            self._edits.check(None if self.comes_and_goes else self.shard, self.master, thoroughly=thoroughly)

    def send(self) -> None:
        """After the optimizer, and once the working copy of the shard is new: bring it to every rank that holds one."""
        if self.comes_and_goes:
            assert not self.is_here, f"{self.name} is whole, with values of before the step"
        elif self.shard_group.size > 1:
            self.await_parameters()
            self._start_gather()
        self._edits.note()

    # ---- lending parameters to the user (holders.py) ----------------------------------------------------------

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return self._views[self._index(parameter)].shape

    def describe(self, parameter: Tensor) -> str:
        slot = self.slot_of(parameter)
        return f"parameter {slot.name!r} of shape {slot.shape}"

    def slot_of(self, parameter: Tensor) -> Slot:
        return self.layout.slots[self._index(parameter)]

    def _index(self, parameter: Tensor) -> int:
        return next(index for index, held in enumerate(self.parameters) if held is parameter)

    @property
    def dp(self) -> Group:
        return self._dp

    def check_before_loan(self) -> None:
        self.check_not_lent("GatheredParameters (or what gathers like it, such as load_module_state_dict)")
        if self.comes_and_goes:
            with torch._C.DisableTorchFunctionSubclass():
                self.check_edits(thoroughly=False)

    def lend(self) -> None:
        self._came_to_be_lent, self._log.purpose = not self.is_here, "GatheredParameters"
        self.gather()
        self._lent = self._whole.clone()
        if self.keeps_masters and not self.comes_and_goes:  # what was written by hand before is an edit of this loan
            self._span(self._lent).copy_(self.master)

    def check_before_return(self, editor: int | None) -> None:
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self._views):
            if parameter.data_ptr() != view.data_ptr():  # `p.data = ...` is an edit too
                self._bring_home(slot.name, parameter, view)
        if editor is None and self._is_edited():
            raise ConfigError(f"{self._first_edited()} was edited inside GatheredParameters without modifier_rank, or "
                              "by hand before it: the edit would be lost; say which rank's edits count")

    def _bring_home(self, name: str, parameter: nn.Parameter, view: Tensor) -> None:
        if (parameter.shape, parameter.dtype) != (view.shape, view.dtype):
            raise ConfigError(f"{name} became a tensor of {parameter.dtype} and shape {list(parameter.shape)} inside "
                              f"GatheredParameters; the engine trains {view.dtype} of shape {list(view.shape)}: give "
                              "it values of that kind")
        view.copy_(parameter.detach())
        fill(parameter, view)

    def take_back(self, editor: int | None) -> None:
        assert self._lent is not None, f"bucket {self.name} was not lent"
        if editor is not None:
            self._log.note(f"edits of {self.name}")
            broadcast_into(self._whole, editor, self._dp).wait()
            own = self._span(self._whole)
            edited = own != self._span(self._lent)
            self.shard.copy_(own)
            self.master[edited] = own[edited].to(self.master.dtype)  # others keep the bits that `own` has not
        self._end_loan()

    def _is_edited(self) -> bool:
        assert self._lent is not None
        return not torch.equal(self._whole.view(torch.uint8), self._lent.view(torch.uint8))  # bits: nan is not nan

    def _first_edited(self) -> str:
        assert self._lent is not None
        now, before = self._whole.view(torch.uint8), self._lent.view(torch.uint8)
        size = self._whole.element_size()
        return next((slot.name for slot in self.layout.slots
                     if not torch.equal(*(flat[slot.offset * size : slot.end * size] for flat in (now, before)))),
                    self.name)

    def check_not_lent(self, what: str) -> None:
        if self._lent is not None:
            raise ConfigError(f"{what} inside zero.GatheredParameters, which has {self.layout.slots[0].name}: edits "
                              "count when the block ends; leave it first")

    def cancel_loan(self) -> None:
        if self._lent is not None:
            for parameter, view in zip(self.parameters, self._views):
                fill(parameter, view)
            self._whole.copy_(self._lent)
            self._end_loan()

    def _end_loan(self) -> None:
        self._lent = None
        self._edits.note()
        if self._came_to_be_lent:
            self.leave()

    def give_back(self) -> None:
        """The parameters are ordinary tensors again, whole, and nobody's."""
        self.gather()
        for parameter in self.parameters:
            let_go(parameter)


def publish(buckets: Sequence[FlatBucket], *, written: bool = False) -> None:
    """After the optimizer: bring the new masters into the working copies, on every rank that holds one. `written`:
    those of this rank's shards are there. Collective."""
    narrow = [bucket for bucket in buckets if bucket.keeps_masters and not written]
    if narrow:
        torch._foreach_copy_([bucket.shard for bucket in narrow], [bucket.master for bucket in narrow])
    for bucket in buckets:
        bucket.send()
