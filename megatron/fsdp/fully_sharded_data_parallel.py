"""FairScale's FullyShardedDataParallel, its wrap helpers and `checkpoint_wrapper`.

    model = FullyShardedDataParallel(model, mixed_precision=True)
    with enable_wrap(mixed_precision=True):
        model = auto_wrap(model)                    # or wrap(layer), where it is created

The wrapper shares the module's dictionaries of parameters, buffers and children, so all names are those of the
unwrapped model. `policy(module, recurse, unwrapped_params, module_is_root)` says whether to look inside (`recurse`),
then whether to wrap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import wraps
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from data.cli import suggest_spelling
from megatron.config.tree import RecomputeConfig
from megatron.errors import ConfigError
from megatron.fsdp.fully_shard import NotCopyable
from megatron.fsdp.root import clip_grad_norm_
from megatron.fsdp.sharded_tensor import PartialTensor, local_tensor, location_of, segment_like
from megatron.fsdp.sharding import (WRAPPED_ATTRIBUTE, ShardingSettings, check_shardable, require_fsdp_state,
                                    resolve_group, shard_module, sharded_modules)
from megatron.fsdp.state_dict import (buckets_of, full_state_dict, gather_full_states, get_model_state_dict,
                                      infer_sharded_kinds, params_of, prepare_all_ranks, shard_full_state,
                                      summon_full_params, temporarily_replaced)
from megatron.recompute import Recomputation
from megatron.zero.partitioned_param import full_shape

# Attributes that the wrapper shares with the wrapped module.
_SHARED_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_pre_hooks",
                      "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _no_effect(default: Any, why: str) -> Any:
    """An argument that changes nothing here; a note says so if another value is given."""
    return field(default=default, metadata={"no_effect": why})


@dataclass(frozen=True)
class FairScaleArguments:
    """The arguments as given, with FairScale's defaults."""

    reshard_after_forward: bool | int = True
    mixed_precision: Any = False
    fp32_reduce_scatter: bool = False
    cpu_offload: Any = False
    move_params_to_cpu: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    gradient_predivide_factor: float | None = None
    force_input_to_fp32: bool = False
    state_dict_device: torch.device | str | None = None
    state_dict_on_rank_0_only: bool = False
    # Not in FairScale: take rank 0's values instead of raising if ranks differ.
    sync_module_states: bool = False
    flatten_parameters: bool = _no_effect(True, "parameters are always in flat buffers, and keep their names")
    bucket_cap_mb: int = _no_effect(25, "the gradients of a wrapped module travel together")
    disable_reshard_on_root: bool = _no_effect(True, "the outermost module keeps its parameters until its backward")
    no_broadcast_optim_state: bool = _no_effect(False, "the optimizer's state is never broadcast")
    clear_autocast_cache: bool = _no_effect(
        False, "autocast finds parameters of the precision it wants, or casts them itself")
    verbose: bool = _no_effect(False, "what is sharded is shown by print(model)")
    move_grads_to_cpu: bool | None = _no_effect(
        None, "gradients are where the step is taken: with move_params_to_cpu on the host")
    compute_device: Any = _no_effect(None, "a module computes where it is, or on this rank's GPU")
    allow_reset_parameters: bool = _no_effect(False, "reset_parameters() works inside summon_full_params()")
    process_group_reduce_scatter: Any = _no_effect(None, "gradients and parameters take turns on one process group")

    def to_settings(self, ranks: int) -> ShardingSettings:
        factor = 1.0 if self.gradient_predivide_factor is None else self.gradient_predivide_factor
        if not 0 < factor <= ranks:
            raise ConfigError(f"gradient_predivide_factor {factor}: give a number above 0, at most the number of ranks "
                              f"({ranks})")
        given = self.mixed_precision  # a bool, or the MixedPrecision of torch's FSDP1
        working_dtype = (self.compute_dtype or getattr(given, "param_dtype", None)
                         or (torch.float16 if given is True else None))
        return ShardingSettings(
            reshard_after_forward=self.reshard_after_forward, param_dtype=working_dtype,
            reduce_dtype=torch.float32 if self.fp32_reduce_scatter else getattr(given, "reduce_dtype", None),
            input_dtype=working_dtype or (torch.float32 if self.force_input_to_fp32 else None),
            buffer_dtype=self.buffer_dtype or getattr(given, "buffer_dtype", None) or working_dtype,
            offload_to_host=bool(self.move_params_to_cpu
                                 or getattr(self.cpu_offload, "offload_params", self.cpu_offload)),
            grad_predivide_factor=factor, sync_module_states=self.sync_module_states)


