"""A device and its host on CPU tensors: operations that mix them are errors, and blocking copies are counted.

    with two_sides() as sides:
        engine = ...                            # built for DEVICE
        with sides.watched() as blocking:       # what made the host wait inside: places in the project
            engine.backward(loss)

DEVICE is "cpu:0": tensors that are made there are the device's, those made on plain "cpu", or in memory that torch did
not allot, are the host's. Results of an operation are where its tensors are, and views where their memory is. As on
CUDA, a host number (a tensor without dimensions) goes with tensors of the device in what works element by element, and
only copies go from side to side. Those of the ferry run beside the computation; the others make the host wait, and so
does every look at a number of the device.

`on_accelerator` tells the sides apart as well. What asks `is_cuda` takes the way of a CPU, and that a copy takes time
is not seen here but by late_copy_streams.py. A wait for a mark of the ferry is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import mpu.collectives
from megatron.zero.offload.copy_streams import CopyEvent, CopyStream, CopyStreams, create_copy_streams
from mpu.collectives import CollectiveBackend
from mpu.device import on_accelerator

Side = Literal["device", "host"]

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")

ROOT = Path(__file__).parents[1]
PROJECT = tuple(str(ROOT / package) for package in ("megatron", "mpu"))

COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
TAKE_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "_foreach_mul_", "_foreach_add_", "_foreach_div_"}
"""With a host number, besides what is pointwise."""
TAKE_INDICES = {"index", "index_put", "index_put_"}
"""From the other side; they are copied."""
LOOK = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "is_nonzero"}
"""What they return depends on values: the host waits for them."""


GLOO = "mpu/collectives.py:CollectiveWork.wait"
"""Copies that it makes of its own, where another backend would make none."""


class MixedSides(AssertionError):
    """On a GPU torch would refuse this."""


class Sides:
    """Who is where, and what has made the host wait."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Side]] = {}
        """By identity of the memory, which is not used anew while somebody refers to it weakly."""
        self._sweep_at = 1000
        self._blocking: list[list[str]] = []
        self._is_silent = False

    def of(self, x: Tensor) -> Side:
        known = self._known.get(_memory(x)._cdata)
        return "host" if known is None else known[1]

    def put(self, x: Tensor, side: Side, *, anew: bool = False) -> None:
        memory = _memory(x)
        if anew or memory._cdata not in self._known:
            self._known[memory._cdata] = StorageWeakRef(memory), side
        if len(self._known) > self._sweep_at:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._sweep_at = 2 * len(self._known) + 1000

    def blocks(self, what: str) -> None:
        """The host waits for the device, or the device for the host, now."""
        if not self._is_silent and self._blocking and (place := _place()) != GLOO:
            for seen in self._blocking:
                seen.append(f"{place}: {what}")

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Each entry is `file:function: what`."""
        seen: list[str] = []
        self._blocking.append(seen)
        yield seen
        self._blocking.remove(seen)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Copies inside are known of."""
        before, self._is_silent = self._is_silent, True
        yield
        self._is_silent = before


@contextmanager
def two_sides() -> Iterator[Sides]:
    sides = Sides()
    ferry = CopyStreams(_Lane(sides, "device"), _Lane(sides, "host"))
    with ExitStack() as stack:
        for name, method in _methods(sides).items():
            stack.enter_context(patch.object(Tensor, name, method))
        stack.enter_context(patch.object(torch, "tensor", _tensor(sides)))
        stack.enter_context(patch.object(mpu.collectives, "backend_for", _wire_for(sides)))
        instead = {"on_accelerator": (on_accelerator, _on_device(sides)),
                   "create_copy_streams": (create_copy_streams, lambda device: ferry)}
        for module, (name, (known, other)) in product([*sys.modules.values()], instead.items()):
            if vars(module).get(name) is known:
                stack.enter_context(patch.object(module, name, other))
        stack.enter_context(_Operations(sides))
        yield sides


