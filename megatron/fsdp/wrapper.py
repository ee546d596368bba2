"""FullyShardedDataParallel: FairScale's class of this name, in the place of DistributedDataParallel.

    model = FullyShardedDataParallel(model, mixed_precision=True)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(batch).mean(); loss.backward(); model.clip_grad_norm_(1.0); optimizer.step()

A wrapper around a sharded module (sharding.py). Names of parameters and buffers are those of the model inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megatron.errors import ConfigError
from megatron.fsdp.arguments import Arguments, read_arguments
from megatron.fsdp.clip import clip_grad_norm_
from megatron.fsdp.member import NoCopies
from megatron.fsdp.place import device_of, group_of
from megatron.fsdp.optim_state import gather_full_optim_state_dict, get_shard_from_optim_state_dict
from megatron.fsdp.sharding import WRAPPED, Member, check, plain_name, shard, the_member
from megatron.fsdp.state_dict import (
    buckets_of,
    consolidate_shard_weights,
    full_state_dict,
    load_local_state_dict,
    local_metadata_dict,
    local_state_dict,
    ready,
)
from megatron.fsdp.summon import summon_full_params
from megatron.zero.hooks import rename_when_loading


class FullyShardedDataParallel(NoCopies, nn.Module):
    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None, **given: Any) -> None:
        """`given` are the arguments of arguments.py. Every rank of the group makes it."""
        super().__init__()
        self.arguments: Arguments = read_arguments(given)
        group = group_of(process_group)
        settings, device = self.arguments.settings(group.size), device_of(module, group)
        check(module, settings, group, device)
        shard(module, settings, group, device)
        self.add_module(WRAPPED, module)
        rename_when_loading(self, _with_wrapped)
        for line in self.arguments.notes(group.rank):
            print(line, flush=True)

    @property
    def module(self) -> nn.Module:
        """The model inside."""
        inside = self._modules[WRAPPED]
        assert inside is not None
        return inside

    @property
    def _sharded(self) -> Member:
        return the_member(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    # ---- names --------------------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield plain_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield plain_name(name), buffer

    # ---- state --------------------------------------------------------------------------------------------------

    def state_dict(self, *, destination: dict[str, Any] | None = None, prefix: str = "",  # type: ignore[override]
                   keep_vars: bool = False) -> dict[str, Any]:
        """The state dict of the model inside, whole, in the precision of the masters, on every rank (or rank 0 alone:
        `state_dict_on_rank_0_only`). Every rank calls it. With `keep_vars` it has the parameters as they are, split."""
        state = {} if destination is None else destination
        if keep_vars:
            return super().state_dict(destination=state, prefix=prefix, keep_vars=True)
        whole = full_state_dict(self.module, device=self.arguments.state_dict_device,
                                everywhere=not self.arguments.state_dict_on_rank_0_only)
        state.update({prefix + name: tensor for name, tensor in whole.items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """A full one, which every rank has; each takes its part."""
        if assign:
            raise ConfigError("load_state_dict(assign=True) would replace the sharded parameters: leave it out")
        return super().load_state_dict(state_dict, strict)

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
        ready(self.module, "gather_full_optim_state_dict()")
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
        root = self._sharded.root
        before, root.syncs = root.syncs, False
        try:
            yield
        finally:
            root.syncs = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all parameters together; returns their norm. Every rank calls it, after the last
        backward and before the optimizer's step."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)


def _with_wrapped(state: dict[str, Any], prefix: str) -> None:
    """Names of the unwrapped model become those of the modules as they are."""
    for name in [name for name in state if name.startswith(prefix)]:
        rest = name.removeprefix(prefix)
        if not rest.startswith(f"{WRAPPED}."):
            state[f"{prefix}{WRAPPED}.{rest}"] = state.pop(name)
