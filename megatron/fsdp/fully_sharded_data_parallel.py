"""FairScale's FullyShardedDataParallel, its wrap helpers (`enable_wrap`, `wrap`, `auto_wrap`, policies) and `checkpoint_wrapper`.

    model = FullyShardedDataParallel(model, mixed_precision=True)
    loss = model(batch).mean(); loss.backward(); model.clip_grad_norm_(1.0); optimizer.step()

    with enable_wrap(mixed_precision=True):
        model = auto_wrap(model)                    # or wrap(layer), where it is created

The wrapper shares the module's dictionaries of parameters, buffers and children, so all names are those of the unwrapped model.
`policy(module, recurse, unwrapped_params, module_is_root)` says whether to look inside (`recurse`), then whether to wrap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megatron.config.tree import RecomputeConfig
from megatron.errors import ConfigError
from megatron.fsdp.clip import clip_grad_norm_
from megatron.fsdp.full_params import temporarily_replaced
from megatron.fsdp.fully_shard import NotCopyable
from megatron.fsdp.optim_state import gather_full_optim_state_dict, get_shard_from_optim_state_dict
from megatron.fsdp.sharding import (WRAPPED_ATTRIBUTE, check_shardable, compute_device_of, require_fsdp_state,
                                    resolve_group, shard_module, sharded_modules)
from megatron.fsdp.sharding_settings import FairScaleArguments, parse_arguments
from megatron.fsdp.state_dict import (buckets_of, consolidate_shard_weights, full_state_dict, load_local_state_dict,
                                      local_metadata_dict, local_state_dict, prepare_all_ranks, summon_full_params)
from megatron.recompute import Recomputation
from megatron.zero.partitioned_param import full_shape

_SHARED_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_pre_hooks",
                      "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
"""What of torch's modules the wrapper has of the module inside."""


