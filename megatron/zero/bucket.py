"""FlatBucket: the parameters that travel together, in flat buffers with a place that has a name.

Vocabulary
    whole     all parameters of the bucket in the working precision; every `parameter.data` is a view into it
    shard     this rank's part of `whole`: a view of it, or, where parameters are split, the only thing that lasts
    work      the shelf (homes/shelf.py) of the shard
    kept      the shelf of what lasts beside it: the masters, which are the shard in fp32 and what the optimizer
              updates, and its states. Where they would be the same numbers it is `work` itself
    grads     the gradients (gradients.py); frozen parameters have none, and no master
    shard group / replicas   the ranks a bucket is cut over / the ranks that hold the same shard

One of the two groups is always a group of one: at stage 0 the shard is everything and the replicas are all of data
parallel. This file moves numbers; *when* is decided by residency.py and passes.py, *what is split* by policy.py.

Every gather makes a new storage, and a release only drops the engine's references to it: a tensor that a user keeps
(`p.detach()`, a state dict) stays valid. What autograd saves of weights in forward is no such reference
(saved_weights.py). A parameter that is away is a placeholder (placeholder.py): used outside its unit, it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.edits import Edits
from megatron.zero.exchanges import NOTHING, ExchangeLog
from megatron.zero.gradients import FlatGradients
from megatron.zero.holders import hold, let_go
from megatron.zero.homes.descent import Descent
from megatron.zero.homes.ferry import Mark
from megatron.zero.homes.here import HereShelf
from megatron.zero.homes.shelf import HOST, WEIGHT, Homes, Shelf
from megatron.zero.initial_params import draw_run, sources_of, whole_value
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.loan import Loan, bring_home
from megatron.zero.placeholder import fill, vacate
from megatron.zero.policy import Policy, Wire
from megatron.zero.precision import Dtypes
from megatron.zero.turns import Turns
from mpu.collectives import CollectiveWork, all_gather_into, broadcast_into
from mpu.draws import Initializer
from mpu.groups import SOLO, Group


class Place(Enum):
    """Where the parameters of a bucket are."""

    AWAY = "split: each rank has its shard"
    ARRIVING = "on their way from the other ranks"
    WHOLE = "all here"


LEGAL_MOVES = {(Place.AWAY, Place.ARRIVING), (Place.ARRIVING, Place.WHOLE), (Place.WHOLE, Place.AWAY),
               (Place.WHOLE, Place.ARRIVING)}  # the last one: the optimizer has changed them


def leave_placeholders(bucket: FlatBucket) -> None:
    """The parameters of a bucket whose elements are split: using one is an error."""
    for parameter in bucket.parameters:
        vacate(parameter, bucket.nothing)


class Rounds(Protocol):
    """Rounds what a bucket's weights at work are (quantise.py)."""

    def __call__(self) -> None:
        """This rank's part, which is that of the masters. Collective."""

    def of_masters(self, part: slice, masters: Tensor) -> Tensor:
        """What a part of the masters became when it was last published."""


