"""Initial weights from a counter-based random generator: any slice of a tensor is drawn alone, with the same values.

The value at position e depends only on e and a key (seed and tensor name). So a rank draws just its elements, and every
tensor-parallel size, ZeRO stage and device gives the same model.

    bits      the finalizer of splitmix64 (Steele, Lea and Flood, 2014) over key + counter * odd
    uniform   one counter per element, its upper 24 bits: a value in [0, 1)
    normal    Box-Muller: counters 4k .. 4k + 3 give elements 8k .. 8k + 3 by their cosines and 8k + 4 .. 8k + 7 by
              their sines. log, cos and sin may differ in the last bit between devices; all else is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor

from mpu.device import on_accelerator
from mpu.split import Partition

ELEMENTS_PER_GROUP = 8  # elements drawn from four counters
_SPLITMIX_INCREMENT, _SPLITMIX_ROUNDS = -7046029254386353131, ((30, -4658895280553007687), (27, -7723592293110705685))
CPU_BLOCK = 1 << 16  # elements drawn at a time on CPU: temporaries stay in the cache
ACCELERATOR_BLOCK = 1 << 25


@dataclass(frozen=True)
class StridedSegments:
    """Which elements of a full tensor form a rank's flattened slice: of every block of `full_length` elements,
    `segment_length` from `offset` on. Elements at or beyond `full_length` are padding and zero."""

    segment_length: int
    full_length: int
    offset: int

    def iter_rows(self, out: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
        """Cut `out`, elements from `start` on of the slice, into views [rows, count] whose rows are one block of the
        full tensor apart; yields (view, its position in the full tensor). Padding is set to zero."""
        done = 0
        while done < out.numel():
            left = out.numel() - done
            block, within = divmod(start + done, self.segment_length)
            count = min(left, self.segment_length - within)
            rows = left // count if within == 0 and count == self.segment_length else 1
            part = out[done : done + rows * count].view(rows, count)
            position = self.offset + within  # position within the block
            real = max(0, min(count, self.full_length - position))
            part[:, real:] = 0
            if real:
                yield part[:, :real], block * self.full_length + position
            done += rows * count


def strided_segments_of(shape: tuple[int, ...], partition: Partition | None, rank: int,
                        tp_size: int) -> StridedSegments:
    """The segments of a rank's local tensor of `shape` (the same lengths as TPSharding in checkpoint/reshard.py)."""
    if partition is None:
        numel = math.prod(shape)
        return StridedSegments(numel, numel, 0)
    dim = partition.dim % len(shape)
    inner = math.prod(shape[dim + 1:])
    local = shape[dim] // partition.stride * inner  # elements in a row of one of the `stride` parts
    return StridedSegments(local, local * tp_size if partition.size is None else partition.size * inner, rank * local)


# initializer(out, start): fill the 1-D `out`, on any device, with elements from `start` on of the rank's flattened
# slice.
Initializer = Callable[[Tensor, int], None]


@dataclass(frozen=True)
class ConstantInitializer:
    """The same value everywhere."""

    value: float

    def __call__(self, out: Tensor, start: int) -> None:
        out.fill_(self.value)


@dataclass(frozen=True)
class NormalInitializer:
    """N(0, std) values of `key`, for the slice that `segments` describes."""

    key: int
    std: float
    segments: StridedSegments

    def __call__(self, out: Tensor, start: int) -> None:
        for view, position in self.segments.iter_rows(out, start):
            fill_normal_rows(view, self.key, position, self.segments.full_length, self.std)


@dataclass(frozen=True)
class CounterRNGInit:
    """An `init_method` that draws a weight by counters. `deferred`: the new owner of the parameter draws it later, with
    the recorded initializer."""

    key: int
    std: float
    deferred: bool = False


def rng_key(seed: int, name: str) -> int:
    """A 64-bit key for the tensor `name` of a run."""
    return int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)


