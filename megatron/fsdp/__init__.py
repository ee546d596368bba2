"""FSDP: FairScale's and torch's (FSDP2) interfaces to ZeRO stage 3, over the mechanism of megatron/zero.

    model = FullyShardedDataParallel(model)      # FairScale's, in place of DistributedDataParallel
    fully_shard(block); fully_shard(model)       # torch's: the blocks first

The optimizer, its scheduler and the loop are the user's: `loss.backward()`, `optimizer.step()`. Begin with
fully_sharded_data_parallel.py and fully_shard.py (the two interfaces), then sharding.py (shards a module), root.py (a
training step) and sharded_tensor.py (parameters between passes). state_dict.py and checkpoint.py save.
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from megatron.fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron.fsdp.fully_shard import FSDPModule, fully_shard
from megatron.fsdp.fully_sharded_data_parallel import (
    FullyShardedDataParallel, auto_wrap, checkpoint_wrapper, config_auto_wrap_policy, default_auto_wrap_policy,
    disable_checkpointing, enable_wrap, transformer_auto_wrap_policy, wrap)
from megatron.fsdp.root import clip_grad_norm_
from megatron.fsdp.state_dict import (get_model_state_dict, get_optimizer_state_dict, get_state_dict,
                                      set_model_state_dict, set_optimizer_state_dict, set_state_dict,
                                      summon_full_params)

FSDP = FullyShardedDataParallel

__all__ = ["CPUOffloadPolicy", "FSDP", "FSDPModule", "FullyShardedDataParallel", "MixedPrecisionPolicy",
           "OffloadPolicy", "StateDictOptions", "auto_wrap", "checkpoint_wrapper", "clip_grad_norm_",
           "config_auto_wrap_policy", "default_auto_wrap_policy", "disable_checkpointing", "enable_wrap", "fully_shard",
           "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "load_checkpoint", "save_checkpoint",
           "set_model_state_dict", "set_optimizer_state_dict", "set_state_dict", "summon_full_params",
           "transformer_auto_wrap_policy", "wrap"]
