"""Selective recomputation (Korthikanti et al., 2022): of each block keep what is expensive, and recompute the rest.

torch's selective checkpointing asks a policy about every operation of a block. Results of matrix products and of sums
over tensor parallel ranks are kept, and those of `OPERATIONS` unless their module is to be recomputed. All else is
recomputed: dropout, residual additions, rotary positions, and the score matrices of attention without a fused kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mpu.random import get_rng_tracker

KEPT = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "_c10d_functional::all_reduce",
        # the second is a reduce-scatter on a CPU
        "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single")
# Module of --recompute-modules -> its operations. A name stands for all that begin with it: attention has a kernel for
# each device and dtype.
OPERATIONS = {"core_attn": ("aten::_scaled_dot_product_",), "mlp_act": ("aten::gelu", "aten::silu", "aten::relu"),
              "layernorm": ("aten::native_layer_norm", "aten::_fused_rms_norm")}


def recompute_selectively(block: nn.Module, modules: Collection[str]) -> None:
    """Make backward recompute these modules of `block`, and what is cheap. To compile the block, do so afterwards."""
    forward = block.forward
    kept = (*KEPT, *(name for module, names in OPERATIONS.items() if module not in modules for name in names))

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation.name().startswith(kept)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of a forward, and of its recomputation."""
        keep, replay = create_selective_checkpoint_contexts(policy)
        if torch.compiler.is_compiling():  # compiled dropout replays by itself
            return keep, replay
        streams = get_rng_tracker().get_states()

        @contextmanager
        def replay_streams() -> Iterator[None]:
            with get_rng_tracker().replaying(streams), replay:
                yield

        return keep, replay_streams()

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = run