def fill_normal_rows(out: Tensor, key: int, start: int, stride: int, std: float = 1.0) -> None:
    """out[i, j] <- std times the normal value of `key` at position start + i * stride + j."""
    rows, width = out.shape
    limit = ACCELERATOR_BLOCK if on_accelerator(out) else CPU_BLOCK
    columns = min(width, limit)
    # rows that start at different offsets within their groups are drawn one by one
    rows_per_block = 1 if stride % ELEMENTS_PER_GROUP else max(1, min(rows, limit // columns))
    groups = -(-columns // ELEMENTS_PER_GROUP) + 1
    buffers = _DrawBuffers(rows_per_block * groups * ELEMENTS_PER_GROUP, out.device)
    for low in range(0, width, columns):
        for first in range(0, rows, rows_per_block):
            part = out[first : first + rows_per_block, low : low + columns]
            begin = start + first * stride + low
            part.copy_(buffers.draw_normal(part, key, begin, stride, std))


def fill_uniform(out: Tensor, key: int, start: int, segments: StridedSegments) -> None:
    """out <- uniform values of `key` in [0, 1), for elements from `start` on of the slice that `segments` describes."""
    for view, position in segments.iter_rows(out, start):
        rows, width = view.shape
        rows_per_block = max(1, (ACCELERATOR_BLOCK if on_accelerator(view) else CPU_BLOCK) // width)
        column_offsets = torch.arange(width, device=view.device)
        for first in range(0, rows, rows_per_block):
            part = view[first : first + rows_per_block]
            row_starts = torch.arange(first, first + len(part), device=view.device)
            row_starts.mul_(segments.full_length).add_(position)
            bits = (row_starts.unsqueeze(1) + column_offsets).view(-1)
            shifted = torch.empty_like(bits)
            _hash_counters(bits, key, shifted)
            part.copy_(_shift_right(bits, 40, shifted).view(part.shape)).mul_(2.0**-24)


class _DrawBuffers:
    """Reused temporaries: on a CPU, allocating fresh memory costs more than the arithmetic."""

    def __init__(self, elements: int, device: torch.device) -> None:
        counters = elements // 2
        self._counter_offsets = torch.arange(counters, device=device)
        self._bits, self._shifted = torch.empty_like(self._counter_offsets), torch.empty_like(self._counter_offsets)
        self._words = torch.empty(counters, dtype=torch.int32, device=device)
        self._angle, self._radius, self._part = (torch.empty(counters, device=device) for _ in range(3))
        # Four fp32 values are viewed as one 16-byte element, to copy them at once.
        self._out = torch.empty(counters // 4, 2, dtype=torch.complex128, device=device)

    def draw_normal(self, like: Tensor, key: int, start: int, stride: int, std: float) -> Tensor:
        """Values at start + i * stride + j, [rows, width], drawn in full groups; valid until the next call."""
        half, (rows, width) = ELEMENTS_PER_GROUP // 2, like.shape
        first, skip = divmod(start, ELEMENTS_PER_GROUP)
        groups = -(-(skip + width) // ELEMENTS_PER_GROUP)
        counters = rows * groups * half
        bits, angle, radius, part = (x[:counters] for x in (self._bits, self._angle, self._radius, self._part))
        offsets = torch.arange(rows, device=like.device).unsqueeze(1) * (stride // ELEMENTS_PER_GROUP * half)
        torch.add(self._counter_offsets[: groups * half], offsets, out=bits.view(rows, -1))
        shifted, words = self._shifted[:counters], self._words[:counters]
        _hash_counters(bits, key + first * half * _SPLITMIX_INCREMENT, shifted)
        # Each 64-bit hash gives two 32-bit numbers, an angle and a radius: Box-Muller makes two normal values of them.
        angle.copy_(words.copy_(bits)).mul_(2 * math.pi / 2**32)  # the lower 32 bits
        radius.copy_(words.copy_(_shift_right(bits, 32, shifted)))
        radius.mul_(2.0**-32).add_(0.5).clamp_(min=2.0**-33)  # in (0, 1]
        radius.log_().mul_(-2.0).sqrt_().mul_(std)
        out = self._out[: rows * groups]
        for column, function in enumerate((torch.cos, torch.sin)):
            function(angle, out=part).mul_(radius)
            out[:, column] = part.view(torch.complex128)
        return out.view(torch.float32).view(rows, groups * ELEMENTS_PER_GROUP)[:, skip : skip + width]


def _hash_counters(z: Tensor, key: int, shifted: Tensor) -> None:
    """Hash each counter to 64 random bits, in place: splitmix64 in signed integers."""
    z.mul_(_SPLITMIX_INCREMENT).add_((key + 2**63) % 2**64 - 2**63)  # modulo 2**64, as a signed int64
    for shift, factor in _SPLITMIX_ROUNDS:
        z.bitwise_xor_(_shift_right(z, shift, shifted)).mul_(factor)
    z.bitwise_xor_(_shift_right(z, 31, shifted))


def _shift_right(z: Tensor, by: int, out: Tensor) -> Tensor:
    """Logical right shift (fills with zeros)."""
    return torch.bitwise_right_shift(z, by, out=out).bitwise_and_((1 << (64 - by)) - 1)


_INITIALIZER_ATTRIBUTE = "mpu_source"


def allocate_weight(shape: Sequence[int], deferred: bool, dtype: torch.dtype | None = None,
                    device: torch.device | str | None = None) -> Tensor:
    """A tensor of this shape for values to come; `deferred`: expanded from one element, without memory."""
    return torch.empty(1, dtype=dtype, device=device).expand(*shape) if deferred else \
        torch.empty(*shape, dtype=dtype, device=device)


def set_initializer(parameter: Tensor, initializer: Initializer, deferred: bool = False) -> None:
    """Record the initializer of `parameter`, and apply it unless deferred."""
    setattr(cast(Any, parameter), _INITIALIZER_ATTRIBUTE, initializer)
    if not deferred and not parameter.is_meta:
        flat = torch.empty(parameter.numel(), device=parameter.device)
        initializer(flat, 0)
        parameter.detach().copy_(flat.view(parameter.shape))


def initializer_of(parameter: Tensor) -> Initializer | None:
    """The initializer of the parameter; None if its values were set directly."""
    return cast("Initializer | None", getattr(parameter, _INITIALIZER_ATTRIBUTE, None))
