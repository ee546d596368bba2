"""Models larger than one rank's memory: `zero.Init` splits parameters as they are made, `GatheredParameters` makes
them whole for a while.

    with zero.Init():                          # at most one layer's parameters are whole at a time
        model = Model()
    with zero.GatheredParameters(model.head.parameters(), modifier_rank=0):
        model.head.weight.zero_()              # rank 0's edit becomes everyone's

Inside `Init`, `Module.apply` makes each module's own parameters whole for the function it applies.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.agree import agree
from megatron.errors import ConfigError, TrainerError
from megatron.launch.exits import answer_uncaught, explain
from megatron.zero.holders import Holder, holder_of
from megatron.zero.parked import Parked
from megatron.zero.together import meet, owner_of
from mpu import groups as mpu_groups
from mpu.groups import Group, Groups


@contextmanager
def GatheredParameters(  # noqa: N802 (the name that scripts know)
        params: Iterable[nn.Parameter] | nn.Parameter, modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None, enabled: bool = True) -> Iterator[None]:
    """Parameters are whole inside; all data parallel ranks enter together. Ordinary tensors are left alone.

    Edits count where `modifier_rank` says whose; without it they are refused, since they would be lost. There are no
    gradients inside of what is edited, and of what is split: its elements are gone when a backward asks for them.
    """
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    for parameter in given:
        if not isinstance(parameter, nn.Parameter):
            raise ConfigError(f"GatheredParameters takes parameters, not a {type(parameter).__name__}; "
                              "for a module give its .parameters()")
    if not enabled:
        yield
        return
    holders: dict[int, Holder] = {}  # in the order given, which is the same on every rank; each once
    names: list[str] = []
    for parameter in given:
        if (holder := holder_of(parameter)) is not None:
            holders.setdefault(id(holder), holder)
            names.append(holder.describe(parameter))
    without_gradients = modifier_rank is not None or any(holder.comes_and_goes for holder in holders.values())
    with _loan([*holders.values()], modifier_rank, names), torch.no_grad() if without_gradients else nullcontext():
        yield


@contextmanager
def _loan(holders: list[Holder], editor: int | None, names: list[str]) -> Iterator[None]:
    """What one rank objects to, or fails in, ends the loan on all of them: none may wait for one that has left."""
    if not holders:
        yield
        return
    dp, engine = holders[0].dp, owner_of(holders[0])
    if engine is not None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        meet(engine.log, dp, f"GatheredParameters of {names[0]}{more}", details=f"{editor} {names}")
    agree(lambda: _check_before_loan(holders), dp)
    failure: Exception | None = None
    try:
        for holder in holders:
            holder.lend()
        try:
            yield
        except Exception as error:
            failure = error
        if failure is None or not explain(failure).is_peer_loss:  # nobody answers then
            if engine is not None:
                engine.log.meet("the end of GatheredParameters")
            agree(lambda: _check_before_return(holders, editor, failure), dp)
    except BaseException:
        for holder in holders:
            holder.cancel_loan()
        if failure is not None:
            raise failure from None
        raise
    if editor is None:
        _take_back(holders, None)
        return
    with ExitStack() as changes:
        for owner in filter(None, map(owner_of, holders)):
            changes.enter_context(owner.change("edit"))
        agree(lambda: _take_back(holders, editor), dp)


def _take_back(holders: list[Holder], editor: int | None) -> None:
    """All of them, also after one that fails: the peers exchange the edits of the others."""
    failure: TrainerError | None = None
    try:
        for holder in holders:
            try:
                holder.take_back(editor)
            except TrainerError as error:  # of a drive
                failure = failure or error
        if failure is not None:
            raise failure
    except BaseException:
        for holder in holders:
            holder.cancel_loan()
        raise


def _check_before_loan(holders: list[Holder]) -> None:
    for holder in holders:
        holder.check_before_loan()


def _check_before_return(holders: list[Holder], editor: int | None, failure: Exception | None) -> None:
    if failure is not None:
        raise ConfigError(f"a rank left GatheredParameters by an error ({type(failure).__name__}: {failure}), and "
                          "nothing was changed: see its traceback")
    for holder in holders:
        holder.check_before_return(editor)


class Init:
    """Context: every parameter made inside is split over data parallel at once; or, with `module`, those it has.

    Ranks keep parts of rank 0's values. `dtype` is the precision of what is kept (default: as made), `remote_device`
    "cpu" keeps it on the host.
    """

    def __init__(self, module: nn.Module | None = None, data_parallel_group: Any = None,
                 mem_efficient_linear: bool = True, remote_device: str | None = None, pin_memory: bool = False,
                 config_dict_or_path: str | os.PathLike[str] | Mapping[str, Any] | None = None, config: Any = None,
                 enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None) -> None:
        answer_uncaught()
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(f"zero.Init: remote_device is {remote_device!r}; expected None or 'cpu'")
        self._enabled, self._dtype = enabled, dtype
        self._home = torch.device("cpu") if remote_device == "cpu" else None
        self._dp = _data_parallel(data_parallel_group, mpu) if enabled else mpu_groups.SOLO
        self._undo = ExitStack()
        if module is not None and enabled:
            for child in module.modules():
                self._park(child)

    def __enter__(self) -> None:
        if self._enabled:
            for cls in _all_subclasses(nn.Module):
                if "__init__" in vars(cls):
                    self._replace(cls, "__init__", self._then_park(cls, vars(cls)["__init__"]))
            self._replace(nn.Module, "apply", _apply_gathered)

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _replace(self, cls: type, name: str, value: Any) -> None:
        self._undo.callback(setattr, cls, name, vars(cls)[name])
        setattr(cls, name, value)

    def _then_park(self, cls: type, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def init_and_park(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            if _class_that_constructs(type(module)) is cls:  # else a base class's part of it: there is more to come
                self._park(module)

        return init_and_park

    def _park(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if holder_of(parameter) is None:
                Parked(parameter, self._dp, self._dtype, self._home)


def _class_that_constructs(cls: type) -> type:
    """The class whose `__init__` runs first."""
    return next(base for base in cls.__mro__ if "__init__" in vars(base))


def _all_subclasses(cls: type[nn.Module]) -> list[type[nn.Module]]:
    found: dict[type[nn.Module], None] = {}
    waiting = [cls]
    while waiting:
        for sub in waiting.pop().__subclasses__():
            if sub not in found:
                found[sub] = None
                waiting.append(sub)
    return list(found)


def _apply_gathered(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    for child in module.children():
        child.apply(fn)
    with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
        fn(module)
    return module


def _data_parallel(handle: Any, mpu: Any) -> Group:
    if handle is not None:
        return mpu_groups.of_handle(handle)
    return groups_of(mpu).dp


def groups_of(mpu: Any) -> Groups:
    """The groups behind `mpu`: a `Groups`, an object with the classic accessors, or None (data parallel only)."""
    if isinstance(mpu, Groups):
        return mpu
    if mpu is None:
        return mpu_groups.build(1)
    missing = [name for axis in ("model", "data") for what in ("rank", "group", "world_size")
               if not callable(getattr(mpu, name := f"get_{axis}_parallel_{what}", None))]
    if missing:
        raise ConfigError(f"mpu is {mpu!r:.80}, without {', '.join(missing)}; pass our `mpu` package, a Groups, or an "
                          "object with get_{model,data}_parallel_{rank,group,world_size}")
    return mpu_groups.of_handles(mpu.get_model_parallel_group(), mpu.get_data_parallel_group())
