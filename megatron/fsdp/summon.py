"""`summon_full_params`: parameters whole for a while, in the precision of the masters, to be read or edited.

Edits last unless it is `volatile`. Every rank has all parameters and makes the same edits: each keeps its part of its
own, so ranks that edited differently would train a mixture, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from megatron.checkpoint.agree import alike
from megatron.errors import ConfigError
from megatron.fsdp.same import sum_of_bytes
from megatron.fsdp.sharding import Member, members
from megatron.fsdp.whole import keep, masters
from megatron.zero.bucket import FlatBucket
from megatron.zero.placeholder import fill
from megatron.zero.together import meet

WHAT = "summon_full_params()"


@contextmanager
def summon_full_params(module: nn.Module, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
    """Of a sharded module, or of all in a module; without `recurse` of this one alone. Every rank calls it."""
    found = [member for _, child, member in members(module) if recurse or child is module]
    if not found:
        raise ConfigError(f"{WHAT}: {type(module).__name__} is not sharded, and nothing in it")
    roots = list({id(member.root): member.root for member in found}.values())
    for root in roots:
        root.check_idle(WHAT)
        meet(root.log, root.dp, WHAT)
        root.rest()
    buckets = [bucket for member in found for bucket in member.unit.buckets]
    try:
        lent = [(bucket, _lend(bucket)) for bucket in buckets]
        for root in roots:
            root.summoned = WHAT
        yield
        if not volatile:
            _check_edits(lent, found)
            edits = [(bucket, _now(bucket, whole)) for bucket, whole in lent]
            for bucket, values in edits:
                keep(bucket, values)
    finally:
        for bucket in buckets:  # also where there was no memory to lend all of them
            bucket.show_absent()
        for root in roots:
            root.summoned = None
            root.note_edits()


def _lend(bucket: FlatBucket) -> list[Tensor]:
    whole = masters(bucket)
    for parameter, value in zip(bucket.parameters, whole, strict=True):
        fill(parameter, value)
    return whole


def _now(bucket: FlatBucket, whole: Sequence[Tensor]) -> list[Tensor]:
    """What the parameters are: `p.data = ...` is an edit too."""
    for slot, parameter, value in zip(bucket.layout.slots, bucket.parameters, whole, strict=True):
        if parameter.shape != value.shape:
            raise ConfigError(f"{slot.name} became a tensor of shape {list(parameter.shape)} inside {WHAT}, and was of "
                              f"{list(value.shape)}")
    return [parameter.detach() for parameter in bucket.parameters]


def _check_edits(lent: Sequence[tuple[FlatBucket, Sequence[Tensor]]], found: Sequence[Member]) -> None:
    group = found[0].root.dp
    if group.is_solo:
        return
    told = {slot.name: sum_of_bytes(value) for bucket, whole in lent
            for slot, value in zip(bucket.layout.slots, _now(bucket, whole), strict=True)}
    alike(told, group, f"the ranks edited parameters differently inside {WHAT}, and nothing was kept (checksums)")
