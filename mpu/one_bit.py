"""The mean of the ranks' numbers at one bit a number, with errors that are made good later (1-bit Adam, Tang et al.
2021, https://arxiv.org/abs/2102.02888).

    mean = OneBitMean(group, segments, device)
    mean.owed += numbers                # of this rank, whole
    mean.send(); mean.serve(); mean.receive()
    mean.said_into(out, chunks)         # the same on all ranks

A flat buffer is cut into one *chunk* for each rank, its *server*, and a chunk into *segments*, parts of parameters.
What a rank *owes* is what it was given and has not said yet. It says of each segment one size, the root of the mean
square of what it owes there, and of each number its sign; what that does not say it owes still. The
server of a chunk adds up what all ranks say, divides by their number, owes that in turn, and says it to everybody in
the same way. So nothing is lost: what was said and what is owed are together, to rounding, what was given.

One bit cannot say zero. Numbers that are `silent` are not spoken of: they count in no size, and are zero wherever they
are read. Padding is always among them.

A group of one says everything, and owes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mpu.collectives import Pending, all_gather_into, all_to_all_into
from mpu.device import on_accelerator
from mpu.grads import NORM_ROW, row_norms
from mpu.groups import Group

EIGHT = 8
"""Signs in a byte."""
IN_CACHE = 1 << 19
"""Numbers that a CPU works on at a time: their copies stay in its caches."""


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
        self._tile = IN_CACHE if device.type == "cpu" else None
        """Numbers worked on at a time; None: all, where launches count."""
        self._spoken: Tensor | None = None
        """A bit for each number: 0 where it is silent."""
        self._has_silence: dict[int, bool] = {}
        """By where a tile begins, where there are tiles."""
        self.owed = torch.zeros(group.size * self.chunk, device=device)
        """By this rank, to the servers of all chunks."""
        self.owed_to_all = torch.zeros(self.chunk, device=device)
        """By this rank as the server of its chunk."""
        self._said = self._message(group.size)
        self._whole = self.owed.new_empty(0)
        """What was said, where it is everything."""
        self._heard: Tensor | None = None
        self._under_way = Pending()

    def _message(self, chunks: int) -> Tensor:
        """Signs and sizes of so many chunks."""
        return torch.zeros(chunks, self.chunk // EIGHT + 4 * self._segments, dtype=torch.uint8, device=self.owed.device)

    def be_silent(self, silent: Tensor) -> None:
        """Where this mask of all chunks is true."""
        self._spoken = pack(silent.logical_not())
        rows = silent.logical_not().view(-1, NORM_ROW).sum(1)
        self._counts = _by_segment(rows.double(), self._rows).long()
        everything = range(self.group.size)
        self._has_silence = {} if self._tile is None else {
            place.start: bool(silent[place].any()) for place, _ in self._walk(everything)}
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
        first, end = chunks.start * self.chunk, chunks.stop * self.chunk
        if self._tile is None:
            yield slice(first, end), slice(0, end - first)
            return
        for chunk in chunks:
            for start in range(chunk * self.chunk, (chunk + 1) * self.chunk, self._tile):
                stop = min(start + self._tile, (chunk + 1) * self.chunk)
                yield slice(start, stop), slice(start - first, stop - first)

    # ---- an exchange ------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """What this rank says is on its way to the servers."""
        if self.group.is_solo:
            self._whole = self.owed + self.owed_to_all
            self._hush_all(self._whole, self._own)
            self.forget()
            return
        said, self._heard = self._message(self.group.size), self._message(self.group.size)
        self._say(self.owed, range(self.group.size), said)
        self._under_way = all_to_all_into(self._heard, said, self.group)

    def serve(self) -> None:
        """What all ranks say of this rank's chunk is here, and what it says of that on its way to them."""
        if self.group.is_solo:
            return
        self._under_way.wait()
        assert self._heard is not None, "nothing was sent"
        own, heard, self._heard = self._own, self._heard, None
        for said in heard.split(1):
            for there, numbers in self._read(said, own, self.owed_to_all, 1 / self.group.size):
                there.add_(numbers)
        mine = self._message(1)
        self._say(self.owed_to_all, own, mine)
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
        for there, numbers in self._read(self._said[chunks.start : chunks.stop], chunks, out, 1.0):
            there.copy_(numbers)

    def squares(self) -> Tensor:
        """[chunks, segments]: the sum of the squares of what was said last, in fp64."""
        if self.group.is_solo:
            return _by_segment(row_norms(self._whole).double().square(), self._rows)
        return self._sizes_of(self._said).double().square() * self._counts

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _say(self, owed: Tensor, chunks: range, message: Tensor) -> None:
        """message <- what these chunks owe, at one bit a number; the rest stays owed."""
        norms = torch.empty(len(owed) // NORM_ROW, device=owed.device)
        for place, here in self._walk(chunks):
            self._hush(owed[here], place)
            row_norms(owed[here], norms[_per(NORM_ROW, here)])
        sums = _by_segment(norms.double().square(), self._rows[chunks.start : chunks.stop])
        counts = self._counts[chunks.start : chunks.stop]
        self._sizes_of(message).copy_((sums / counts.clamp(min=1)).sqrt())
        sizes, signs = self._sizes(message, chunks), torch.empty(len(owed) // EIGHT, dtype=torch.uint8,
                                                                 device=owed.device)
        for place, here in self._walk(chunks):
            rows = owed[here].view(-1, NORM_ROW)
            signs[_per(EIGHT, here)] = pack(rows.signbit().view(-1))
            rows.sub_(sizes[_per(NORM_ROW, here), None].expand_as(rows).copysign(rows))
            self._hush(owed[here], place)
        self._signs_of(message).copy_(signs.view(len(message), -1))

    def _read(self, message: Tensor, chunks: range, out: Tensor, factor: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Where in `out`, the numbers that it says there, times a factor."""
        signs, sizes = self._signs_of(message).reshape(-1), self._sizes(message, chunks).mul_(factor)
        for place, here in self._walk(chunks):
            numbers = _signed(unpack(signs[_per(EIGHT, here)]), sizes[_per(NORM_ROW, here)])
            self._hush(numbers, place)
            there = out[here]
            yield there, numbers[: len(there)]

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
            numbers.mul_(unpack(self._spoken[_per(EIGHT, place)]))

    def _signs_of(self, message: Tensor) -> Tensor:
        return message[:, : self.chunk // EIGHT]

    def _sizes_of(self, message: Tensor) -> Tensor:
        return message[:, self.chunk // EIGHT :].view(torch.float32)


def _per(many: int, place: slice) -> slice:
    """The same place where there is one of so many."""
    return slice(place.start // many, place.stop // many)


def _signed(is_negative: Tensor, size_of_row: Tensor) -> Tensor:
    """The size of its row for each number, below zero where that is so. (torch.where takes five times as long.)"""
    size = size_of_row[:, None]
    return is_negative.float().view(-1, NORM_ROW).mul_(-2 * size).add_(size).view(-1)


def _by_segment(of_rows: Tensor, rows: Tensor) -> Tensor:
    """[chunks, segments]: sums of `of_rows`, always added up in the same order."""
    lengths = rows.flatten()
    sums: Tensor = torch.segment_reduce(of_rows, "sum", lengths=lengths, unsafe=True)
    return sums.view(rows.shape)


def pack(bits: Tensor) -> Tensor:
    """Eight to a byte, the first one highest."""
    if not on_accelerator(bits):
        return torch.from_numpy(np.packbits(bits.numpy()))
    return (bits.view(-1, EIGHT).to(torch.uint8) << _places(bits.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The bits again, one-dimensional."""
    if not on_accelerator(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy())).view(torch.bool)
    return (packed.reshape(-1, 1) >> _places(packed.device)).bitwise_and_(1).to(torch.bool).view(-1)


def _places(device: torch.device) -> Tensor:
    return torch.arange(EIGHT - 1, -1, -1, dtype=torch.uint8, device=device)