class FlatBucket:
    """The buffers of one unit; see the module docstring for the vocabulary."""

    is_settled, takes_writes = True, False
    is_set_aside = False
    near: Group = SOLO
    """Neighbours among which the parameters are kept split between forward and backward. (A group of one: they are
    not.)"""
    _near_part: Tensor | None = None
    rounding: Rounds | None = None
    """What is between masters and weights at work, besides their precision."""
    has_said = False
    """Other ranks know this one's states from what travelled (own_exchange.py)."""
    is_at_hand: bool
    """This rank's part of the weights at work need not be fetched."""

    def __init__(self, name: str, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], *, policy: Policy,
                 dp: Group, device: torch.device, dtypes: Dtypes, wire: Wire, turns: Turns,
                 log: ExchangeLog, homes: Homes,
                 leaves: Callable[[FlatBucket], None] = leave_placeholders, alike: bool = False) -> None:
        """`leaves` says what the parameters are while their elements are split. `alike`: all ranks have the same
        values; otherwise the first rank's are sent."""
        self.name, self.device, self._dtypes, self._wire, self._dp, self._log = name, device, dtypes, wire, dp, log
        self.leaves, self._source = leaves, SOLO if alike else dp
        self.trainable = parameters[0].requires_grad
        self._policy = policy
        self.shard_group, self.replicas = (dp, SOLO) if policy.split_optim else (SOLO, dp)
        self.layout = FlatLayout(slots, self.shard_group.size)
        self.home = homes.of_masters(self.layout.shard_numel) if self.trainable else homes.optimizer
        """Of the masters and states."""
        by_name = dict(zip((slot.name for slot in slots), parameters, strict=True))
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        self.place = Place.WHOLE
        self._ferry = homes.ferry
        self._arrival: CollectiveWork | None = None
        self._ascent: Mark | None = None  # this rank's part, from the host
        self.grads = FlatGradients(name, self.layout, self.parameters, policy=policy, owners=self.shard_group,
                                   replicas=self.replicas, device=device, dtypes=dtypes, wire=wire, turns=turns,
                                   log=log, descent=self._descent(homes))
        self.gradient_unit: Callable[[], float] = lambda: 1.0
        """What a sum of gradients is multiplied by to be their mean."""
        self._loan: Loan | None = None  # to the user
        self._has_left = self._is_vacant = False  # since the parameters were whole
        self.set_aside: set[str] = set()
        """What is on the host between two phases of a program (aside.py)."""
        self._take_over(homes)
        self._edits = Edits(self.layout, self.parameters, self.shard_group.rank)

    def _descent(self, homes: Homes) -> Descent | None:
        """Where the host updates the weights, it needs the gradients."""
        if not (self.trainable and self.home.walks_on_host) or homes.ferry is None:
            return None
        return Descent(self.layout.shard_numel, self._dtypes.grad_shard, self.device, homes.ferry, pinned=homes.pins)

    @property
    def updates_on(self) -> torch.device:
        """Where a step's arithmetic is."""
        return HOST if self.home.walks_on_host else self.device

    def join(self, name: str, prefix: str, log: ExchangeLog, turns: Turns) -> None:
        """Be one of a larger model's, which knows it by another name; before anything has been exchanged."""
        self.name, self._log, self.grads.name = name, log, name
        self.layout.rename(prefix)
        self.grads.join(log, turns)

    @property
    def log(self) -> ExchangeLog:
        return self._log

    @property
    def nothing(self) -> Tensor:
        """What is left of parameters whose elements are split: their precision and place."""
        return self._whole.new_empty(0)

    @property
    def forgets_edits(self) -> bool:
        """What is written to the parameters now is overwritten by the masters at the next step."""
        return self.keeps_masters and self._loan is None

    @property
    def keeps_masters(self) -> bool:
        """Apart from the weights at work."""
        return self.kept is not self.work

    @property
    def shard(self) -> Tensor:
        """This rank's part of the weights at work, where it need not be fetched."""
        shard = self.work.at_hand(WEIGHT)
        assert shard is not None, f"the weights of {self.name} are elsewhere"
        return shard

    @property
    def gathered(self) -> Tensor:
        """All weights at work; without elements while they are split."""
        return self._whole

    @property
    def comes_and_goes(self) -> bool:
        """The parameters are whole only while they are used."""
        return self._policy.split_params

    def _take_over(self, homes: Homes) -> None:
        """Move the values of the first rank into the flat buffers: little exists twice, and the whole fp32 model is
        never on the device."""
        work, layout = self._dtypes.work, self.layout
        self._whole = torch.zeros(0 if self.comes_and_goes else layout.numel, dtype=work, device=self.device)
        if self.comes_and_goes:
            self.place = Place.AWAY
            self.work: Shelf = homes.params.shelf(self.name, layout.shard_numel)
        else:
            self.work = HereShelf(self._span(self._whole))
        self.is_at_hand = self.work.at_hand(WEIGHT) is not None
        apart = (self.trainable or self._dtypes.keeps_frozen) and (
            work != self._dtypes.master or self._dtypes.apart or self.home.is_elsewhere or not self.is_at_hand)
        self.kept: Shelf = self.home.shelf(self.name, layout.shard_numel) if apart else self.work
        sources = sources_of(self.parameters)
        if sources is not None:
            self._draw(sources)
        else:
            self._copy_values()
        for parameter in self.parameters:
            hold(parameter, self, for_life=False)
        if self.is_here:
            self._fill()
        else:
            self.show_absent()

    def _draw(self, sources: Sequence[Initializer]) -> None:
        """Each rank draws what it keeps, and nothing is sent but to make the weights at work whole."""
        for part in self.kept.parts:
            with self.kept.open(part, [WEIGHT], writes=True) as kept:
                masters = kept[WEIGHT]
                is_there = self.kept.at_hand(WEIGHT) is not None or self._ferry is None
                wide = masters if is_there and masters.dtype == torch.float32 else torch.zeros_like(
                    masters, dtype=torch.float32, device=self.device)
                draw_run(wide, self.layout, self.shard_group.rank, part, sources)
                if masters is not wide:
                    masters.copy_(wide)
                if self.keeps_masters:
                    self.work.write(WEIGHT, part.start, wide)
        if self.is_here:
            all_gather_into(self._whole, self.shard, self.shard_group).wait()

    def _copy_values(self) -> None:
        """One parameter at a time, and one part of what this rank keeps."""
        values = self._values()
        slot, value = next(values)
        for part in self.kept.parts:
            with self.kept.open(part, [WEIGHT], writes=True) as kept:
                for segment in self.layout.segments(self.shard_group.rank, part):
                    while slot is not segment.slot:
                        slot, value = next(values)
                    start = segment.shard_offset - part.start
                    run = value.flatten()[segment.slot_offset : segment.slot_offset + segment.count]
                    kept[WEIGHT][start : start + segment.count] = run
                if self.keeps_masters:
                    self.work.write(WEIGHT, part.start, kept[WEIGHT])
        for _ in values:  # those of which other ranks keep all
            pass

    def _values(self) -> Iterator[tuple[Slot, Tensor]]:
        """Each parameter, whole; the weights at work have it as well, where they are whole. Collective."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            value = whole_value(parameter, self._source, self.device)
            if self.is_here:
                self._view(slot).copy_(value)
            yield slot, value

    def _view(self, slot: Slot) -> Tensor:
        return self._whole.as_strided(slot.shape, slot.stride, slot.offset)

    def _fill(self) -> None:
        """The parameters are views of the gathered buffer."""
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            fill(parameter, self._view(slot))

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
            self._whole = self._whole.new_empty(self.layout.numel)
            try:
                if not self.is_at_hand and self._near_part is None:
                    self._bring_own(self._span(self._whole))
                self._start_gather()
            except BaseException:  # of a drive, say: nobody may take what is there now for weights
                if self._arrival is None:
                    if self._ascent is not None:
                        self._ascent.join()
                        self._ascent = None
                    self.place = Place.AWAY
                    self._vacate()
                raise

    def _bring_own(self, own: Tensor) -> None:
        if self._ferry is None:
            self.work.read(WEIGHT, 0, own)
        else:
            self._ascent = self.work.bring(own, self._ferry.up)

    def _start_gather(self) -> None:
        self._move(Place.ARRIVING)
        self._number = self._log.note(self.name)
        if self._near_part is not None:
            part, self._near_part = self._near_part, None
            self._arrival = all_gather_into(self._whole, part, self.near, self._wire.parameters_at_a_time)
            return
        own = self.shard if self.is_at_hand else self._span(self._whole)
        with nullcontext() if self._ferry is None or self._ascent is None else self._ferry.up.leading():
            self._arrival = all_gather_into(self._whole, own, self.shard_group, self._wire.parameters_at_a_time)
        if not self._wire.overlap:
            self.await_parameters()

    def await_parameters(self) -> None:
        """Nothing is on its way to the parameters when this returns."""
        if self._arrival is not None:
            self._log.entry_awaited = self._number
            self._arrival.wait()
            self._log.entry_awaited = NOTHING
            if self._ascent is not None:
                self._ascent.join()
                self._ascent = None
            if self.place is Place.ARRIVING:  # else Ctrl-C came before the next line
                self._move(Place.WHOLE)
            self._arrival = None
            self._come_back()

    def _come_back(self) -> None:
        """What has arrived may be used."""
        if self._is_vacant:
            self._fill()
            self._is_vacant = False
        if self._has_left:
            self._edits.shift(-1)
            self._has_left = False

    def gather(self) -> None:
        """Parameters are whole when this returns."""
        self.prefetch()
        self.await_parameters()

    def leave(self, *, soon_back: bool = False) -> None:
        """Where parameters are split: keep the shard only; but what is lent stays. What will be `soon_back` may be kept
        among neighbours. What Ctrl-C has left half way is completed by the next call."""
        if not self.comes_and_goes or self._loan is not None:
            return
        if not soon_back:
            self._near_part = None
        if self.is_here:
            self.await_parameters()
            if soon_back and not self.near.is_solo:
                self._near_part = self._whole.view(self.near.size, -1)[self.near.rank].clone()
            self._edits.leave()
            self._has_left = True
            self._move(Place.AWAY)
        if self._whole.numel():
            self._vacate()

    def _vacate(self) -> None:
        """Make placeholders of the parameters. The buffer goes last: without it, all of them are."""
        self.show_absent()
        self._whole = self.nothing

    def forget_near(self) -> None:
        """The weights have changed."""
        self._near_part = None

    def show_absent(self) -> None:
        """The parameters become what they are while their elements are split."""
        self._is_vacant = True
        self.leaves(self)

    @property
    def is_vacant(self) -> bool:
        """The parameters are what they are while their elements are split."""
        return self._is_vacant

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
        for slot, parameter in zip(self.layout.slots, self.parameters) if self.is_here and not self._is_vacant else ():
            if not self._is_in_place(parameter, slot):
                raise ConfigError(
                    f"{slot.name} has left the engine's buffers (half(), to() and `p.data = ...` do this), and would "
                    "not be trained: choose fp16 or bf16 in the configuration, and edit weights in place inside "
                    "zero.GatheredParameters")

    def _is_in_place(self, parameter: Tensor, slot: Slot) -> bool:
        place = self._whole.data_ptr() + slot.offset * self._whole.element_size()
        return parameter.data_ptr() == place or not slot.numel  # torch gives no address without elements

    def has(self, tensor: Tensor) -> bool:
        """It is a view of the gathered parameters."""
        return torch._C._has_storage(tensor) and \
            tensor.untyped_storage()._cdata == self._whole.untyped_storage()._cdata

    @property
    def is_written_to(self) -> bool:
        """A user has written to a gathered parameter."""
        return self._edits.first_touched() is not None

    def heed_writes(self) -> bool:
        """Of parameters that may be written to where their shards are: whether one was, since the last call."""
        return self._edits.heed()

    def check_edits(self, *, thoroughly: bool) -> None:
        """Refuse what was written to the parameters, where it would not last (edits.py), or does not count yet."""
        if self._loan is not None:
            if self._loan.first_edited() is not None:
                self.check_not_lent("a save")
        elif self.comes_and_goes or self.keeps_masters:
            self._edits.check(None if self.comes_and_goes else self.shard, self.kept, self.of_masters,
                              thoroughly=thoroughly)

    def of_masters(self, part: slice, masters: Tensor) -> Tensor:
        """What a part of the masters is at work, in the precision of either."""
        return masters if self.rounding is None else self.rounding.of_masters(part, masters)

    def renew(self) -> None:
        """The weights at work <- the masters; on this rank, `send` is to follow."""
        if self.keeps_masters:
            self.await_parameters()  # of a step before, which come from there
            for part in self.kept.parts:
                with self.kept.open(part, [WEIGHT]) as kept:
                    self.work.write(WEIGHT, part.start, kept[WEIGHT])

    def send(self) -> None:
        """After the optimizer, and once the working copy of the shard is new: bring it to every rank that holds one."""
        if self.rounding is not None:
            self.rounding()
        if self.comes_and_goes:
            assert not self.is_here, f"{self.name} is whole, with values of before the step"
        elif self.shard_group.size > 1:
            self.await_parameters()
            self._start_gather()
        self._edits.note()

    # ---- set aside (aside.py) ---------------------------------------------------------------------------------

    def check_here(self, what: str, *needed: str) -> None:
        """Refuse to use what is set aside: these, or anything."""
        away = sorted(self.set_aside.intersection(needed) if needed else self.set_aside)
        if away:
            raise ConfigError(f"{what} while engine.offload_states() has set {', '.join(away)} aside: call "
                              "engine.reload_states() first")

    def clear_out(self) -> None:
        """The memory of the weights at work is about to go: until `move_in` the parameters are placeholders."""
        self.is_set_aside = True
        if not self.comes_and_goes:
            self._edits.shift(+1)
            self._has_left = self._is_vacant = True
            leave_placeholders(self)

    def move_in(self) -> None:
        if self.is_set_aside and not self.comes_and_goes:
            self._come_back()
        self.is_set_aside = False

    # ---- lending parameters to the user (holders.py) ----------------------------------------------------------

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return torch.Size(self.slot_of(parameter).shape)

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
        self.check_here("GatheredParameters (or what gathers like it, such as load_module_state_dict)")
        self.check_not_lent("GatheredParameters (or what gathers like it, such as load_module_state_dict)")
        if self.comes_and_goes:
            with torch._C.DisableTorchFunctionSubclass():
                self.check_edits(thoroughly=False)

    def lend(self) -> None:
        comes_for_it, self._log.purpose = not self.is_here, "GatheredParameters"
        self.gather()
        self._loan = Loan(self._whole, self.layout, self.shard_group.rank, came_for_it=comes_for_it)
        if self.keeps_masters and not self.comes_and_goes:  # what was written by hand before is an edit of this loan
            for part in self.kept.parts:
                with self.kept.open(part, [WEIGHT]) as kept:
                    self._loan.own_before[part] = self.of_masters(part, kept[WEIGHT])

    def read_master(self, start: int, out: Tensor) -> None:
        """out <- this rank's masters from `start` on. Edits of a loan count when it ends."""
        if self._loan is None or self.keeps_masters or self.comes_and_goes:
            self.kept.read(WEIGHT, start, out)
        else:
            out.copy_(self._loan.own_before[start : start + len(out)])

    def check_before_return(self, editor: int | None) -> None:
        assert self._loan is not None, f"bucket {self.name} was not lent"
        for slot, parameter in zip(self.layout.slots, self.parameters):
            if not self._is_in_place(parameter, slot):
                bring_home(slot.name, parameter, self._view(slot))
        if editor is None and (edited := self._loan.first_edited()) is not None:
            raise ConfigError(f"{edited} was edited inside GatheredParameters without modifier_rank, or by hand before "
                              "it: the edit would be lost; say which rank's edits count")

    def take_back(self, editor: int | None) -> None:
        assert self._loan is not None, f"bucket {self.name} was not lent"
        if editor is not None:
            self._log.note(f"edits of {self.name}")
            broadcast_into(self._whole, editor, self._dp).wait()
            self._loan.keep_edits(self.work, self.kept)
            if self.rounding is not None:
                self._round_edits()
        self._end(self._loan)

    def _round_edits(self) -> None:
        """What is whole is what the edited masters are at work."""
        assert self.rounding is not None
        self.renew()
        self.rounding()
        if not self.is_at_hand:
            self._bring_own(self._span(self._whole))
        self._start_gather()
        self.await_parameters()

    def check_not_lent(self, what: str) -> None:
        if self._loan is not None:
            raise ConfigError(f"{what} inside zero.GatheredParameters, which has {self.layout.slots[0].name}: edits "
                              "count when the block ends; leave it first")

    def cancel_loan(self) -> None:
        if self._loan is not None:
            self._fill()
            self._loan.undo()
            self._end(self._loan)

    def _end(self, loan: Loan) -> None:
        self._loan = None
        self._edits.note()
        if loan.came_for_it:
            self.leave()

    def give_back(self) -> None:
        """The parameters are ordinary tensors again, whole, and nobody's."""
        self.gather()
        for parameter in self.parameters:
            let_go(parameter)


def publish(buckets: Sequence[FlatBucket]) -> None:
    """Bring new masters into the weights at work, on every rank that holds them. Collective."""
    for bucket in buckets:
        bucket.renew()
        bucket.send()
