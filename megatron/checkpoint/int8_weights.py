"""Int8 weights: symmetric quantisation with one scale per row, computed a block of rows at a time.

    scale = max |row| / 127        in fp32, of the whole row of the logical matrix
    level = round(value / scale)   to nearest, ties to even: -127 .. 127

Scales are of whole rows, so the int8 model does not depend on the tensor-parallel layout. All matrices but the position
table are quantised; biases and LayerNorms are not. A checkpoint stores two kinds for a matrix: int8 and scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.errors import CheckpointError

INT8_KIND, SCALE_KIND = "int8", "scale"  # tensor kinds of a quantised matrix; the tensor's name is the matrix's
MAX_LEVEL = 127
BLOCK_ELEMENTS = 1 << 18  # elements in memory at a time, at least one row

# read(start, out): fill the 1-D `out` with elements of the flattened matrix from `start` on.
ReadRange = Callable[[int, Tensor], None]


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether this parameter of a GPT-2 is stored as int8."""
    return len(shape) == 2 and name != "wpe.weight"


def row_maxima(read: ReadRange, shape: Sequence[int]) -> Tensor:
    """[rows, columns] -> [rows], the largest absolute value of each row in fp32."""
    found = torch.empty(shape[0])
    for first, block in _row_blocks(read, shape):
        found[first : first + len(block)] = _row_maxima_of_block(block)
    return found


def quantise_into(levels: Tensor, read: ReadRange, where: str, maxima: Tensor | None = None) -> Tensor:
    """Fill `levels`, [rows, columns] int8 on any device; returns the scales, [rows] in fp32. `maxima` are the maxima of
    full rows if these are slices of rows. Errors name `where`."""
    scale = torch.empty(len(levels))
    for first, block in _row_blocks(read, levels.shape):
        rows = slice(first, first + len(block))
        scale[rows] = scales_from_maxima(_row_maxima_of_block(block) if maxima is None else maxima[rows], where)
        # A row of zeros has scale 0; its levels are 0 / inf.
        divisor = torch.where(scale[rows] > 0, scale[rows], torch.inf)
        levels[rows] = block.div_(divisor[:, None]).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
    return scale


def scales_from_maxima(maxima: Tensor, where: str) -> Tensor:
    if not bool(maxima.isfinite().all()):
        raise CheckpointError(f"{where} is not finite: it cannot be quantised to int8")
    return maxima / MAX_LEVEL


def _row_blocks(read: ReadRange, shape: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(first row, [rows, columns] block in fp32) for consecutive blocks, which share one buffer."""
    rows, columns = shape
    each = max(1, min(rows, BLOCK_ELEMENTS // max(1, columns)))
    buffer = torch.empty(each * columns)
    for first in range(0, rows, each):
        count = min(each, rows - first)
        block = buffer[: count * columns]
        read(first * columns, block)
        yield first, block.view(count, columns)


def _row_maxima_of_block(block: Tensor) -> Tensor:
    low, high = block.aminmax(dim=1)
    return torch.maximum(high, -low)
