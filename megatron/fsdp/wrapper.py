"""FullyShardedDataParallel: FairScale's class of this name, in the place of DistributedDataParallel.

    model = FullyShardedDataParallel(model, mixed_precision=True)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(batch).mean(); loss.backward(); model.clip_grad_norm_(1.0); optimizer.step()

A wrapper around a sharded module (sharding.py). It shares the module's dictionaries of parameters, buffers, children
and state dict hooks, so that every name, also in the metadata of state dicts, is that of the unwrapped model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megatron.fsdp.clip import clip_grad_norm_
from megatron.fsdp.fully_shard import NotCopyable
from megatron.fsdp.optim_state import gather_full_optim_state_dict, get_shard_from_optim_state_dict
from megatron.fsdp.settings import FairScaleArguments, parse_arguments
from megatron.fsdp.sharding import (WRAPPED_ATTRIBUTE, check_shardable, compute_device_of, require_fsdp_state,
                                    resolve_group, shard_module)
from megatron.fsdp.state_dict import (buckets_of, consolidate_shard_weights, full_state_dict, load_local_state_dict,
                                      local_metadata_dict, local_state_dict, prepare_all_ranks, summon_full_params)

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
