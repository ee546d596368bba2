"""Our GPT-2 out of the layers of transformers' one, once those are cut: two models over one memory.

The module stays theirs, with all that a script does with it; our decoder runs on the other face.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.checkpoint.interchange.huggingface import our_shape
from megatron.config.setting import require
from megatron.model.gpt2 import GPT2
from mpu.groups import Group
from mpu.partition import mark_partition, partition_of

HEADED = "GPT2LMHeadModel"


@torch.no_grad()
def ours_of(theirs: Any, tp: Group) -> GPT2:
    """A ConfigError, or one of the configuration, where ours would compute something else."""
    shape = our_shape(theirs.config.to_dict(), "the given model")
    body, head = theirs.transformer, theirs.lm_head
    require(head.weight is body.wte.weight and head.bias is None, "its lm_head is not the token table")
    made = GPT2(shape, tp, deferred=True)
    for block, their in zip(made.blocks, body.h, strict=True):
        for ours, layer in (("ln_1", their.ln_1), ("attn.qkv", their.attn.c_attn), ("attn.proj", their.attn.c_proj),
                            ("ln_2", their.ln_2), ("mlp.fc", their.mlp.c_fc), ("mlp.proj", their.mlp.c_proj)):
            _put(block, ours, layer)
    made.wpe, made.ln_f = body.wpe, body.ln_f
    _share_table(made, theirs)
    return made.eval().requires_grad_(False)


def _share_table(made: GPT2, theirs: Any) -> None:
    """Theirs is the real rows of a padded one, and ours this rank's rows of it."""
    whole, partition = theirs.transformer.wte.weight, partition_of(made.wte.weight)
    padded = F.pad(whole, (0, 0, 0, made.wte.padded_shape[0] - len(whole)))
    theirs.transformer.wte.weight = theirs.lm_head.weight = nn.Parameter(padded[: len(whole)], requires_grad=False)
    start, stop = made.wte.vocab_range
    made.wte.weight = nn.Parameter(padded[start:stop], requires_grad=False)
    mark_partition(made.wte.weight, partition)


def _put(block: nn.Module, path: str, layer: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(block.get_submodule(owner), name, layer)
