"""The weights of a run that was quantised in training (MoQ), as it had them at work.

Its checkpoint holds exact masters. Here they are rounded once more to the grids of the last step, which are found from
the whole of each matrix; the same bits come out. Where the levels of a grid fit into int8, and no blend is left, they
are given as they are, with the scales of their rows: an int8 model without further loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from megatron.checkpoint.int8 import INT8_KIND, SCALE_KIND
from megatron.checkpoint.reader import Checkpoint
from megatron.config.quantize import QuantizeConfig
from megatron.zero.layout import Segment, Slot
from megatron.zero.quantise import block_of, is_matrix, noise_key, saved_bit_progress
from megatron.zero.rows import MatrixRounding, QuantGroupStats, QuantizedMatrix, row_blocks_of
from mpu.groups import SOLO, Group
from mpu.split import Partition

WEIGHT = "weight"
_HOST = torch.device("cpu")


def open_moq_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> MoQWeights | None:
    """None: the run does not round its weights, or had not begun to. `work` is their precision in training."""
    config = QuantizeConfig(**checkpoint.config.get("quantize", {}))
    engine = checkpoint.shared_state.get("engine") or {}
    applied = engine["global_steps"] - engine["skipped_steps"] if engine else 0
    if "quantisation" not in engine or not config.quantize_training or applied < config.quantize_offset:
        return None
    return MoQWeights(checkpoint, config, engine["quantisation"], dtype, checkpoint.config["train"]["seed"])


@final
class MoQWeights:
    """Of a checkpoint, to be read like it."""

    def __init__(self, checkpoint: Checkpoint, config: QuantizeConfig, saved: Mapping[str, Any], dtype: torch.dtype,
                 seed: int) -> None:
        schedule = config.schedule
        assert schedule is not None
        self._checkpoint, self._config, self._schedule, self._dtype, self._seed = checkpoint, config, schedule, dtype, seed
        self._progress, self._counter = saved_bit_progress(saved), saved["counter"]
        self._names: list[str] | None = saved.get("rounded")
        """None: an older version wrote it, and all matrices are taken to be."""
        self._rounding = cache(self._compute_rounding)

    def has_int8_levels(self, name: str) -> bool:
        """They fit int8, and there is nothing between them."""
        return self._is_rounded(name) and self._rounding(name).blend == 0 and self._rounding(name).grid.fits_int8

    def _is_rounded(self, name: str) -> bool:
        """And was not frozen."""
        return is_matrix(self._checkpoint.shape(WEIGHT, name)) if self._names is None else name in self._names

    def read(self, kind: str, name: str, *, shape: tuple[int, ...], partition: Partition | None, tp_rank: int,
             tp_size: int, offset: int, out: Tensor) -> None:
        """Like the checkpoint's, and also of the kinds of an int8 model."""
        tp = Group(tp_rank, tp_size, tuple(range(tp_size)))
        if kind == SCALE_KIND:
            local = (shape[0], *self._checkpoint.shape(WEIGHT, name)[1:])
            group = self._matrix(name, local, partition, tp).group_of_row
            out.copy_(self._rounding(name).grid.scale[group[offset : offset + len(out)]])
            return
        numbers = torch.empty(len(out)) if kind == INT8_KIND else out
        self._checkpoint.read(WEIGHT, name, shape=shape, partition=partition, tp_rank=tp_rank, tp_size=tp_size,
                              offset=offset, out=numbers)
        if self._is_rounded(name):
            rounded, matrix = self._rounding(name), self._matrix(name, shape, partition, tp)
            for strip in row_blocks_of(matrix, Segment(matrix.slot, offset, 0, len(numbers)), 0):
                place = strip.view_in(numbers)
                x = place.to(self._dtype).float()
                place.copy_(
                    rounded.levels(x, strip) if kind == INT8_KIND else rounded.round_values(x, strip).to(self._dtype))
        if numbers is not out:
            out.copy_(numbers)

    def _matrix(self, name: str, shape: tuple[int, ...], partition: Partition | None, tp: Group) -> QuantizedMatrix:
        slot = Slot(name, shape, partition=partition)
        return QuantizedMatrix.of(slot, self._config.quantize_groups, 0, tp, _HOST, is_table=True)

    def _compute_rounding(self, name: str) -> MatrixRounding:
        """The grid, from all of the matrix, read a part at a time."""
        matrix = self._matrix(name, tuple(self._checkpoint.shape(WEIGHT, name)), None, SOLO)
        blocks = list(self._progress)
        now = self._progress[blocks[block_of(name, blocks)]]

        def read_strips(matrices: Mapping[str, QuantizedMatrix]) -> Iterator[tuple[Tensor, Tensor, QuantizedMatrix]]:
            for strip in row_blocks_of(matrix, Segment(matrix.slot, 0, 0, matrix.slot.numel), 0):
                flat = torch.empty(strip.rows * strip.width)
                self._checkpoint.read(WEIGHT, name, shape=matrix.slot.shape, partition=None, tp_rank=0, tp_size=1,
                                      offset=strip.start, out=flat)
                yield flat.view(strip.rows, strip.width).to(self._dtype).float(), strip.group, matrix

        survey = QuantGroupStats({name: matrix}, read_strips, lambda mine, op: mine, _HOST)
        grid = survey.make_grids({name: now.bits}, symmetric=self._config.quantize_type == "symmetric")[name]
        draws = self._config.quantize_rounding == "stochastic"
        return MatrixRounding(grid, self._schedule.blend(now, self._counter),
                              noise_key(self._seed, self._counter, name) if draws else None)