# Argument of torch's FSDP1 -> what to do instead.
_ELSEWHERE = {"sharding_strategy": "FULL_SHARD is reshard_after_forward=True, SHARD_GRAD_OP is False",
              "auto_wrap_policy": "wrap the model with megatron.fsdp.auto_wrap(model, policy) inside enable_wrap()",
              "ignored_modules": "use fully_shard(module, ignored_params=...)",
              "device_mesh": "give process_group=mesh.get_group()"}


class FullyShardedDataParallel(NotCopyable, nn.Module):
    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None, **given: Any) -> None:
        """`given` are FairScale's arguments (`FairScaleArguments`). Collective over the group."""
        super().__init__()
        known = {item.name for item in fields(FairScaleArguments)}
        for name in given:
            if name not in known:
                advice = (_ELSEWHERE.get(name) or suggest_spelling(name, known)
                          or f"it has {', '.join(sorted(known))} (docs/fsdp.md)")
                raise ConfigError(f"FullyShardedDataParallel has no argument {name!r}; {advice}")
        self.arguments = FairScaleArguments(**given)
        group = resolve_group(process_group)
        settings = self.arguments.to_settings(group.size)
        check_shardable(module, settings, group)
        shard_module(module, settings, group)
        self.__dict__ |= {WRAPPED_ATTRIBUTE: module} | {name: getattr(module, name) for name in _SHARED_ATTRIBUTES}
        for one in fields(self.arguments) if group.rank == 0 else ():
            value = getattr(self.arguments, one.name)
            if one.metadata and value != one.default:
                print(f"note: FullyShardedDataParallel({one.name}={value!r}) has no effect: "
                      f"{one.metadata['no_effect']}", flush=True)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return cast(nn.Module, self.__dict__[WRAPPED_ATTRIBUTE])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Parameters, buffers and children, then FairScale's arguments, then the wrapped module's attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.arguments if name in FairScaleArguments.__dataclass_fields__ else self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True,
                      ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the wrapped module have the same name."""
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
        """Full state dict of the wrapped model in the masters' dtype, on every rank or (`state_dict_on_rank_0_only`) on
        rank 0. Collective. With `keep_vars` it has the sharded parameters themselves."""
        return full_state_dict(self.module, device=self.arguments.state_dict_device,
                               everywhere=not self.arguments.state_dict_on_rank_0_only, destination=destination,
                               prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a full state dict, given on every rank; each copies its segments. Not collective."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, *given: Any) -> None:
        """Called when an outer module loads; torch then recurses into the children."""
        self.module._load_from_state_dict(*given)

    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> AbstractContextManager[None]:
        """Inside, parameters are full. Edits, equal on every rank, are kept unless `volatile`. Collective."""
        return summon_full_params(self.module, recurse, volatile)

    def gather_full_optim_state_dict(self, optim: Optimizer, recipient_rank: int | None = 0) -> dict[str, Any] | None:
        """The state dict of `optim` as over the unwrapped model, on the host of `recipient_rank` (None: every rank);
        None on the others. Collective."""
        prepare_all_ranks(self.module, "gather_full_optim_state_dict()")
        collects = recipient_rank in (None, require_fsdp_state(self.module).root.dp.rank)
        states = dict(gather_full_states(optim, buckets_of(self.module), collects=collects))
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return {"state": {index: states[one] for index, one in enumerate(params_of(optim)) if one in states},
                "param_groups": optim.state_dict()["param_groups"],
                "names": [names.get(id(one), "") for one in params_of(optim)]} if collects else None

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part, for `optim.load_state_dict`. A state dict without names (of the unwrapped model) is taken
        in the order of the model's parameters."""
        parameters, full = dict(self.named_parameters()), full_optim_state_dict["state"]
        names = full_optim_state_dict.get("names") or list(parameters)
        state, split = {}, infer_sharded_kinds(full.values())
        for index, whole in full.items():
            if int(index) >= len(names) or names[int(index)] not in parameters:
                raise ConfigError(f"the optimizer's state dict has state of parameter {index}, and the model has no "
                                  "such parameter: give it that of this model's optimizer")
            state[index] = shard_full_state(parameters[names[int(index)]], whole, split)
        return {"state": state, "param_groups": full_optim_state_dict["param_groups"]}

    # ---- this rank's flat segments, without a collective ------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's segments, and full buffers."""
        require_fsdp_state(self.module).root.check_idle("local_state_dict()")
        state = get_model_state_dict(self.module)
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = local_tensor(value).clone()
        return state

    def local_metadata_dict(self) -> dict[str, Any]:
        """{"rank", "ranks", "params": {name: {"shape", "offset", "numel"}}} of this rank's segments."""
        root, params = require_fsdp_state(self.module).root, {}
        root.check_idle("local_metadata_dict()")
        for name, tensor in get_model_state_dict(self.module).items():
            if isinstance(tensor, PartialTensor):
                shape, _, offset = location_of(tensor)
                params[name] = {"shape": list(shape), "offset": offset, "numel": local_tensor(tensor).numel()}
        return {"rank": root.dp.rank, "ranks": root.dp.size, "params": params}

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's `local_state_dict`, saved with the same number of ranks."""
        require_fsdp_state(self.module).root.check_idle("load_local_state_dict()")
        own, state = get_model_state_dict(self.module), OrderedDict(state_dict)
        vars(state).update(getattr(state_dict, "__dict__", {}))  # torch's metadata
        for name, value in state_dict.items():
            if not isinstance(segment := own.get(name), PartialTensor):
                continue
            if value.shape != (shape := local_tensor(segment).shape):
                raise ConfigError(f"load_local_state_dict: {name}: this rank has a segment of {shape.numel()} "
                                  f"elements, the state dict {list(value.shape)}: it is of another rank, or number of "
                                  "ranks; make one of all ranks' with consolidate_shard_weights, and load that with "
                                  "load_state_dict")
            state[name] = segment_like(value, segment)
        self.module.load_state_dict(state, strict)

    @staticmethod
    def consolidate_shard_weights(
            shard_weights: Sequence[Mapping[str, Any]], shard_metadata: Sequence[Mapping[str, Any]],
            with_module_buffers: bool = True, strict: bool = True) -> OrderedDict[str, Any]:
        """One full state dict from every rank's `local_state_dict` and `local_metadata_dict`, in any order."""
        shards = sorted(zip(shard_metadata, shard_weights, strict=True), key=lambda shard: shard[0]["rank"])
        ranks = [metadata["rank"] for metadata, _ in shards]
        expected = list(range(shard_metadata[0]["ranks"])) if shard_metadata else [0]
        if ranks != expected:
            raise ConfigError(f"consolidate_shard_weights: expected the ranks {expected}, found {ranks}")
        whole: OrderedDict[str, Any] = OrderedDict()
        metadata, first = shards[0]
        vars(whole).update(getattr(first, "__dict__", {}))  # torch's metadata
        for name, value in first.items():
            location = metadata["params"].get(name)
            if location is None:
                if with_module_buffers:
                    whole[name] = value
                continue
            flat = torch.cat([weights[name] for _, weights in shards if name in weights])  # in the order of the ranks
            if flat.numel() == prod(location["shape"]):
                whole[name] = flat.view(location["shape"])
            elif strict:
                raise ConfigError(f"consolidate_shard_weights: {name} has {flat.numel()} of {prod(location['shape'])} "
                                  "elements: the state dicts are not of one model at one time")
        return whole

    # ---- training -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep full gradients on each rank; the first backward outside reduces them. Only for the
        outermost wrapper."""
        root = require_fsdp_state(self.module).root
        before, root.reduces_grads = root.reduces_grads, False
        try:
            yield
        finally:
            root.reduces_grads = before

    def append_shared_param(self, p: nn.Parameter) -> None:
        """No effect: parameters shared by modules inside are found when a module is sharded."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all parameters together; returns their norm. Collective; call it after the last
        backward and before the optimizer step."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)


