"""Parameters that have no engine yet. Until `zero.initialize` takes their values over they are placeholders.

    Drawn     its layer gave a source (mpu/draws.py), which makes any run of its initial values: the engine draws what a
              rank keeps, so nothing is drawn twice, and nothing is sent
    Parked    `zero.Init` split its values: each data parallel rank keeps an equal part of those of rank 0, on the
              device, the host or a drive (`Depot`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol, Self, final

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from megatron.errors import ConfigError
from megatron.zero.holders import hold, holder_of
from megatron.zero.homes.nvme import Nvme, NvmeSettings
from megatron.zero.homes.shelf import WEIGHT, Run, Shelf
from megatron.zero.homes.swapfolder import SwapFolder
from megatron.zero.layout import FlatLayout
from megatron.zero.placeholder import Placeholder, fill, vacate
from mpu.collectives import all_gather_into, broadcast_into
from mpu.draws import Initializer, initializer_of
from mpu.groups import Group


@dataclass
class Building:
    """The block that a model is being built in: all ranks do the same there."""

    is_open: bool = False


class Waiting(ABC):
    """The holder of one parameter (see holders.py)."""

    is_settled = is_set_aside = False
    comes_and_goes = True

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, dp: Group, building: Building) -> None:
        self._held, self._shape, self._dtype, self._dp = TensorWeakRef(parameter), parameter.shape, dtype, dp
        self._building = building

    @property
    def _parameter(self) -> nn.Parameter:
        parameter = self._held()
        assert isinstance(parameter, nn.Parameter), "it has gone, and its holder should have gone with it"
        return parameter

    @property
    def takes_writes(self) -> bool:
        return self._building.is_open

    def _hold(self) -> None:
        """From now on."""
        self._vacate()
        hold(self._parameter, self)

    def _vacate(self) -> None:
        vacate(self._parameter, self._parameter.detach().new_empty(0, dtype=self._dtype))

    def twin(self) -> nn.Parameter:
        """A copy of the parameter, which waits as well."""
        other = copy(self)
        parameter = nn.Parameter(torch.empty(0, dtype=self._dtype, device=self._parameter.device),
                                 self._parameter.requires_grad)
        other._held = TensorWeakRef(parameter)
        other._twin()
        other._hold()
        return parameter

    @abstractmethod
    def _twin(self) -> None:
        """Have nothing in common with whom this is a copy of."""

    @abstractmethod
    def whole(self, device: torch.device | None = None) -> Tensor:
        """All elements, on every rank. Collective."""

    @abstractmethod
    def _is_unedited(self, value: Tensor) -> bool:
        """These are still the elements, as far as this rank keeps them."""

    @abstractmethod
    def take_back(self, editor: int | None) -> None: ...

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return self._shape

    def describe(self, parameter: Tensor) -> str:
        return f"a parameter of shape {tuple(self._shape)}"

    @property
    def dp(self) -> Group:
        return self._dp

    def check_before_loan(self) -> None:
        """Always possible."""

    def lend(self) -> None:
        if isinstance(self._parameter, Placeholder):
            fill(self._parameter, self.whole())

    def check_before_return(self, editor: int | None) -> None:
        value = self._parameter.detach()
        if (value.shape, value.dtype) != (self._shape, self._dtype):
            raise ConfigError(f"a parameter of {self._dtype} and shape {tuple(self._shape)} became {value.dtype} of "
                              f"shape {tuple(value.shape)} inside GatheredParameters; give it values of its kind")
        if editor is None and not self._is_unedited(value):
            raise ConfigError(f"a parameter of shape {tuple(self._shape)} was edited inside GatheredParameters without "
                              "modifier_rank: the edits would be lost; say which rank's edits count")

    def cancel_loan(self) -> None:
        if not isinstance(self._parameter, Placeholder):
            self._vacate()


def whole_value(parameter: nn.Parameter, dp: Group, device: torch.device) -> Tensor:
    """The values, on every rank those of the first, of a parameter that no engine holds yet. Collective."""
    holder = holder_of(parameter)
    if holder is None:
        value = parameter.detach().to(device).contiguous()
        broadcast_into(value, 0, dp).wait()
        return value
    if isinstance(holder, Waiting):
        return holder.whole(device)
    raise ConfigError(f"a parameter of shape {tuple(holder.shape_of(parameter))} belongs to another engine already: "
                      "build one engine for a model, or destroy() the other first")


# ---- drawn by the engine ---------------------------------------------------------------------------------------------


@final
class Drawn(Waiting):
    def __init__(self, parameter: nn.Parameter, source: Initializer, dp: Group,
                 building: Building = Building()) -> None:
        super().__init__(parameter, parameter.dtype, dp, building)
        self.source = source
        self._edited: Tensor | None = None
        self._hold()

    @property
    def is_edited(self) -> bool:
        """The values are no longer those of the source."""
        return self._edited is not None

    def whole(self, device: torch.device | None = None) -> Tensor:
        """All elements, drawn here."""
        if self._edited is not None:
            return self._edited.to(device)
        flat = torch.empty(self._shape.numel(), device=device)
        self.source(flat, 0)
        return flat.view(self._shape).to(self._dtype)

    def _is_unedited(self, value: Tensor) -> bool:
        return torch.equal(value, self.whole(value.device))

    def take_back(self, editor: int | None) -> None:
        value = self._parameter.detach()
        if editor is not None:
            self._edited = value.contiguous()
            broadcast_into(self._edited, editor, self._dp).wait()
        self._vacate()

    def _twin(self) -> None:
        """Edited values are never written to."""


def is_unfilled(parameter: nn.Parameter) -> bool:
    """There is no room for its values: it has a source, or will have one (mpu/draws.py)."""
    return parameter.is_meta or parameter.untyped_storage().nbytes() < parameter.nbytes


def draw_later(parameters: Iterable[nn.Parameter], dp: Group) -> None:
    """Leave placeholders where there is a source."""
    for parameter in parameters:
        if (source := initializer_of(parameter)) is not None and holder_of(parameter) is None:
            Drawn(parameter, source, dp)


def sources_of(parameters: Sequence[nn.Parameter]) -> list[Initializer] | None:
    """Where all these parameters are still to be drawn: from what."""
    holders = [holder_of(parameter) for parameter in parameters]
    found = [holder.source for holder in holders if isinstance(holder, Drawn) and not holder.is_edited]
    return found if len(found) == len(holders) else None


def draw_run(out: Tensor, layout: FlatLayout, rank: int, part: slice, sources: Sequence[Initializer]) -> None:
    """Fill a part of a shard of a flat buffer, in fp32; padding is left alone."""
    of = dict(zip((slot.name for slot in layout.slots), sources, strict=True))
    for segment in layout.segments(rank, part):
        run = out[segment.shard_offset - part.start : segment.shard_offset - part.start + segment.count]
        of[segment.slot.name](run, segment.slot_offset)


# ---- split by zero.Init ----------------------------------------------------------------------------------------------


PART = 1 << 20
"""Bytes that are read and written at a time; three times as many are on the host."""

FIRST, LARGEST = 64 * PART, 4096 * PART
"""Bytes of a shelf, unless a single piece is larger."""


@final
class Depot:
    def __init__(self, folder: SwapFolder) -> None:
        self._home = Nvme(folder, "waiting", (), NvmeSettings(part=PART, sets=3, dtype=torch.uint8))
        self._shelf: Shelf | None = None
        self._used, self._size, self._shelves = 0, FIRST, 0

    def store(self, values: Tensor) -> Stored:
        """A flat tensor."""
        nbytes = values.nbytes
        if self._shelf is None or self._used + nbytes > self._shelf.numel:
            self._shelf = self._home.shelf(str(self._shelves), max(self._size, -(-nbytes // PART) * PART))
            self._used, self._size, self._shelves = 0, min(2 * self._size, LARGEST), self._shelves + 1
        stored = Stored(self, Run(self._shelf, WEIGHT, self._used, nbytes), values.dtype)
        self._used += nbytes
        stored.put(values)
        return stored


@final
class Stored:
    """A piece."""

    def __init__(self, depot: Depot, run: Run, dtype: torch.dtype) -> None:
        self._depot, self._run, self._dtype = depot, run, dtype

    def put(self, values: Tensor) -> None:
        self._run.shelf.write(self._run.kind, self._run.start, values.contiguous().view(torch.uint8).cpu())

    def get(self) -> Tensor:
        return self._run.fetch().view(self._dtype)

    def copy(self) -> Stored:
        return self._depot.store(self.get())


class Kept(Protocol):
    """A rank's part."""

    def put(self, values: Tensor) -> None: ...

    def get(self) -> Tensor: ...

    def copy(self) -> Self: ...


