"""The mean of the ranks' numbers at one bit a number, with errors that are made good later (1-bit Adam, Tang et al.
2021, https://arxiv.org/abs/2102.02888).

    mean = OneBitMean(group, segments, device)
    mean.send(give)                     # give(place, owed): adds this rank's numbers to what it owes there
    mean.serve(); mean.receive()
    mean.said_into(out, chunks)         # the same on all ranks

A flat buffer is cut into one *chunk* for each rank, its *server*, and a chunk into *segments*, parts of parameters.
What a rank *owes* is what it was given and has not said yet. It says of each segment one size, the root of the mean
square of what it owes there, and of each number its sign; what that does not say it owes still. The
server of a chunk adds up what all ranks say, divides by their number, owes that in turn, and says it to everybody in
the same way. So nothing is lost: what was said and what is owed are together, to rounding, what was given.

One bit cannot say zero. Numbers that are `silent`, padding among them, count in no size, and are zero wherever they are
read. A group of one says everything, and owes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpu.collectives import Pending, all_gather_into, all_to_all_into
from mpu.device import on_accelerator
from mpu.grads import NORM_ROW, row_norms
from mpu.groups import Group

EIGHT = 8
"""Signs in a byte."""
IN_CACHE, AT_A_TIME = 1 << 17, 1 << 24
"""Numbers that are worked on at a time: on a CPU their copies stay in its caches; elsewhere they take little memory."""
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, EIGHT).astype(np.float32)
"""Byte -> its bits, the highest one first."""
SIGNS = 1 - 2 * BITS

Give = Callable[[slice, Tensor], None]
"""(place among all chunks, what is owed there): adds what is to be said of it."""


def _nothing(place: slice, owed: Tensor) -> None:
    """Everything has been added."""


class OneBitMean:
    def __init__(self, group: Group, segments: Sequence[Sequence[int]], device: torch.device) -> None:
        """`segments`: for each rank's chunk, the rows (of NORM_ROW numbers) of its segments, in order. All chunks have
        the same number of rows."""
        self.group = group
        self.chunk = NORM_ROW * sum(segments[0])
        self._segments = max(map(len, segments))
        self._rows = torch.tensor([[*rows, *[0] * (self._segments - len(rows))] for rows in segments], device=device)
        self._counts = self._rows * NORM_ROW
        """Numbers of each segment that are spoken of."""
        self._tile = AT_A_TIME if on_accelerator(device) else IN_CACHE
        self._spoken: Tensor | None = None
        """A bit for each number: 0 where it is silent."""
        self._has_silence: dict[int, bool] = {}
        """By where a tile begins."""
        self.owed = torch.zeros(group.size * self.chunk, device=device)
        """By this rank, to the servers of all chunks."""
        self.owed_to_all = torch.zeros(self.chunk, device=device)
        """By this rank as the server of its chunk."""
        self._said = self._message(group.size)
        self._whole = self.owed.new_empty(0)
        """What was said, where it is everything."""
        self._heard: Tensor | None = None
        self._under_way = Pending()
        self._room, self._mask = (torch.empty(0 if on_accelerator(device) else IN_CACHE) for _ in range(2))

    def _message(self, chunks: int) -> Tensor:
        """Signs and sizes of so many chunks."""
        return torch.zeros(chunks, self.chunk // EIGHT + 4 * self._segments, dtype=torch.uint8, device=self.owed.device)

    def be_silent(self, silent: Tensor) -> None:
        """Where this mask of all chunks is true."""
        self._spoken = pack(silent.logical_not())
        rows = silent.logical_not().view(-1, NORM_ROW).sum(1)
        self._counts = _by_segment(rows.double(), self._rows).long()
        everything = range(self.group.size)
        self._has_silence = {place.start: bool(silent[place].any()) for place, _ in self._walk(everything)}
        self._hush_all(self.owed, everything)
        self._hush_all(self.owed_to_all, self._own)

    def forget(self) -> None:
        """What is owed, for good: other numbers come from now on."""
        self.owed.zero_()
        self.owed_to_all.zero_()

    @property
    def _own(self) -> range:
        return range(self.group.rank, self.group.rank + 1)

    def _walk(self, chunks: range) -> Iterator[tuple[slice, slice]]:
        """What is worked on at a time in these chunks: where it is among all of them, and in a buffer of these."""
        first = chunks.start * self.chunk
        for chunk in chunks:
            for start in range(chunk * self.chunk, (chunk + 1) * self.chunk, self._tile):
                stop = min(start + self._tile, (chunk + 1) * self.chunk)
                yield slice(start, stop), slice(start - first, stop - first)

    # ---- an exchange ------------------------------------------------------------------------------------------------

    def send(self, give: Give = _nothing) -> None:
        """What this rank says is on its way to the servers."""
        if self.group.is_solo:
            for place, _ in self._walk(self._own):
                give(place, self.owed[place])
            self._whole = self.owed + self.owed_to_all
            self._hush_all(self._whole, self._own)
            self.forget()
            return
        said, self._heard = self._message(self.group.size), self._message(self.group.size)
        self._say(self.owed, range(self.group.size), said, give)
        self._under_way = all_to_all_into(self._heard, said, self.group)

    def serve(self) -> None:
        """What all ranks say of this rank's chunk is here, and what it says of that on its way to them."""
        if self.group.is_solo:
            return
        self._under_way.wait()
        assert self._heard is not None, "nothing was sent"
        heard, self._heard = self._heard.split(1), None
        sizes = [self._sizes(said, self._own).mul_(1 / self.group.size) for said in heard]
        first = self._own.start * self.chunk

        def add_up(place: slice, owed: Tensor) -> None:
            here = slice(place.start - first, place.stop - first)
            for said, of_rows in zip(heard, sizes):
                owed.add_(self._numbers(self._signs(said, here), of_rows[_per(NORM_ROW, here)], place))

        mine = self._message(1)
        self._say(self.owed_to_all, self._own, mine, add_up)
        self._under_way = all_gather_into(self._said, mine, self.group)

    def receive(self) -> None:
        """What all servers say is here."""
        self._under_way.wait()

    def said_into(self, out: Tensor, chunk: int | None = None) -> None:
        """out <- what was said last, of all chunks or one. Where `out` is shorter the end is left out."""
        if self.group.is_solo:
            out.copy_(self._whole[: len(out)])
            return
        chunks = range(self.group.size) if chunk is None else range(chunk, chunk + 1)
        said = self._said[chunks.start : chunks.stop]
        sizes = self._sizes(said, chunks)
        for place, here in self._walk(chunks):
            there = out[here]
            there.copy_(self._numbers(self._signs(said, here), sizes[_per(NORM_ROW, here)], place)[: len(there)])

    def said_before(self) -> Callable[[slice], Tensor]:
        """What was said last, until something is again: of a place that `send` gives, until the next is asked for."""
        said = self._said
        sizes = self._sizes(said, range(self.group.size))
        return lambda place: self._numbers(self._signs(said, place), sizes[_per(NORM_ROW, place)], place)

    def squares(self) -> Tensor:
        """[chunks, segments]: the sum of the squares of what was said last, in fp64."""
        if self.group.is_solo:
            return _by_segment(row_norms(self._whole).double().square(), self._rows)
        return self._sizes_of(self._said).double().square() * self._counts

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _say(self, owed: Tensor, chunks: range, message: Tensor, give: Give) -> None:
        """message <- what these chunks owe, at one bit a number; the rest stays owed."""
        norms = torch.empty(len(owed) // NORM_ROW, device=owed.device)
        for place, here in self._walk(chunks):
            give(place, owed[here])
            self._hush(owed[here], place)
            row_norms(owed[here], norms[_per(NORM_ROW, here)])
        sums = _by_segment(norms.double().square(), self._rows[chunks.start : chunks.stop])
        counts = self._counts[chunks.start : chunks.stop]
        self._sizes_of(message).copy_((sums / counts.clamp(min=1)).sqrt())
        sizes, signs = self._sizes(message, chunks), torch.empty(len(owed) // EIGHT, dtype=torch.uint8,
                                                                 device=owed.device)
        for place, here in self._walk(chunks):
            packed = signs[_per(EIGHT, here)]
            packed.copy_(signs_of(owed[here]))
            owed[here].sub_(self._numbers(packed, sizes[_per(NORM_ROW, here)], place))
        self._signs_of(message).copy_(signs.view(len(message), -1))

    def _numbers(self, signs: Tensor, of_rows: Tensor, place: slice) -> Tensor:
        """The size of its row for each number, with its sign; 0 where it is silent. On a CPU until the next call."""
        numbers = _look_up(SIGNS, signs, self._room[: len(signs) * EIGHT])
        numbers.view(-1, NORM_ROW).mul_(of_rows[:, None])
        self._hush(numbers, place)
        return numbers

    def _sizes(self, message: Tensor, chunks: range) -> Tensor:
        """Of each row."""
        rows = self._rows[chunks.start : chunks.stop].flatten()
        count = len(message) * self.chunk // NORM_ROW
        return self._sizes_of(message).flatten().repeat_interleave(rows, output_size=count)

    def _hush_all(self, numbers: Tensor, chunks: range) -> None:
        for place, here in self._walk(chunks):
            self._hush(numbers[here], place)

    def _hush(self, numbers: Tensor, place: slice) -> None:
        if self._spoken is not None and self._has_silence.get(place.start, True):
            spoken = self._spoken[_per(EIGHT, place)]
            numbers.mul_(_look_up(BITS, spoken, self._mask[: len(numbers)]))

    def _signs(self, message: Tensor, here: slice) -> Tensor:
        """Of a part of one chunk of a message."""
        chunk = here.start // self.chunk
        return self._signs_of(message)[chunk, _per(EIGHT, slice(here.start - chunk * self.chunk,
                                                                here.stop - chunk * self.chunk))]

    def _signs_of(self, message: Tensor) -> Tensor:
        return message[:, : self.chunk // EIGHT]

    def _sizes_of(self, message: Tensor) -> Tensor:
        return message[:, self.chunk // EIGHT :].view(torch.float32)


def _per(many: int, place: slice) -> slice:
    """The same place where there is one of so many."""
    return slice(place.start // many, place.stop // many)


def _by_segment(of_rows: Tensor, rows: Tensor) -> Tensor:
    """[chunks, segments]: sums of `of_rows`, always added up in the same order."""
    lengths = rows.flatten()
    sums: Tensor = torch.segment_reduce(of_rows, "sum", lengths=lengths, unsafe=True)
    return sums.view(rows.shape)


def signs_of(numbers: Tensor) -> Tensor:
    """A bit for each, set below zero."""
    if not on_accelerator(numbers):
        return torch.from_numpy(np.packbits(np.signbit(numbers.numpy())))
    return pack(numbers.signbit())


def pack(bits: Tensor) -> Tensor:
    """Eight to a byte, the first one highest."""
    if not on_accelerator(bits):
        return torch.from_numpy(np.packbits(bits.numpy()))
    return (bits.view(-1, EIGHT).to(torch.uint8) << _places(bits.device)).sum(1, dtype=torch.uint8)


def _look_up(table: NDArray[np.float32], packed: Tensor, out: Tensor) -> Tensor:
    """What a table has for each bit, as fp32; on a CPU in `out`. (To unpack, convert and multiply is 3 times as slow
    there.)"""
    if not on_accelerator(packed):
        np.take(table, packed.numpy(), axis=0, out=out.numpy().reshape(-1, EIGHT), mode="clip")
        return out
    zero, one = table[0, 0], table[-1, 0]
    return unpack(packed).float().mul_(float(one - zero)).add_(float(zero))


def unpack(packed: Tensor) -> Tensor:
    """The bits again, one-dimensional."""
    return (packed.reshape(-1, 1) >> _places(packed.device)).bitwise_and_(1).to(torch.bool).view(-1)


def _places(device: torch.device) -> Tensor:
    return torch.arange(EIGHT - 1, -1, -1, dtype=torch.uint8, device=device)