Policy = Callable[..., bool]

_WRAP_CONTEXT: ContextVar[tuple[Policy | None, type[nn.Module], dict[str, Any]] | None] = (
    ContextVar("wrap", default=None))


@contextmanager
def enable_wrap(auto_wrap_policy: Policy | None = None, wrapper_cls: type[nn.Module] = FullyShardedDataParallel,
                **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap` and `auto_wrap` wrap with `wrapper_cls` and these arguments; outside they return the module
    unchanged."""
    token = _WRAP_CONTEXT.set((auto_wrap_policy, wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _WRAP_CONTEXT.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap the module, inside `enable_wrap`. A `wrapper_config` attribute of the module, then the overrides here,
    win."""
    context = _WRAP_CONTEXT.get()
    if context is None:
        return module
    _, wrapper_cls, kwargs = context
    own = getattr(module, "wrapper_config", None) or {}
    return wrapper_cls(module, **{**kwargs, **own, **wrap_overrides})


def auto_wrap(module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any) -> nn.Module:
    """Wrap each module that the policy selects, inside `enable_wrap`; may wrap `module` itself."""
    context = _WRAP_CONTEXT.get()
    if context is None:
        return module
    policy = auto_wrap_policy or context[0] or default_auto_wrap_policy
    if sharded_modules(module):
        raise ConfigError("auto_wrap of a module in which something is wrapped: give it one in which nothing is")
    return _wrap_recursively(module, policy, kwargs, is_root=True)[0]


def _wrap_recursively(module: nn.Module, policy: Policy, kwargs: dict[str, Any], *, is_root: bool = False,
                      ) -> tuple[nn.Module, int]:
    """(module, number of its elements that are wrapped)."""
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
    """Select modules with at least `min_num_params` elements that are not yet wrapped."""
    leaves = tuple((nn.MultiheadAttention,) if force_leaf_modules is None else force_leaf_modules)
    excluded = tuple((nn.ModuleList, nn.ModuleDict) if exclude_wrap_modules is None else exclude_wrap_modules)
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, leaves)
    return (is_large or skip_params_check_for_root and module_is_root) and not isinstance(module, excluded)


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Select modules that have a `wrapper_config` attribute (a dict of arguments)."""
    return True if recurse else getattr(module, "wrapper_config", None) is not None


def transformer_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int = 0,
                                 module_is_root: bool = False,
                                 transformer_layer_cls: Collection[type[nn.Module]] = (), **other: Any) -> bool:
    """Select modules of these classes. torch's policy; pass it with functools.partial."""
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


# ---- activation checkpointing ---------------------------------------------------------------------------------------

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_CHECKPOINTING_IS_DISABLED = ContextVar("checkpointing is disabled", default=False)


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Forwards inside keep their activations instead of recomputing."""
    token = _CHECKPOINTING_IS_DISABLED.set(True)
    try:
        yield
    finally:
        _CHECKPOINTING_IS_DISABLED.reset(token)


def checkpoint_wrapper(module: ModuleT, offload_to_cpu: bool = False) -> ModuleT:
    """Checkpoint the module's forward (megatron/recompute): it keeps only its inputs, with `offload_to_cpu` on the
    host, and runs again in backward. Recomputation uses the buffers of the first forward and does not change them, so
    batch norm counts a batch once. Works before or after sharding; returns the module itself."""
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
            # Fresh copies per recomputation: with retain_graph there are several.
            with nullcontext() if runs == 1 else temporarily_replaced([(of, name, old.clone())
                                                                       for of, name, old in buffers]):
                return forward(*args, **kwargs)

        return recomputation.checkpoint(run, *args, **kwargs)

    module.forward = checkpointed
    return module
