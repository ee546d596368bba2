"""The section `recompute`: activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, require, setting

_ACTIVATION_CHECKPOINTING = "activation_checkpointing."


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing: keep the input of each chunk of blocks, and recompute the rest in backward."""

    checkpoint_activations: bool = setting(False, "recompute activations in backward",
                                           "deepspeed-activation-checkpointing", "gradient-checkpointing",
                                           in_short_help=True)
    checkpoint_num_layers: int = setting(1, "blocks per recomputed chunk")
    partition_activations: bool = setting(False,
                                          "partition kept inputs over tensor parallel",
                                          json=_ACTIVATION_CHECKPOINTING)
    cpu_checkpointing: bool = setting(False,
                                      "keep inputs on the host",
                                      "checkpoint-in-cpu",
                                      json=_ACTIVATION_CHECKPOINTING)
    contiguous_memory_optimization: bool = setting(
        False, "keep inputs in one buffer", "contiguous-checkpointing", "contigious-checkpointing",
        json=JsonKey(_ACTIVATION_CHECKPOINTING, help="needs `partition_activations`"))
    number_checkpoints: int | None = setting(None,
                                             "chunks that fit into that buffer (default: those of one forward)",
                                             "num-checkpoints",
                                             json=_ACTIVATION_CHECKPOINTING)
    synchronize_checkpoint_boundary: bool = setting(False, "wait for the device at each chunk",
                                                    "synchronize-each-layer", json=_ACTIVATION_CHECKPOINTING)
    profile_backward: bool = setting(False,
                                     "time each chunk's forward and recomputation",
                                     json=_ACTIVATION_CHECKPOINTING + "profile")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "checkpoint_num_layers number_checkpoints", 1)
        problems.raise_if_any()
        require(self.partition_activations or not self.contiguous_memory_optimization,
                "--contiguous-memory-optimization needs --partition-activations: its buffer holds the parts of inputs")
