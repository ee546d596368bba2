"""Error-compensated 1-bit all-reduce, as in 1-bit Adam (Tang et al. 2021, https://arxiv.org/abs/2102.02888).

    mean = CompressedAllReduce(group, segments, device)
    mean.send_to_servers(add_inputs)    # add_inputs(place, error) adds this rank's values to its worker error
    mean.reduce_and_send(); mean.wait_for_result()
    mean.copy_result_to(out)            # the same on all ranks

A flat buffer is cut into one chunk per rank (its *server*), a chunk into *segments* (parts of parameters). A message
holds one sign per element and one scale per segment, the root mean square of what is sent. What it does not express
stays in `worker_error` and `server_error` until the next call. *Excluded* elements (padding, parameters without
gradient) count in no scale and read as zero. A group of one compresses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpu.collectives import CollectiveWork, all_gather_into, all_to_all_into
from mpu.device import on_accelerator
from mpu.grads import NORM_ROW, row_norms
from mpu.groups import Group

SIGNS_PER_BYTE = 8
# Elements processed at a time: on a CPU the temporaries fit its cache; on an accelerator they stay small.
CPU_TILE, ACCELERATOR_TILE = 1 << 17, 1 << 24
# [256, 8]: the bits of each byte as 0.0 or 1.0, the highest first.
BIT_TABLE = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, SIGNS_PER_BYTE).astype(np.float32)
SIGN_TABLE = 1 - 2 * BIT_TABLE

# add_inputs(slice of the full buffer, its error): adds this rank's input to the error in place.
AddInputs = Callable[[slice, Tensor], None]


class CompressedAllReduce:
    def __init__(self, group: Group, segments: Sequence[Sequence[int]], device: torch.device) -> None:
        """`segments[r]`: the lengths, in rows of NORM_ROW elements, of the segments of rank r's chunk, in order. All
        chunks have the same number of rows."""
        self.group = group
        self._own_chunk = range(group.rank, group.rank + 1)
        self.chunk_numel = NORM_ROW * sum(segments[0])
        self._segments_per_chunk = max(map(len, segments))
        self._segment_rows = torch.tensor([[*rows, *[0] * (self._segments_per_chunk - len(rows))] for rows in segments],
                                          device=device)
        # [chunks, segments]: rows of each segment; chunks with fewer segments are padded with empty ones.
        # [chunks, segments]: elements of each segment that are not excluded.
        self._included_counts = self._segment_rows * NORM_ROW
        self._tile = ACCELERATOR_TILE if on_accelerator(device) else CPU_TILE
        self._included_bits: Tensor | None = None  # one bit per element: 0 if excluded
        # Start of a tile -> whether it contains excluded elements.
        self._tile_has_excluded: dict[int, bool] = {}
        # Compression error of this rank's input, for all chunks.
        self.worker_error = torch.zeros(group.size * self.chunk_numel, device=device)
        # Compression error of this rank as the server of its chunk.
        self.server_error = torch.zeros(self.chunk_numel, device=device)
        self._result_message = self._new_message(group.size)
        self._uncompressed_result = self.worker_error.new_empty(0)  # the result on a group of one
        self._received_messages: Tensor | None = None
        self._work = CollectiveWork()
        self._value_buffer, self._mask_buffer = (torch.empty(0 if on_accelerator(device) else CPU_TILE)
                                                 for _ in range(2))

    def _new_message(self, chunks: int) -> Tensor:
        """[chunks, bytes]: signs, then fp32 scales, for `chunks` chunks."""
        return torch.zeros(chunks, self.chunk_numel // SIGNS_PER_BYTE + 4 * self._segments_per_chunk, dtype=torch.uint8,
                           device=self.worker_error.device)

    def exclude(self, excluded: Tensor) -> None:
        """Exclude elements where the mask, over all chunks, is True."""
        self._included_bits = pack_bits(excluded.logical_not())
        rows = excluded.logical_not().view(-1, NORM_ROW).sum(1)  # [size * chunk] -> [rows, NORM_ROW] -> [rows]
        self._included_counts = _sum_by_segment(rows.double(), self._segment_rows).long()
        all_chunks = range(self.group.size)
        self._tile_has_excluded = {place.start: bool(excluded[place].any()) for place, _ in self._tiles(all_chunks)}
        self._zero_excluded_in_chunks(self.worker_error, all_chunks)
        self._zero_excluded_in_chunks(self.server_error, self._own_chunk)

    def _tiles(self, chunks: range) -> Iterator[tuple[slice, slice]]:
        """Tiles of these chunks: (slice of the full buffer, slice of a buffer of only these chunks)."""
        first = chunks.start * self.chunk_numel
        for chunk in chunks:
            for start in range(chunk * self.chunk_numel, (chunk + 1) * self.chunk_numel, self._tile):
                stop = min(start + self._tile, (chunk + 1) * self.chunk_numel)
                yield slice(start, stop), slice(start - first, stop - first)

    # ---- one all-reduce ---------------------------------------------------------------------------------------------

    def send_to_servers(self, add_inputs: AddInputs = lambda place, error: None) -> None:
        """Compress this rank's input, which by default `worker_error` contains, and start the all-to-all to the
        servers."""
        if self.group.is_solo:
            for place, _ in self._tiles(self._own_chunk):
                add_inputs(place, self.worker_error[place])
            # Both errors may come from a checkpoint of more ranks: nothing is owed any longer afterwards.
            self._uncompressed_result = self.worker_error + self.server_error
            self._zero_excluded_in_chunks(self._uncompressed_result, self._own_chunk)
            self.worker_error.zero_()
            self.server_error.zero_()
            return
        # [size, bytes]: row r is the message to server r, and after the all-to-all the one from rank r.
        messages, self._received_messages = self._new_message(self.group.size), self._new_message(self.group.size)
        self._compress(self.worker_error, range(self.group.size), messages, add_inputs)
        self._work = all_to_all_into(self._received_messages, messages, self.group)

    def reduce_and_send(self) -> None:
        """Wait for all ranks' messages of this rank's chunk, average and compress them, and start the all-gather."""
        if self.group.is_solo:
            return
        self._work.wait()
        assert self._received_messages is not None, "nothing was sent"
        received, self._received_messages = self._received_messages.split(1), None
        # The mean over ranks: each rank's scales are divided here, so that decompressed values need only be added.
        scales = [self._row_scales(message, self._own_chunk).mul_(1 / self.group.size) for message in received]
        first = self._own_chunk.start * self.chunk_numel

        def add_received(place: slice, error: Tensor) -> None:
            here = slice(place.start - first, place.stop - first)
            for message, of_rows in zip(received, scales):
                signs = self._signs_of_tile(message, here)
                error.add_(self._decompress(signs, of_rows[_divide_slice(NORM_ROW, here)], place))

        mine = self._new_message(1)  # [1, bytes] from every server -> [size, bytes] on every rank
        self._compress(self.server_error, self._own_chunk, mine, add_received)
        self._work = all_gather_into(self._result_message, mine, self.group)

    def wait_for_result(self) -> None:
        self._work.wait()

    def copy_result_to(self, out: Tensor, chunk: int | None = None) -> None:
        """out <- the last result, of all chunks or of one; a shorter `out` gets the beginning."""
        if self.group.is_solo:
            out.copy_(self._uncompressed_result[: len(out)])
            return
        chunks = range(self.group.size) if chunk is None else range(chunk, chunk + 1)
        message = self._result_message[chunks.start : chunks.stop]
        scales = self._row_scales(message, chunks)
        for place, here in self._tiles(chunks):
            target = out[here]
            target.copy_(self._decompress(self._signs_of_tile(message, here), scales[_divide_slice(NORM_ROW, here)],
                                          place)[:len(target)])

    def previous_result(self) -> Callable[[slice], Tensor]:
        """A function: tile slice -> the last result there, valid until its next call; usable until the next result
        arrives."""
        message = self._result_message
        scales = self._row_scales(message, range(self.group.size))
        return lambda place: self._decompress(self._signs_of_tile(message, place),
                                              scales[_divide_slice(NORM_ROW, place)], place)

    def squared_norms(self) -> Tensor:
        """[chunks, segments]: sums of squares of the last result, in fp64."""
        if self.group.is_solo:
            return _sum_by_segment(row_norms(self._uncompressed_result).double().square(), self._segment_rows)
        return self._segment_scales(self._result_message).double().square() * self._included_counts

    # ---- compression ------------------------------------------------------------------------------------------------

    def _compress(self, error: Tensor, chunks: range, message: Tensor, add_inputs: AddInputs) -> None:
        """message <- the 1-bit compression of input + error for these chunks; `error` keeps the remainder."""
        # First pass: add the input and take norms, since a segment's scale needs all of it. [rows] for these chunks.
        norms = torch.empty(len(error) // NORM_ROW, device=error.device)
        for place, here in self._tiles(chunks):
            add_inputs(place, error[here])
            self._zero_excluded(error[here], place)
            row_norms(error[here], norms[_divide_slice(NORM_ROW, here)])
        sums = _sum_by_segment(norms.double().square(), self._segment_rows[chunks.start : chunks.stop])
        counts = self._included_counts[chunks.start : chunks.stop]
        self._segment_scales(message).copy_((sums / counts.clamp(min=1)).sqrt())
        scales, signs = self._row_scales(message, chunks), torch.empty(len(error) // SIGNS_PER_BYTE, dtype=torch.uint8,
                                                                       device=error.device)
        # Second pass: keep the signs, and subtract from the error what the receivers will read.
        for place, here in self._tiles(chunks):
            packed = signs[_divide_slice(SIGNS_PER_BYTE, here)]
            packed.copy_(pack_bits(error[here].signbit()))
            error[here].sub_(self._decompress(packed, scales[_divide_slice(NORM_ROW, here)], place))
        self._sign_bytes(message).copy_(signs.view(len(message), -1))

    def _decompress(self, signs: Tensor, row_scales: Tensor, tile: slice) -> Tensor:
        """Each element's sign times its row's scale; 0 if excluded. On a CPU it is valid until the next call."""
        values = _expand_bits(SIGN_TABLE, signs, self._value_buffer[: len(signs) * SIGNS_PER_BYTE])
        values.view(-1, NORM_ROW).mul_(row_scales[:, None])  # [rows, NORM_ROW] * [rows, 1]
        self._zero_excluded(values, tile)
        return values

    def _row_scales(self, message: Tensor, chunks: range) -> Tensor:
        """[rows]: the scale of each row's segment."""
        rows = self._segment_rows[chunks.start : chunks.stop].flatten()
        count = len(message) * self.chunk_numel // NORM_ROW
        return self._segment_scales(message).flatten().repeat_interleave(rows, output_size=count)

    def _zero_excluded_in_chunks(self, values: Tensor, chunks: range) -> None:
        for place, here in self._tiles(chunks):
            self._zero_excluded(values[here], place)

    def _zero_excluded(self, values: Tensor, tile: slice) -> None:
        if self._included_bits is not None and self._tile_has_excluded.get(tile.start, True):
            included = self._included_bits[_divide_slice(SIGNS_PER_BYTE, tile)]
            values.mul_(_expand_bits(BIT_TABLE, included, self._mask_buffer[: len(values)]))

    def _signs_of_tile(self, message: Tensor, here: slice) -> Tensor:
        """Packed signs of a tile, which lies within one chunk of the message."""
        chunk = here.start // self.chunk_numel
        return self._sign_bytes(message)[chunk, _divide_slice(
            SIGNS_PER_BYTE, slice(here.start - chunk * self.chunk_numel, here.stop - chunk * self.chunk_numel))]

    def _sign_bytes(self, message: Tensor) -> Tensor:
        return message[:, : self.chunk_numel // SIGNS_PER_BYTE]

    def _segment_scales(self, message: Tensor) -> Tensor:
        return message[:, self.chunk_numel // SIGNS_PER_BYTE :].view(torch.float32)


def _divide_slice(divisor: int, elements: slice) -> slice:
    """The slice in units of `divisor` elements."""
    return slice(elements.start // divisor, elements.stop // divisor)


def _sum_by_segment(row_values: Tensor, rows: Tensor) -> Tensor:
    """[chunks, segments]: sums of `row_values`, in a fixed order."""
    lengths = rows.flatten()
    sums: Tensor = torch.segment_reduce(row_values, "sum", lengths=lengths, unsafe=True)
    return sums.view(rows.shape)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack 8 bits per byte, the first highest."""
    if not on_accelerator(bits):
        return torch.from_numpy(np.packbits(bits.numpy()))
    return (bits.view(-1, SIGNS_PER_BYTE).to(torch.uint8) << _bit_shifts(bits.device)).sum(1, dtype=torch.uint8)


def _expand_bits(table: NDArray[np.float32], packed: Tensor, out: Tensor) -> Tensor:
    """table[bit] for each bit, as fp32; on a CPU written to `out` (three times as fast as unpacking and converting)."""
    if not on_accelerator(packed):
        np.take(table, packed.numpy(), axis=0, out=out.numpy().reshape(-1, SIGNS_PER_BYTE), mode="clip")
        return out
    zero, one = table[0, 0], table[-1, 0]
    return unpack_bits(packed).float().mul_(float(one - zero)).add_(float(zero))


def unpack_bits(packed: Tensor) -> Tensor:
    """The inverse of `pack_bits`, 1-D."""
    # [n] -> [n, 1] >> [8] -> [n, 8] -> [8 n]
    return (packed.reshape(-1, 1) >> _bit_shifts(packed.device)).bitwise_and_(1).to(torch.bool).view(-1)


def _bit_shifts(device: torch.device) -> Tensor:
    return torch.arange(SIGNS_PER_BYTE - 1, -1, -1, dtype=torch.uint8, device=device)