class FullyShardedDataParallel(NotCopyable, nn.Module):
    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None, **given: Any) -> None:
        """`given` are the arguments of settings.py. Every rank of the group makes it."""
        super().__init__()
        self.arguments: FairScaleArguments = parse_arguments(given)
        group = resolve_group(process_group)
        settings, device = self.arguments.to_settings(group.size), compute_device_of(module, group)
        check_shardable(module, settings, group, device)
        shard_module(module, settings, group, device)
        self.__dict__ |= {WRAPPED_ATTRIBUTE: module} | {name: getattr(module, name) for name in _SHARED_ATTRIBUTES}
        for line in self.arguments.notes(group.rank):
            print(line, flush=True)

    @property
    def module(self) -> nn.Module:
        """The model inside."""
        inside: nn.Module = self.__dict__[WRAPPED_ATTRIBUTE]
        return inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Parameters, buffers and children, FairScale's arguments by name, and what else the module inside has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.arguments if name in FairScaleArguments.__dataclass_fields__ else self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True,
                      ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the module inside have one name."""
        memo = set() if memo is None else memo
        if self not in memo or not remove_duplicate:
            memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        yield "module", self.module

    # ---- state --------------------------------------------------------------------------------------------------

    def state_dict(self, *, destination: Any = None, prefix: str = "",  # type: ignore[override]
                   keep_vars: bool = False) -> OrderedDict[str, Any]:
        """The state dict of the model inside, whole, in the precision of the masters, on every rank (or rank 0 alone:
        `state_dict_on_rank_0_only`). Every rank calls it. With `keep_vars` it has the parameters as they are, split."""
        return full_state_dict(self.module, device=self.arguments.state_dict_device,
                               everywhere=not self.arguments.state_dict_on_rank_0_only, destination=destination,
                               prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """A full one, which every rank has; each takes its part."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, *given: Any) -> None:
        """Of a load into a module around this one, which goes on with the children."""
        self.module._load_from_state_dict(*given)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part: flat runs, and buffers. Not collective."""
        return local_state_dict(self.module)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """What `local_state_dict` gave on this rank of as many."""
        load_local_state_dict(self.module, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What `consolidate_shard_weights` must know of a local state dict."""
        return local_metadata_dict(self.module)

    consolidate_shard_weights = staticmethod(consolidate_shard_weights)

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Inside, parameters are whole; edits, the same on every rank, last unless it is `volatile`."""
        with summon_full_params(self.module, recurse, volatile):
            yield

    def gather_full_optim_state_dict(self, optim: Optimizer, recipient_rank: int | None = 0) -> dict[str, Any] | None:
        """The state dict that `optim` would have over the model unwrapped, on one rank's host (None: on all), and None
        on the others. Every rank calls it."""
        prepare_all_ranks(self.module, "gather_full_optim_state_dict()")
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return gather_full_optim_state_dict(buckets_of(self.module), optim, recipient_rank, names)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of it, for `optim.load_state_dict`."""
        return get_shard_from_optim_state_dict(dict(self.named_parameters()), full_optim_state_dict)

    # ---- training -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave whole gradients on the rank, to be summed by the first backward outside. Of the
        outermost wrapper."""
        root = require_fsdp_state(self.module).root
        before, root.reduces_grads = root.reduces_grads, False
        try:
            yield
        finally:
            root.reduces_grads = before

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Changes nothing: sharding a module finds the parameters that several of those inside use."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all parameters together; returns their norm. Every rank calls it, after the last
        backward and before the optimizer's step."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)


Policy = Callable[..., bool]

EXCLUDE: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})
FORCE_LEAF: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})

_WRAP_CONTEXT: ContextVar[tuple[Policy | None, type[nn.Module], dict[str, Any]] | None] = ContextVar("wrap",
                                                                                                     default=None)


@contextmanager
def enable_wrap(auto_wrap_policy: Policy | None = None, wrapper_cls: type[nn.Module] = FullyShardedDataParallel,
                **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap` and `auto_wrap` wrap, with these arguments of `wrapper_cls`; elsewhere they return what they are
    given."""
    token = _WRAP_CONTEXT.set((auto_wrap_policy, wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _WRAP_CONTEXT.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """The module, wrapped inside `enable_wrap`; a `wrapper_config` attribute of it and the overrides here win."""
    context = _WRAP_CONTEXT.get()
    if context is None:
        return module
    _, wrapper_cls, kwargs = context
    own = getattr(module, "wrapper_config", None) or {}
    return wrapper_cls(module, **{**kwargs, **own, **wrap_overrides})


def auto_wrap(module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any) -> nn.Module:
    """The module with all modules inside wrapped that the policy names, and itself if it does; needs `enable_wrap`."""
    context = _WRAP_CONTEXT.get()
    if context is None:
        return module
    policy = auto_wrap_policy or context[0] or default_auto_wrap_policy
    if next(sharded_modules(module), None) is not None:
        raise ConfigError("auto_wrap of a module in which something is wrapped: give it one in which nothing is")
    return _wrap_recursively(module, policy, kwargs, is_root=True)[0]


def _wrap_recursively(module: nn.Module, policy: Policy, kwargs: dict[str, Any], *, is_root: bool = False,
                      ) -> tuple[nn.Module, int]:
    """The module, and how many elements of it were wrapped."""
    count = sum(full_shape(parameter).numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=count, module_is_root=is_root):
        return module, 0
    done = 0
    for name, child in module.named_children():
        new, inside = _wrap_recursively(child, policy, kwargs)
        if new is not child:
            setattr(module, name, new)
        done += inside
    if not policy(module=module, recurse=False, unwrapped_params=count - done, module_is_root=is_root):
        return module, done
    return wrap(module, **kwargs), count


def default_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool,
                             min_num_params: int = int(1e8),
                             force_leaf_modules: Collection[type[nn.Module]] | None = None,
                             exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
                             skip_params_check_for_root: bool = False) -> bool:
    """Modules of at least `min_num_params` elements that are not wrapped inside."""
    leaves = tuple(FORCE_LEAF if force_leaf_modules is None else force_leaf_modules)
    excluded = tuple(EXCLUDE if exclude_wrap_modules is None else exclude_wrap_modules)
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, leaves)
    return (is_large or skip_params_check_for_root and module_is_root) and not isinstance(module, excluded)


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Modules that have a `wrapper_config` attribute: a dict of arguments."""
    return True if recurse else getattr(module, "wrapper_config", None) is not None


def transformer_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int = 0,
                                 module_is_root: bool = False,
                                 transformer_layer_cls: Collection[type[nn.Module]] = (), **other: Any) -> bool:
    """Modules of these classes (torch's policy; give it with functools.partial)."""
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


# ---- activation checkpointing ---------------------------------------------------------------------------------------

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_CHECKPOINTED_ATTRIBUTE = "_fsdp_checkpointed"
_CHECKPOINTING_IS_DISABLED = ContextVar("checkpointing is disabled", default=False)


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Forwards inside keep their activations, and are not run again."""
    token = _CHECKPOINTING_IS_DISABLED.set(True)
    try:
        yield
    finally:
        _CHECKPOINTING_IS_DISABLED.reset(token)


def checkpoint_wrapper(module: ModuleT, offload_to_cpu: bool = False) -> ModuleT:
    """The module itself, whose forward now keeps its inputs alone and runs again in backward, by megatron/recompute;
    with `offload_to_cpu` the inputs wait on the host. It runs again with the buffers as they were in the forward, and
    does not change them, so that a batch norm counts a batch once. Before or after the module is sharded."""
    if vars(module).get(_CHECKPOINTED_ATTRIBUTE):
        raise ConfigError(f"this {type(module).__name__} has a checkpoint_wrapper already")
    recomputation = Recomputation(RecomputeConfig(checkpoint_activations=True, cpu_checkpointing=offload_to_cpu))
    forward = module.forward

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if _CHECKPOINTING_IS_DISABLED.get() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        runs, buffers = 0, [(child._buffers, name, buffer.detach().clone()) for child in module.modules()
                            for name, buffer in child._buffers.items() if buffer is not None]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            # Each replay changes copies of its own: with retain_graph there are several.
            with nullcontext() if runs == 1 else temporarily_replaced([(of, name, old.clone())
                                                                       for of, name, old in buffers]):
                return forward(*args, **kwargs)

        return recomputation.checkpoint(run, *args, **kwargs)

    module.__dict__[_CHECKPOINTED_ATTRIBUTE] = True
    module.forward = checkpointed
    return module
