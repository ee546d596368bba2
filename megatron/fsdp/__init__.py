"""The FSDP face: FairScale's and torch's names for ZeRO stage 3, over the mechanism of megatron/zero.

    model = FullyShardedDataParallel(model)      # FairScale's, in the place of DistributedDataParallel
    fully_shard(block); fully_shard(model)       # torch's: the blocks first

The optimizer, its schedulers and the loop are the user's: `loss.backward()`, `optimizer.step()`.

shard.py (a parameter between two passes), rectangles.py (as torch's checkpoints store it), gradients.py (its gradient),
settings.py (how a module is sharded), same.py (whether the ranks start alike), whole.py (a bucket's full masters),
agreement.py (what ranks compare in a backward, the loss scale of fp16), root.py (the units of a model in
training), sharding.py (what sharding a module does), fully_shard.py (torch's function), wrapper.py (FairScale's class),
wrap.py (which modules are wrapped, or checkpointed), clip.py (the norm of gradients), state_dict.py and optim_state.py
(state, full and in parts, also by torch's functions), checkpoint.py (as checkpoints).
"""

from megatron.fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron.fsdp.clip import clip_grad_norm_
from megatron.fsdp.fully_shard import FSDPModule, fully_shard
from megatron.fsdp.optim_state import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from megatron.fsdp.settings import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from megatron.fsdp.state_dict import summon_full_params
from megatron.fsdp.wrap import (
    auto_wrap,
    checkpoint_wrapper,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    disable_checkpointing,
    enable_wrap,
    transformer_auto_wrap_policy,
    wrap,
)
from megatron.fsdp.wrapper import FullyShardedDataParallel

FSDP = FullyShardedDataParallel

__all__ = ["CPUOffloadPolicy", "FSDP", "FSDPModule", "FullyShardedDataParallel", "MixedPrecisionPolicy",
           "OffloadPolicy", "StateDictOptions", "auto_wrap", "checkpoint_wrapper", "clip_grad_norm_",
           "config_auto_wrap_policy", "default_auto_wrap_policy", "disable_checkpointing", "enable_wrap", "fully_shard",
           "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "load_checkpoint", "save_checkpoint",
           "set_model_state_dict", "set_optimizer_state_dict", "set_state_dict", "summon_full_params",
           "transformer_auto_wrap_policy", "wrap"]