@final
class InMemory:
    def __init__(self, values: Tensor) -> None:
        self._values = values

    def put(self, values: Tensor) -> None:
        self._values = values.to(self._values.device)

    def get(self) -> Tensor:
        return self._values

    def copy(self) -> InMemory:
        return InMemory(self._values.clone())


@final
class Parked(Waiting):
    def __init__(self, parameter: nn.Parameter, dp: Group, building: Building, *, dtype: torch.dtype | None = None,
                 where: torch.device | Depot | None = None, asked: str | None = None) -> None:
        """`where` the part is kept: on the parameter's device, another one, or a drive, which was `asked` for."""
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        super().__init__(parameter, kind, dp, building)
        self.asked = asked
        self._device = parameter.device
        self._count = -(-parameter.numel() // dp.size)
        own = self._own(self._from(parameter.detach(), editor=0))
        self._part: Kept = where.store(own) if isinstance(where, Depot) else InMemory(own.to(where))
        self._hold()

    def whole(self, device: torch.device | None = None) -> Tensor:
        part = self._part.get().to(self._device)
        flat = part.new_empty(self._dp.size * part.numel())
        all_gather_into(flat, part, self._dp).wait()
        return flat[: self._shape.numel()].view(self._shape).to(device)

    def _is_unedited(self, value: Tensor) -> bool:
        return torch.equal(self._own(value), self._part.get().to(value.device))

    def take_back(self, editor: int | None) -> None:
        if editor is not None:
            self._part.put(self._own(self._from(self._parameter.detach(), editor)))
        self._vacate()

    def _twin(self) -> None:
        self._part = self._part.copy()

    def _from(self, value: Tensor, editor: int) -> Tensor:
        value = value.to(self._device).contiguous()
        broadcast_into(value, editor, self._dp).wait()
        return value

    def _own(self, value: Tensor) -> Tensor:
        """This rank's part of the flattened values, padded with zeros."""
        own = value.new_zeros(self._count, dtype=self._dtype)
        mine = value.flatten()[self._dp.rank * self._count : (self._dp.rank + 1) * self._count]
        own[: mine.numel()] = mine
        return own
