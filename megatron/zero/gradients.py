"""FlatGradients: the gradients of one bucket, from autograd to the sum over data parallel.

    whole    gradients of all parameters of the bucket, in slots of one flat buffer; made with the first one
    shard    this rank's part of their sum over data parallel: what its optimizer needs

They arrive one by one (`accept`), or the operation that computes them writes them in place (`sink`). On a CPU each is
poured into the buffer as it comes, while it is in the cache; on an accelerator all of them at once, by one operation.
Once all have arrived they are sent (`reduce`); `finish_reduce` waits for the sum. Where gradients are split, the shard
accumulates over micro-batches and the whole is a buffer that another bucket uses next (turns.py); elsewhere the whole
accumulates, and is sent at the accumulation boundary. A shard that the host needs goes down as soon as it is there
(homes/descent.py), and the whole is given back. Until the sum is taken `parameter.grad` is a view of the whole, where
autograd can add to that: in equal precision. What the user makes of it counts (`heed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.errors import ConfigError
from megatron.zero.exchanges import NO_SUM, ExchangeLog
from megatron.zero.homes.descent import Descent
from megatron.zero.homes.ferry import Mark
from megatron.zero.layout import FlatLayout
from megatron.zero.policy import Policy, Wire
from megatron.zero.precision import Dtypes
from megatron.zero.turns import Buffer, Turns
from mpu.collectives import CollectiveWork, all_reduce_into, reduce_scatter_into
from mpu.device import on_accelerator
from mpu.grads import row_norms
from mpu.groups import Group
from mpu.sinks import MainGrad, MainGradReservation

UNSEEN = ("at ZeRO stage 3 what a block computes must leave it in its output (tensors, or tuples, lists, dicts or "
          "dataclasses of them), not as an attribute that is read later or inside another object, and its parameters "
          "are used in its forward alone; return it, or use stage 2")


class FlatGradients:
    def __init__(self, name: str, layout: FlatLayout, parameters: Sequence[nn.Parameter], *, policy: Policy,
                 owners: Group, replicas: Group, device: torch.device, dtypes: Dtypes, wire: Wire,
                 turns: Turns, log: ExchangeLog, descent: Descent | None = None) -> None:
        self.name, self.layout, self.parameters = name, layout, parameters
        self._accumulates_shard, self._leaves_when_complete = policy.split_grads, policy.split_params
        self._owners, self._replicas = owners, replicas
        self._device, self._dtypes, self._wire = device, dtypes, wire
        self._turns, self._log, self._descent = turns, log, descent
        self._pours_each = wire.contiguous and not on_accelerator(device)
        self._lends_views = not policy.split_grads and dtypes.grads == dtypes.work
        self._lent: set[int] = set()  # slots that `parameter.grad` is a view of
        self._arrived: set[int] = set()  # parameters whose gradient of this backward is here
        self._reached: set[int] = set()  # parameters that got a gradient since the last `discard`
        self.filled: set[int] = set()  # slots that hold something to add to
        self._has_left = False  # reduced in this backward
        self.is_final = False
        """The backward that ends a step has run, and the shard holds all gradients of the step."""
        self._keeps_shard = policy.split_grads  # what is reduced next is added to the shard
        self.stays = False
        """What another exchange than this one is to send: each rank keeps its own, whole."""
        self.predivide, self.per_sum = wire.predivide, 1.0
        """What a sum over data parallel is multiplied by before it counts."""
        self._claims: dict[int, ReferenceType[SlotClaim]] = {}  # slots that a forward has written to
        self._departure: CollectiveWork | None = None  # the reduction under way
        self._sum: Tensor | None = None  # where it puts this rank's part
        self.hooks: list[RemovableHandle] = []
        """By which gradients are reported to `accept`, which takes them away."""
        self._whole: Buffer | None = None
        self._kind = dtypes.grads
        """Of the whole."""
        self._shard: Tensor | None = None

    def join(self, log: ExchangeLog, turns: Turns) -> None:
        """Be one of an engine's; before anything has been sent."""
        self._log, self._turns = log, turns

    # ---- arriving -----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """All gradients of this backward have arrived."""
        return len(self._arrived) == len(self.parameters)

    def accept(self, index: int) -> bool:
        """Take the gradient of one parameter; True when it was the last one of this backward."""
        self._reach(index)
        self._arrived.add(index)
        complete = self.complete
        if self._pours_each:
            self._pour([index])
        elif complete:
            self._pour(self._arrived)
        return complete

    def _reach(self, index: int) -> None:
        """Note a gradient of the parameter; an error where it would miss the sum."""
        if index in self._arrived and (self._has_left or self._leaves_when_complete and self.complete):
            raise ConfigError(
                f"{self.layout.slots[index].name} got a second gradient in one backward, after those of its "
                "block were complete: a block that is used twice cannot be recomputed with use_reentrant=True; give "
                "torch.utils.checkpoint use_reentrant=False, or use megatron.recompute.checkpoint")
        if self._has_left:
            raise ConfigError(
                f"{self.layout.slots[index].name} got its gradient after the backward of its block, whose gradients "
                f"had been summed over the ranks: {UNSEEN}")
        self._reached.add(index)

    def _pour(self, indices: Iterable[int]) -> None:
        """Move gradients that autograd left into the flat buffer."""
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index in indices:
            parameter = self.parameters[index]
            grad = parameter.grad
            if grad is None:  # a sink has it already
                continue
            self._free(index)
            if grad.is_sparse:  # of an embedding with sparse=True
                grad = grad.to_dense()
            view = self._buffer().views[index]
            if grad is not view:  # autograd has added to it where it is
                views, grads = more if index in self.filled else fresh
                views.append(view)
                grads.append(grad)
                self.filled.add(index)
                parameter.grad = None
                self._lend(index)
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        if more[0]:
            torch._foreach_add_(*more)

    def _pour_rest(self) -> None:
        """Of a backward that did not reach all parameters."""
        if not self._pours_each and not self.complete:
            self._pour(self._arrived)

    def _lend(self, index: int) -> None:
        if self._lends_views:
            self.parameters[index].grad = self.view(index)
            self._lent.add(index)

    def heed(self) -> None:
        """Between backwards: what the user did to `parameter.grad` counts where it is a view, and is refused where it
        is not, since nobody would look at it."""
        with torch._C.DisableTorchFunctionSubclass():  # placeholders have gradients too
            for index, parameter in enumerate(self.parameters):
                grad = parameter.grad
                if index in self._lent:
                    if grad is not self.view(index):
                        self._replace(index, grad)
                elif grad is not None:
                    raise ConfigError(
                        f"{self.layout.slots[index].name}.grad was set by hand, where the engine does not look: call "
                        "safe_set_full_grad(parameter, value) of megatron.zero.utils after the last backward of a "
                        "step, or engine.zero_grad() to forget it")

    def _replace(self, index: int, grad: Tensor | None) -> None:
        if grad is None:
            self.view(index).zero_()
        else:
            self.view(index).copy_(grad)
        self._lend(index)

    def _take_back(self) -> None:
        """What is in the buffer is no longer the gradients of this rank, and what autograd still has is not needed."""
        if self._lent or self._arrived and not (self._pours_each or self.complete):
            self._clear()

    def _clear(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None
        self._lent.clear()

    def sink(self, index: int) -> MainGrad:
        """Lets the operation that makes the gradient of one parameter write it in place (mpu/sinks.py)."""
        return SlotSink(self, index)

    def claim(self, index: int) -> SlotClaim | None:
        """The slot for a forward to write to, where there is no gradient yet."""
        self._free(index)
        if index in self.filled or self._is_summed_in_place:
            return None
        claim = SlotClaim(self, index, self.view(index))
        self._claims[index] = ref(claim)
        return claim

    def keep_claim(self, index: int) -> None:
        """What was written to the claimed slot is its gradient so far."""
        self._reach(index)
        del self._claims[index]
        self.filled.add(index)
        self._show(index)

    def total(self, index: int) -> Tensor:
        """The gradient so far, zeros if there is none."""
        self._reach(index)
        self._free(index)
        view = self.view(index)
        if index not in self.filled:
            view.zero_()
            self.filled.add(index)
        self._show(index)
        return view

    def _show(self, index: int) -> None:
        """What an operation writes in place, to hooks of a user: autograd sees no gradient."""
        hooks = self.hooks[index].hooks_dict_ref()
        if hooks is not None and len(hooks) > 1 and self._kind == self._dtypes.work:
            self.parameters[index].grad = self.view(index)
            self._lent.add(index)

    def _free(self, index: int) -> None:
        """The slot is needed: the numbers of a claim whose backward has not run yet, but may, are moved out of it."""
        claim = self._claims.pop(index, None)
        if claim is not None and (alive := claim()) is not None:
            alive.move_away()

    def _free_all(self) -> None:
        for index in [*self._claims]:
            self._free(index)

    def _own(self, flat: Tensor) -> Tensor:
        start = self._owners.rank * self.layout.shard_numel
        return flat[start : start + self.layout.shard_numel]

    def view(self, index: int) -> Tensor:
        return self._buffer().views[index]

    def _buffer(self) -> Buffer:
        if self._whole is None:
            new = self._turns.take if self._accumulates_shard else Buffer.of
            self._whole = new(self.layout, self._kind, self._device)
        return self._whole

    def _drop_buffer(self, leaves: Mark | None = None) -> None:
        """The whole is not needed any more, but for the copy that `leaves`."""
        if self._whole is not None and self._accumulates_shard:
            self._turns.give(self.layout, self._whole, leaves)
        self._whole = None

    @property
    def is_empty(self) -> bool:
        """No gradient has reached the bucket since the last step."""
        return not self._reached

    def unused(self) -> list[str]:
        """Names of the parameters that no gradient has reached since the last step."""
        return [slot.name for index, slot in enumerate(self.layout.slots) if index not in self._reached]

    # ---- leaving ------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Send the gradients to their owners; parameters nobody used count as zero."""
        assert self._departure is None, f"the gradients of {self.name} are on their way already"
        self._pour_rest()
        self._take_back()
        self._has_left = True
        self._free_all()
        grads = self._buffer().flat
        for index, slot in enumerate(self.layout.slots):
            if index not in self.filled:
                grads[slot.offset : slot.end].zero_()
        if self.stays:
            self._shard = grads
            return
        if self._wire.predivide != 1:
            grads.mul_(1 / self._wire.predivide)
        if self._descent is not None and self._shard is not None:
            self._descent.expect()
        self._number = self._log.begin_sum(self.name)
        mine = self._own(grads)
        stays = self._keeps_shard and self._shard is None and self._descent is None  # when the whole gradient goes
        if stays and self._owners.size > 1 or self._dtypes.grad_shard != grads.dtype:
            mine = torch.empty_like(mine, dtype=self._dtypes.grad_shard)
        self._sum, self._departure = mine, self._send(grads.to(self._dtypes.sent or grads.dtype), mine)
        if not self._wire.overlap:
            self._await(self._departure)

    def _await(self, departure: CollectiveWork) -> None:
        self._log.sum_awaited = self._number, self.name
        departure.wait()
        self._log.sum_awaited = NO_SUM

    def _send(self, grads: Tensor, mine: Tensor) -> CollectiveWork:
        """mine <- this rank's part of the sum of every rank's `grads`."""
        at_a_time = self._wire.gradients_at_a_time
        if self._owners.size > 1 and self._wire.scatter:
            return reduce_scatter_into(mine, grads, self._owners, at_a_time, self._dtypes.summed)
        group = self._replicas if self._owners.size == 1 else self._owners
        own, everything = self._own(grads), all_reduce_into(grads, group, "sum", at_a_time, self._dtypes.summed)
        if own.data_ptr() == mine.data_ptr():
            return everything
        return CollectiveWork([everything], partial(mine.copy_, own))

    def finish_reduce(self) -> None:
        """The sum over data parallel is in `shard` when this returns."""
        if self._departure is None or self._sum is None:
            return
        self._await(self._departure)
        part, self._departure, self._sum = self._sum, None, None  # frees what the others sent before more is allocated
        if self.per_sum != 1.0:
            part.mul_(self.per_sum)
        if self._descent is not None:
            self._bring_down(part, self._descent)
        elif self._keeps_shard:
            self._keep_shard(part)
        else:
            self._shard = part

    def _keep_shard(self, part: Tensor) -> None:
        """Add up the shard and give the whole gradient's memory back."""
        if self._shard is not None:
            self._shard.add_(part)
            self._drop_buffer()
        elif self._is_in_buffer(part):  # which is the shard's from now on
            self._shard, self._whole = part, None
        else:
            self._shard = part
            self._drop_buffer()
        self.filled.clear()

    def _bring_down(self, part: Tensor, descent: Descent) -> None:
        leaves = descent.bring(part)
        self._drop_buffer(leaves if self._is_in_buffer(part) else None)
        self._shard, self._keeps_shard = part.new_empty(0), True  # it is where the descent has it
        self.filled.clear()

    def _is_in_buffer(self, part: Tensor) -> bool:
        return self._whole is not None and \
            part.untyped_storage().data_ptr() == self._whole.flat.untyped_storage().data_ptr()

    @property
    def reached(self) -> frozenset[int]:
        """The parameters that got a gradient since the last step."""
        return frozenset(self._reached)

    def forget(self, index: int) -> None:
        """This parameter has no gradient: neither in the sums so far, nor in what is still to be summed."""
        slot = self.layout.slots[index]
        if self._shard is not None:
            for segment in self.layout.segments(self._owners.rank):
                if segment.slot is slot:
                    self.shard[segment.shard_offset : segment.shard_offset + segment.count].zero_()
        if index in self.filled:
            self.view(index).zero_()
        self._reached.discard(index)

    @property
    def shard(self) -> Tensor:
        """On the side where the weights are updated."""
        assert self._shard is not None, f"{self.name} has no reduced gradient"
        return self._shard if self._descent is None else self._descent.sums

    @property
    def sums(self) -> Tensor:
        """`shard`, for whoever wants sums over the ranks and nothing else."""
        assert not self.stays, f"the gradients of {self.name} are each rank's own"
        return self.shard

    def put(self, shard: Tensor) -> None:
        """What has come of the gradients that stayed: the owner's part, for the update."""
        self._clear()
        self._shard = shard

    def hand_over(self) -> Tensor:
        """The shard on the host, for an update that goes on beside the next backward."""
        assert self._descent is not None, "the device updates"
        return self._descent.hand_over()

    def row_norms(self, out: Tensor) -> None:
        """As mpu.grads.row_norms of the shard, on the device."""
        if self._descent is None:
            row_norms(self.shard, out)
        else:
            self._descent.row_norms(out)

    def settle_reduce(self) -> None:
        """Let a reduction under way end without using its result."""
        if self._departure is not None:
            self._departure.wait()
            self._departure = self._sum = None
        if self._descent is not None:
            self._descent.forget()

    # ---- from backward to backward ------------------------------------------------------------------------------

    @property
    def _is_summed_in_place(self) -> bool:
        """The whole gradients, or this rank's part of them, have become sums over ranks."""
        return self._shard is not None and not self._keeps_shard

    @property
    def is_summed(self) -> bool:
        """There are gradients, and all of them are in the shard."""
        return self._shard is not None and not (self._keeps_shard and self.filled)

    def collect(self, *, widely: bool) -> None:
        """The backward that begins is followed by others before a sum (or not): those are added up in the precision of
        the shard."""
        if self._whole is None:
            self._kind = self._dtypes.grad_shard if widely else self._dtypes.grads

    def begin_backward(self) -> None:
        """A second backward after the sum was taken, before a step: what was summed must not be summed again, so it is
        kept apart, and the next sum is added to it."""
        for hook in self.hooks:
            hooks = hook.hooks_dict_ref()
            if hooks is not None and hook.id in hooks and next(reversed(hooks)) != hook.id:
                hooks[hook.id] = hooks.pop(hook.id)  # hooks that a user has registered since come first
        if self._is_summed_in_place and self.stays:  # nothing was summed
            self._shard = None
        elif self._is_summed_in_place:
            self._shard, self._keeps_shard = self.shard.clone(), True
            self._drop_buffer()
            self.filled.clear()

    def end_backward(self, ends_step: bool) -> None:
        """Forget who has arrived; what was accumulated stays."""
        self._pour_rest()
        self.finish_reduce()
        if self._lends_views and not self._is_summed_in_place:
            for index in self.filled - self._lent:
                self._lend(index)  # what an operation wrote in place
        self._arrived.clear()
        self._has_left = False
        self.is_final = ends_step and self.is_summed

    def discard(self) -> None:
        """The next backward starts from nothing."""
        self._clear()
        self._free_all()
        for marks in (self._arrived, self._reached, self.filled):
            marks.clear()
        self._drop_buffer()
        self._shard = None
        self._has_left, self._keeps_shard = False, self._accumulates_shard
        self.is_final = False


class SlotSink:
    """The place of one parameter's gradient in its bucket."""

    def __init__(self, grads: FlatGradients, index: int) -> None:
        self._grads, self._index = grads, index

    def reserve(self) -> MainGradReservation | None:
        return self._grads.claim(self._index)

    def accumulated(self) -> Tensor:
        return self._grads.total(self._index)


class SlotClaim:
    """A slot that a forward has written to. If anything else needs the slot before the backward of that forward, what
    was written moves to a tensor of its own."""

    def __init__(self, grads: FlatGradients, index: int, place: Tensor) -> None:
        self._grads, self._index, self.buffer = grads, index, place
        self._has_moved = False

    def move_away(self) -> None:
        self.buffer, self._has_moved = self.buffer.clone(), True

    def commit(self, scale: Tensor | None = None) -> None:
        if scale is not None:
            self.buffer.mul_(scale)
        if self._has_moved:
            self._grads.total(self._index).add_(self.buffer)
        else:
            self._grads.keep_claim(self._index)
