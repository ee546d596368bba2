"""The mean of the ranks' numbers at one bit a number, with errors that are made good later (1-bit Adam, Tang et al.
2021, https://arxiv.org/abs/2102.02888).

    mean = OneBitMean(group, segments, device)
    mean.owed += numbers                # of this rank, whole
    mean.send(); mean.serve(); mean.receive()
    mean.said_into(out, chunks)         # the same on all ranks

A flat buffer is cut into one *chunk* for each rank, its *server*, and a chunk into *segments*, parts of parameters.
What a rank *owes* is what it was given and has not said yet. It says of each segment one size, the root of the mean
square of what it owes there, and of each number its sign (0 is positive); what that does not say it owes still. The
server of a chunk adds up what all ranks say, divides by their number, owes that in turn, and says it to everybody in
the same way. So nothing is lost: what was said and what is owed are together, to rounding, what was given.

One bit cannot say zero. Numbers that are `silent` are not spoken of: they count in no size, and are zero wherever they
are read. Padding is always among them.

A group of one says everything, and owes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mpu.collectives import Pending, all_gather_into, all_to_all_into
from mpu.device import on_accelerator
from mpu.grads import NORM_ROW, row_norms
from mpu.groups import Group

EIGHT = 8
"""Signs in a byte."""


class OneBitMean:
    def __init__(self, group: Group, segments: Sequence[Sequence[int]], device: torch.device) -> None:
        """`segments`: for each rank's chunk, the rows (of NORM_ROW numbers) of its segments, in order. All chunks have
        the same number of rows."""
        self.group = group
        self.chunk = NORM_ROW * sum(segments[0])
        self._sizes = max(map(len, segments))
        self._rows = torch.tensor([[*rows, *[0] * (self._sizes - len(rows))] for rows in segments], device=device)
        self._counts = self._rows * NORM_ROW
        """Numbers of each segment that are spoken of."""
        self._silent: Tensor | None = None
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
        return torch.zeros(chunks, self.chunk // EIGHT + 4 * self._sizes, dtype=torch.uint8, device=self.owed.device)

    def be_silent(self, silent: Tensor) -> None:
        """Where this mask of all chunks is true."""
        self._silent = pack(silent)
        rows = silent.logical_not().view(-1, NORM_ROW).sum(1)
        self._counts = _by_segment(rows.double(), self._rows).long()
        for chunks, owed in ((slice(None), self.owed), (self._own, self.owed_to_all)):
            self._hush(owed, chunks)

    @property
    def _own(self) -> slice:
        return slice(self.group.rank, self.group.rank + 1)

    # ---- an exchange ------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """What this rank says is on its way to the servers."""
        if self.group.is_solo:
            self._whole = self.owed + self.owed_to_all
            self._hush(self._whole, slice(None))
            self.owed.zero_()
            self.owed_to_all.zero_()
            return
        said, self._heard = self._message(self.group.size), self._message(self.group.size)
        self._say(self.owed, slice(None), said)
        self._under_way = all_to_all_into(self._heard, said, self.group)

    def serve(self) -> None:
        """What all ranks say of this rank's chunk is here, and what it says of that on its way to them."""
        if self.group.is_solo:
            return
        self._under_way.wait()
        assert self._heard is not None, "nothing was sent"
        own, heard, self._heard = self._own, self._heard, None
        for said in heard.split(1):
            self.owed_to_all.add_(self._read(said, own), alpha=1 / self.group.size)
        mine = self._message(1)
        self._say(self.owed_to_all, own, mine)
        self._under_way = all_gather_into(self._said, mine, self.group)

    def receive(self) -> None:
        """What all servers say is here."""
        self._under_way.wait()

    def said_into(self, out: Tensor, chunk: int | None = None) -> None:
        """out <- what was said last, of all chunks or one."""
        if self.group.is_solo:
            out.copy_(self._whole)
        else:
            chunks = slice(None) if chunk is None else slice(chunk, chunk + 1)
            out.copy_(self._read(self._said[chunks], chunks))

    def squares(self) -> Tensor:
        """[chunks, segments]: the sum of the squares of what was said last, in fp64."""
        if self.group.is_solo:
            return _by_segment(row_norms(self._whole).double().square(), self._rows)
        return self._sizes_of(self._said).double().square() * self._counts

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _say(self, owed: Tensor, chunks: slice, message: Tensor) -> None:
        """message <- what these chunks owe, at one bit a number; the rest stays owed."""
        self._hush(owed, chunks)
        sums = _by_segment(row_norms(owed).double().square(), self._rows[chunks])
        self._sizes_of(message).copy_((sums / self._counts[chunks].clamp(min=1)).sqrt())
        self._signs_of(message).copy_(pack(owed >= 0).view(len(message), -1))
        owed.sub_(self._read(message, chunks))

    def _read(self, message: Tensor, chunks: slice) -> Tensor:
        """The numbers that it says."""
        rows = self._rows[chunks].flatten()
        each_row = len(message) * self.chunk // NORM_ROW
        sizes = self._sizes_of(message).flatten().repeat_interleave(rows, output_size=each_row)
        positive = unpack(self._signs_of(message)).view(-1, NORM_ROW)
        said = torch.where(positive, sizes[:, None], -sizes[:, None]).view(-1)
        self._hush(said, chunks)
        return said

    def _hush(self, numbers: Tensor, chunks: slice) -> None:
        if self._silent is not None:
            each = self.chunk // EIGHT
            numbers.masked_fill_(unpack(self._silent.view(-1, each)[chunks]), 0.0)

    def _signs_of(self, message: Tensor) -> Tensor:
        return message[:, : self.chunk // EIGHT]

    def _sizes_of(self, message: Tensor) -> Tensor:
        return message[:, self.chunk // EIGHT :].view(torch.float32)


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
