"""The model's weights as a state dict, at every stage; not the optimizer's state (saved.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.agree import agree
from megatron.config.tree import ZeroConfig
from megatron.errors import ConfigError
from megatron.zero.api.init import GatheredParameters
from megatron.zero.api.saved import whole_weights
from megatron.zero.engine import ZeroEngine, copy_buffers_from_first

PREFIX = "module."
"""What names begin with where the engine, not the model, is asked: as in DeepSpeed and DistributedDataParallel."""


def weights_of(core: ZeroEngine, zero: ZeroConfig, *, prefix: str = "", keep_vars: bool = False,
               frozen: bool = True) -> dict[str, Any]:
    """In the working precision. At stage 3 gathered: on rank 0's host, and nothing on the others."""
    if zero.zero_stage == 3:
        if not zero.stage3_gather_16bit_weights_on_model_save:
            raise ConfigError("at stage 3 parameters are split, and a state dict would be without them: set "
                              "stage3_gather_16bit_weights_on_model_save to gather them, or call save_checkpoint and "
                              "zero.get_fp32_state_dict_from_zero_checkpoint")
        return {prefix + name: tensor for name, tensor in whole_weights(core, frozen=frozen).items()}
    state: dict[str, Any] = core.module.state_dict(prefix=prefix, keep_vars=keep_vars)
    left_out = [] if frozen else [name for name, p in core.module.named_parameters() if not p.requires_grad]
    return {name: value for name, value in state.items() if name.removeprefix(prefix) not in left_out}


def load_weights(core: ZeroEngine, state: Mapping[str, Any], strict: bool) -> None:
    """New weights and buffers for the model and the optimizer's masters: those of data parallel rank 0, the others may
    have none. Collective; what does not fit is an error on every rank, and as in torch what fits is loaded."""
    def load() -> None:
        if core.groups.dp.rank != 0:
            return
        if not state and len(core.module.state_dict(keep_vars=True)) > 0:
            raise ConfigError("load_state_dict was given an empty state dict on the first data parallel rank (tensor "
                              f"parallel rank {core.groups.tp.rank}), whose weights count: give it the weights of its "
                              "part of the model, or use save_checkpoint and load_checkpoint")
        try:
            core.module.load_state_dict(state, strict=strict)
        except Exception as error:  # whatever it is: no rank may wait for one that has left
            raise ConfigError(f"load_state_dict: {error}") from error

    with GatheredParameters(list(core.module.parameters()), modifier_rank=0):
        try:
            agree(load, core.groups.world)
        finally:
            copy_buffers_from_first(core.module, core.groups)