class _Lane(CopyStream):
    def __init__(self, sides: Sides, to: Side) -> None:
        self._sides, self._to = sides, to

    def copy(self, out: Tensor, source: Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        assert out.dtype == source.dtype and out.shape == source.shape
        if (self._sides.of(out), self._sides.of(source)) != (self._to, _other(self._to)):
            raise MixedSides(f"a copy to the {self._to} goes from the {self._sides.of(source)} to the "
                             f"{self._sides.of(out)}")
        with self._sides.silent():
            return super().copy(out, source, after)


# -- operations ----------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self._sides = sides

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors((args, kwargs))]
        side = self._judge(func, args, given)
        out = func(*args, **kwargs)
        if (device := kwargs.get("device")) is not None and (device.index is not None or not given):
            side = _side_of(device)
        for result in _tensors(out):
            self._sides.put(result, side, anew=not given)
        return out

    def _judge(self, func: Any, args: tuple[Any, ...], given: list[Tensor]) -> Side:
        """Where the result is; an error where torch would have none."""
        name = func._schema.name.partition("::")[2]
        where = [self._sides.of(x) for x in given]
        if name in LOOK and "device" in where:
            self._sides.blocks(name)
        if name in TAKE_INDICES and where[0] == "device" and (how := self._looked_up(args)) is not None:
            self._sides.blocks(f"{name} by {how}")
        if len({*where}) < 2:
            return where[0] if where else "host"
        if name in COPIES:
            if not (name == "copy_" and args[2:] == (True,)):  # non_blocking
                self._sides.blocks(f"{name} from {where[-1]} to {where[0]}")
            return where[0]
        if name in TAKE_INDICES and self._sides.of(args[0]) == "device":
            if all(x.dim() == 0 or self._sides.of(x) == "device" for x in _tensors(args[2:])):
                return "device"
        elif name in TAKE_NUMBERS or torch.Tag.pointwise in func.tags:
            written = {id(x) for number, of in enumerate(args) for x in _tensors(of) if _writes(func, number)}
            on_host = [x for x, side in zip(given, where, strict=True) if side == "host"]
            if all(x.dim() == 0 and id(x) not in written for x in on_host):
                return "device"
        raise MixedSides(f"{_place()}: {name} of tensors on the {', the '.join(where)}, of shapes "
                         f"{', '.join(str([*x.shape]) for x in given)}")

    def _looked_up(self, args: tuple[Any, ...]) -> str | None:
        """What the host waits for where these indices are used."""
        indices, values = [*_tensors(args[1])], [*_tensors(args[2:])]
        if any(self._sides.of(index) == "host" for index in indices):
            return "indices of the host"
        is_a_fill = bool(values) and values[0].dim() == 0
        return "a mask" if any(index.dtype == torch.bool for index in indices) and not is_a_fill else None


def _writes(func: Any, number: int) -> bool:
    alias = func._schema.arguments[number].alias_info
    return alias is not None and bool(alias.is_write)


# -- what asks no operation where both sides are a CPU --------------------------------------------------------------


def _methods(sides: Sides) -> dict[str, Any]:
    where, to, numpy, tolist = Tensor.device, Tensor.to, Tensor.numpy, Tensor.tolist

    def device(x: Tensor) -> torch.device:
        if type(x) is not Tensor:  # what refuses questions does; asked directly, torch would name this property
            type(x).__torch_function__(where.__get__, (type(x),), (x,))
        return DEVICE if sides.of(x) == "device" else HOST

    def moved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rest = [*args]
        if rest and isinstance(rest[0], Tensor):
            kwargs = {"device": rest[0].device, "dtype": rest.pop(0).dtype, **kwargs}
        elif rest and isinstance(rest[0], torch.device | str):
            kwargs["device"] = rest.pop(0)
        if kwargs.get("device") is None:
            return to(x, *args, **kwargs)
        if rest and rest[0] is None:
            del rest[0]
        target = _side_of(torch.device(kwargs.pop("device")))
        if target == sides.of(x):
            return to(x, *rest, **kwargs) if rest or kwargs else x
        if not kwargs.get("non_blocking"):
            sides.blocks(f"to the {target}")
        with sides.silent():
            copy = to(x, *rest, **{**kwargs, "copy": True})
        sides.put(copy, target, anew=True)
        return copy

    def cpu(x: Tensor) -> Tensor:
        return moved(x, "cpu")

    def as_numpy(x: Tensor, **kwargs: Any) -> Any:
        if sides.of(x) == "device":
            raise MixedSides(f"{_place()}: numpy() of a tensor on the device")
        return numpy(x, **kwargs)

    def as_list(x: Tensor) -> Any:
        if sides.of(x) == "device":
            sides.blocks("tolist")
        return tolist(x)

    moved.__name__, cpu.__name__ = "to", "cpu"  # shards go by names
    return {"device": property(device), "to": moved, "cpu": cpu, "numpy": as_numpy, "tolist": as_list}


def _tensor(sides: Sides) -> Callable[..., Tensor]:
    made = torch.tensor

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        x = made(data, **kwargs)
        if kwargs.get("device") is not None and _side_of(torch.device(kwargs["device"])) == "device":
            sides.blocks("torch.tensor")
            sides.put(x, "device", anew=True)
        return x
    return tensor


def _wire_for(sides: Sides) -> Callable[[Tensor], CollectiveBackend]:
    chosen = mpu.collectives.backend_for

    def wire_for(x: Tensor) -> CollectiveBackend:
        if sides.of(x) == "host":
            raise MixedSides(f"{_place()}: a tensor on the host is given to the wire of the device")
        return chosen(x)
    return wire_for


def _on_device(sides: Sides) -> Callable[[Tensor | torch.device], bool]:
    def on_device(where: Tensor | torch.device) -> bool:
        return (sides.of(where) if isinstance(where, Tensor) else _side_of(where)) == "device"
    return on_device


# -- small things --------------------------------------------------------------------------------------------------


def _side_of(device: torch.device) -> Side:
    return "host" if device.index is None else "device"


def _other(side: Side) -> Side:
    return "host" if side == "device" else "device"


def _memory(x: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # placeholders are somewhere, too
        return x.untyped_storage()


def _tensors(of: Any) -> Iterator[Tensor]:
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, dict):
        yield from _tensors([*of.values()])
    elif isinstance(of, list | tuple):
        for item in of:
            yield from _tensors(item)


def _place() -> str:
    """The innermost function of the project that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PROJECT):
            return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside"
