"""TiledLinear: a linear layer in tiles, so that no operation needs the full weight matrix (memory-centric tiling).

    y = x A + b,  A cut into out_splits x in_splits tiles:  y_o = sum_i x_i A_oi + b_o,  y = [y_0 y_1 ...]

Each tile is a separate layer (`linear_cls`), so stage 3 gathers one tile at a time. Sizes of tiles differ by at most
one. Each further input split rounds the sum once more. With a tensor parallel `linear_cls` every tile is sharded over
the ranks: if the output stays sharded, a rank holds its part of every tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from megatron.errors import ConfigError
from mpu.collectives import all_gather
from mpu.groups import SOLO, Group
from mpu.layers import ColumnParallelLinear, RowParallelLinear
from mpu.partition import join_local_slices, local_slice, partition_of

# (in_features, out_features, bias=..., **kwargs) -> a layer with `weight` [out, in] and `bias` [out] or None.
LinearClass = Callable[..., nn.Module]


class TiledLinearBase(nn.Module):
    """The tiles and their order; the two subclasses differ in what a tile returns."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1,
        input_is_already_split: bool = False, combine_out_splits: bool = True, linear_cls: LinearClass = nn.Linear,
        init_linear: nn.Module | None = None, **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes = even_sizes(in_features, in_splits, "in_splits")
        self.out_sizes = even_sizes(out_features, out_splits, "out_splits")
        last = in_splits - 1  # the tile of a row that holds its bias, so that it is added once
        self.linears = nn.ModuleList(
            nn.ModuleList(linear_cls(width, height, bias=bias and i == last, **kwargs)
                          for i, width in enumerate(self.in_sizes))
            for height in self.out_sizes)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def tiles(self) -> Iterator[nn.Module]:
        """Every tile, in the order of use."""
        return chain.from_iterable(self._tile_rows())

    def _tile_rows(self) -> Iterator[list[nn.Module]]:
        """The tiles that make one part of the output."""
        for row in self.linears:
            assert isinstance(row, nn.ModuleList)
            yield list(row)

    def _split_input(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """[..., in] -> in_splits times [..., part of in]."""
        if isinstance(x, Tensor) and not (self.input_is_already_split and self.in_splits > 1):
            # x.shape[-1], not in_features: a row parallel tile takes only this rank's part of the features.
            parts: Sequence[Tensor] = x.split(even_sizes(x.shape[-1], self.in_splits, "in_splits"), dim=-1)
            return parts
        if isinstance(x, Tensor) or len(x) != self.in_splits:
            found = "one tensor" if isinstance(x, Tensor) else f"{len(x)}"
            raise ConfigError(f"input_is_already_split: expected {self.in_splits} tensors (in_splits), found {found}")
        return x

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the values of an untiled layer. Collective if its parameters are sharded over tensor parallel."""
        weight, bias = _full_param(other, "weight"), _full_param(other, "bias")
        if weight is None or weight.shape != (self.out_features, self.in_features):
            raise ConfigError(f"copy_params_from: expected a weight of {(self.out_features, self.in_features)}, found "
                              f"{None if weight is None else tuple(weight.shape)}")
        if (bias is not None) != self.use_bias:
            raise ConfigError(f"copy_params_from: this layer has bias={self.use_bias}, the other {bias is not None}")
        for row, rows in zip(self._tile_rows(), weight.split(self.out_sizes), strict=True):
            for tile, values in zip(row, rows.split(self.in_sizes, dim=1), strict=True):
                _set_tile_param(tile, "weight", values)
        for row, values in zip(self._tile_rows(), () if bias is None else bias.split(self.out_sizes)):
            _set_tile_param(row[-1], "bias", values)


class TiledLinear(TiledLinearBase):
    """A linear layer whose tiles return their output."""

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """[..., in] -> [..., out]; lists of parts with `input_is_already_split` and without `combine_out_splits`."""
        parts = self._split_input(x)
        outputs = [reduce(add, (tile(part) for tile, part in zip(row, parts, strict=True)))
                   for row in self._tile_rows()]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs


class TiledLinearReturnBias(TiledLinearBase):
    """A linear layer whose tiles return (output, bias or None), for a caller that adds the bias."""

    def forward(self, x: Tensor | Sequence[Tensor]) -> tuple[Any, Any]:
        """Like `TiledLinear`, but returns (output, bias); without `combine_out_splits` both are lists of parts."""
        parts = self._split_input(x)
        outputs, biases = [], []
        for row in self._tile_rows():
            pairs = [tile(part) for tile, part in zip(row, parts, strict=True)]
            outputs.append(reduce(add, (output for output, _ in pairs)))
            biases.append(pairs[-1][1])
        if not self.combine_out_splits:
            return outputs, biases
        return torch.cat(outputs, dim=-1), torch.cat(biases) if self.use_bias else None


def tile_linears(module: nn.Module, factor: int, hidden_size: int, deferred: bool = False) -> None:
    """Replace every mpu linear inside `module` by tiles of about (hidden / factor)^2, with the same values.

    With `deferred` the tiles are on the meta device, without values. Needs a tensor parallel size of 1."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                assert layer.tp.is_solo
                height, width = layer.weight.shape
                setattr(parent, name, TiledLinear(
                    width, height, layer.bias is not None, max(1, factor * width // hidden_size),
                    max(1, factor * height // hidden_size), init_linear=None if deferred else layer,
                    linear_cls=partial(skip_init, nn.Linear),  # the values exist: do not advance the RNG
                    device="meta" if deferred else layer.weight.device, dtype=layer.weight.dtype))


def even_sizes(features: int, splits: int, name: str) -> list[int]:
    """`splits` sizes that add up to `features` and differ by at most one, the larger ones first."""
    if not 1 <= splits <= features:
        raise ConfigError(f"{name} is {splits}: expected a number from 1 to the {features} features that it splits")
    return [features // splits + (index < features % splits) for index in range(splits)]


def _tp_group(layer: nn.Module) -> Group:
    return layer.tp if isinstance(layer, ColumnParallelLinear | RowParallelLinear) else SOLO


def _full_param(layer: nn.Module, name: str) -> Tensor | None:
    """A parameter as a layer without tensor parallelism would hold it. Collective if it is sharded."""
    parameter: Tensor | None = getattr(layer, name)
    partition, tp = None if parameter is None else partition_of(parameter), _tp_group(layer)
    if parameter is None or partition is None or tp.is_solo:
        return parameter
    return join_local_slices(list(all_gather(parameter, tp, partition.dim).chunk(tp.size, partition.dim)), partition)


def _set_tile_param(layer: nn.Module, name: str, values: Tensor) -> None:
    """The inverse of `_full_param` for one tile."""
    parameter, tp = getattr(layer, name), _tp_group(layer)
    partition = partition_of(parameter)
    parameter.copy_(values if partition is None else local_slice(values, partition, tp.rank, tp.size))
