"""The section `zero`: what is partitioned over data parallel (see zero/policy.py), and how it is communicated."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, require, setting

_ZERO_OPTIMIZATION = "zero_optimization."


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is partitioned over data parallel, and how it is communicated. Sizes are in elements, not bytes."""

    zero_stage: int = setting(0, "partition 0: nothing; 1: optimizer state (as --use-distributed-optimizer); 2: and "
                                 "gradients; 3: and parameters",
                              json=_ZERO_OPTIMIZATION + "stage", in_short_help=True)
    contiguous_gradients: bool = setting(True,
                                         "write gradients into one buffer as they are computed",
                                         "zero-contiguous-gradients",
                                         "zero-contigious-gradients",
                                         json=_ZERO_OPTIMIZATION)
    overlap_comm: bool = setting(
        True, "overlap communication with computation", "overlap-grad-reduce", "overlap-param-gather",
        json=JsonKey(_ZERO_OPTIMIZATION, nullable=True, help="DeepSpeed's default: at stage 3 only"))
    reduce_scatter: bool = setting(True, "reduce gradients to their owner only (--no-reduce-scatter: to all ranks)",
                                   "zero-reduce-scatter", json=_ZERO_OPTIMIZATION)
    prescale_gradients: bool = setting(
        False, "divide gradients by the data parallel size before they are reduced, not after",
        json="prescale_gradients")
    gradient_predivide_factor: float = setting(
        1.0, "divide gradients by this before they are reduced, and by the rest of the data parallel size after",
        json="gradient_predivide_factor")
    reduce_bucket_size: int = setting(500_000_000, "gradients reduced at a time on CPU (on GPUs: a block)",
                                      "zero-reduce-bucket-size", json=_ZERO_OPTIMIZATION)
    allgather_partitions: bool = setting(
        True, "accepted; each device has one way to collect updated weights", json=_ZERO_OPTIMIZATION)
    allgather_bucket_size: int = setting(500_000_000, "weights collected at a time on CPU (on GPUs: a block)",
                                         "zero-allgather-bucket-size", json=_ZERO_OPTIMIZATION)
    load_from_fp32_weights: bool = setting(
        True, "load the checkpoint's fp32 master weights (--no-load-from-fp32-weights: make them from its weights)",
        json=_ZERO_OPTIMIZATION)
    ignore_unused_parameters: bool = setting(True, "accept parameters that get no gradient", json=_ZERO_OPTIMIZATION)
    round_robin_gradients: bool = setting(False,
                                          "spread copies of gradients to the host over the ranks",
                                          json=_ZERO_OPTIMIZATION)
    sub_group_size: int = setting(1_000_000_000, "elements per tile of the optimizer step", json=_ZERO_OPTIMIZATION)
    stage3_max_live_parameters: int = setting(1_000_000_000,
                                              "most parameters gathered at once",
                                              json=_ZERO_OPTIMIZATION)
    stage3_max_reuse_distance: int = setting(
        0, "keep a block gathered after its forward if its backward comes before so many other parameters are used",
        json=JsonKey(_ZERO_OPTIMIZATION, help="DeepSpeed's default, 1e9, keeps smaller models whole"))
    stage3_prefetch_bucket_size: int = setting(
        50_000_000, "gather the next block ahead of its use; 0: do not", json=_ZERO_OPTIMIZATION)
    stage3_param_persistence_threshold: int = setting(
        100_000, "never partition a parameter of fewer elements", json=_ZERO_OPTIMIZATION)
    stage3_gather_16bit_weights_on_model_save: bool = setting(
        False, "let save_16bit_model gather partitioned parameters", json=_ZERO_OPTIMIZATION)

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require(self.zero_stage in (0, 1, 2, 3), f"--zero-stage is {self.zero_stage}: expected 0, 1, 2 or 3")
        problems.require_range(self, "gradient_predivide_factor", 0, 2.0**64, open_low=True)
        problems.require_range(self, "reduce_bucket_size allgather_bucket_size sub_group_size", 1, 2**63 - 1)
        problems.require_range(self, "stage3_max_live_parameters stage3_max_reuse_distance", 0, 2**63 - 1)
        problems.require_range(self, "stage3_prefetch_bucket_size stage3_param_persistence_threshold", 0, 2**63 - 1)
        problems.raise_if_any()
        require(not self.prescale_gradients or self.gradient_predivide_factor == 1,
                f"--prescale-gradients divides by the data parallel size, --gradient-predivide-factor by "
                f"{self.gradient_predivide_factor:g}: give one of them")
