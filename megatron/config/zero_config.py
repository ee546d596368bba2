"""Sections `parallel`, `precision`, `zero`, `offload` and `recompute` (activation checkpointing)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.schema import (EXPONENT, INTEGER, MAX_INT64, NUMBER_FROM_0, ConfigSection, ErrorList, JsonKey,
                                    one_of, require, setting)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ConfigSection):
    """How the ranks are arranged: the data parallel size is the number of ranks / the tensor parallel size."""

    model_parallel_size: int = setting(1, "tensor parallel size", "tensor-model-parallel-size", common=True, ge=1)
    sequence_parallel: bool = setting(False, "split LayerNorms, dropout and the residual stream over tensor parallel "
                                             "ranks by position: less activation memory")
    distributed_backend: Literal["nccl", "gloo"] | None = setting(
        None, "communication backend (default: nccl with GPUs, gloo without)", "backend")
    distributed_timeout_seconds: float = setting(600.0, "longest wait for a peer in one collective", gt=0)
    startup_timeout_seconds: float | None = setting(
        None, "the same until all ranks have taken a step: meeting, indexing the corpus, loading, compiling (default: "
        "three times as long)", gt=0)
    local_rank: int | None = setting(None, "accepted for old launchers: LOCAL_RANK in the environment is used")

    def notes(self) -> list[str]:
        """Notes on settings that are on but have no effect."""
        return [" note: --sequence-parallel has no effect: the tensor parallel size is 1"
                ] if self.sequence_parallel and self.model_parallel_size == 1 else []

    @property
    def startup_limit(self) -> float:
        """Timeout until all ranks have completed a step, in seconds."""
        seconds = self.startup_timeout_seconds
        return 3 * self.distributed_timeout_seconds if seconds is None else seconds


def data_parallel_size(world_size: int, tp: int) -> int:
    """The number of ranks per data parallel group; ConfigError if it is not an integer."""
    require(world_size % tp == 0, f"--model-parallel-size {tp} does not divide the number of ranks, {world_size}: "
            f"start a multiple of {tp} ranks (megatron.launch --nproc-per-node)")
    return world_size // tp


FP8_ALIGNMENT = 16  # sizes of products with 8-bit factors: cuBLAS wants rows to begin at multiples of 16 bytes


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(ConfigSection):
    """The working precision of weights and activations. Master weights and moments are always fp32."""

    fp16: bool = setting(False, "train in fp16 with loss scaling", json="fp16.enabled", common=True)
    bf16: bool = setting(False, "train in bf16", json="bf16.enabled", common=True)
    fp8: bool = setting(False, "with --bf16: factors of the products of blocks in 8 bits while training; weights and "
                               "checkpoints as without")
    fp8_head: bool = setting(False, "with --fp8: the same for the logits and the gradient of their input", needs="fp8")
    loss_scale: float | None = setting(None, "fp16: fixed loss scale (default: dynamic)", json=JsonKey(
        "fp16.loss_scale", NUMBER_FROM_0, lambda scale: scale or None, help="0 is dynamic"), gt=0, le=2.0**64)
    initial_loss_scale: float = setting(2.0**16, "fp16: first dynamic loss scale", gt=0, le=2.0**64, json=JsonKey(
        "fp16.initial_scale_power", EXPONENT, lambda power: 2.0**power, default="16", help="as the exponent of 2"))
    loss_scale_window: int = setting(1000, "fp16: steps without overflow before the scale doubles", json="fp16.", ge=1)
    hysteresis: int = setting(2, "fp16: overflows before the scale halves", json="fp16.", ge=1)
    min_scale: float = setting(1.0, "fp16: smallest loss scale; an overflow at this scale ends the run",
                               json="fp16.min_loss_scale", gt=0, le=2.0**64)
    max_skipped_in_a_row: int | None = setting(
        None, "bf16, fp32: steps in a row that may be skipped for a gradient that is not finite before the run ends "
        "(default: none of the first 10 steps, then 3); without effect in fp16, where the loss scale decides", ge=0)
    auto_cast: bool = setting(
        False, "fp16, in zero.initialize: cast floating point inputs of the engine's forward", json="fp16.")
    matmul_precision: Literal["highest", "high", "medium"] | None = setting(
        None, "products of fp32 matrices: highest is fp32, high TF32, medium bf16, where the device has them (default: "
              "high on a GPU, highest on a CPU)")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = setting(
        None, "precision of gradients that ranks send (default: fp32 on GPUs, that of accumulation on CPUs)",
        json=JsonKey("communication_data_type", one_of("fp32", "fp16", "bf16"), nullable=True,
                     refused={"fp8": "gradients are sent in 16 or 32 bits; use fp32, fp16 or bf16"}))
    fp32_allreduce: bool = setting(False, "the old name of --communication-data-type fp32")

    def check(self, errors: ErrorList) -> None:
        errors.require(not (self.fp16 and self.bf16),
                       "{fp16} and {bf16} exclude each other: give one ({no bf16} takes one back)")
        errors.require(self.bf16 or not self.fp8, "{fp8} needs {bf16}: all but products stays in bf16")
        errors.require(self.loss_scale is None or self.fp16,
                       "{loss_scale=} needs {fp16}: other precisions are not scaled")
        errors.require(not self.fp32_allreduce or self.communication_data_type in (None, "fp32"),
                       "{fp32_allreduce} and {communication_data_type=} contradict each other: give one of them")
        errors.require(self.fp16 or not self.auto_cast, "{auto_cast} needs {fp16}: it casts inputs to fp16")
        errors.require(self.min_scale <= self.initial_loss_scale, "{min_scale=} is above {initial_loss_scale=}")

    @property
    def communication(self) -> Literal["fp32", "fp16", "bf16"] | None:
        """Precision in which gradients are sent; None: that in which they are accumulated."""
        return "fp32" if self.fp32_allreduce else self.communication_data_type

    @property
    def name(self) -> Literal["fp32", "fp16", "bf16"]:
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


_ZERO_OPTIMIZATION = "zero_optimization."
_SHARDED, _STAGE_3 = {"zero_stage": (1, 2, 3)}, {"zero_stage": (3,)}


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(ConfigSection):
    """What is partitioned over data parallel, and how it is communicated. Sizes are in elements, not bytes."""

    zero_stage: int = setting(0, "partition 0: nothing; 1: optimizer state (as --use-distributed-optimizer); 2: and "
                              "gradients; 3: and parameters", json=_ZERO_OPTIMIZATION + "stage", common=True)
    zero_shard_group_size: int | None = setting(
        None, "partition over groups of N consecutive data parallel ranks (those of a node, say), each of which has "
        "everything, and reduce gradients between the groups (default: over all ranks)", json=JsonKey(
            _ZERO_OPTIMIZATION + "mics_shard_size", INTEGER, lambda size: None if size == -1 else size, default="-1",
            help="-1: over all ranks; DeepSpeed has it at stage 3"), ge=2, needs=_SHARDED)
    contiguous_gradients: bool = setting(True, "write gradients into one buffer as they are computed",
                                         "zero-contiguous-gradients", "zero-contigious-gradients",
                                         json=_ZERO_OPTIMIZATION)
    overlap_comm: bool = setting(
        True, "overlap communication with computation", "overlap-grad-reduce", "overlap-param-gather",
        json=JsonKey(_ZERO_OPTIMIZATION, nullable=True, help="DeepSpeed's default: at stage 3 only"))
    reduce_scatter: bool = setting(True, "reduce gradients to their owner only (--no-reduce-scatter: to all ranks)",
                                   "zero-reduce-scatter", json=_ZERO_OPTIMIZATION, needs=_SHARDED)
    prescale_gradients: bool = setting(
        False, "divide gradients by the data parallel size before they are reduced, not after",
        json="prescale_gradients")
    gradient_predivide_factor: float = setting(
        1.0, "divide gradients by this before they are reduced, and by the rest of the data parallel size after",
        json="gradient_predivide_factor", gt=0, le=2.0**64)
    reduce_bucket_size: int = setting(500_000_000, "gradients reduced at a time on CPU (on GPUs: a block)",
                                      "zero-reduce-bucket-size", json=_ZERO_OPTIMIZATION, ge=1, le=MAX_INT64)
    allgather_partitions: bool = setting(
        True, "each device has one way to collect updated weights", json=_ZERO_OPTIMIZATION, is_unread=True)
    allgather_bucket_size: int = setting(500_000_000, "weights collected at a time on CPU (on GPUs: a block)",
                                         "zero-allgather-bucket-size", json=_ZERO_OPTIMIZATION, ge=1, le=MAX_INT64,
                                         needs=_SHARDED)
    load_from_fp32_weights: bool = setting(
        True, "load the checkpoint's fp32 master weights (--no-load-from-fp32-weights: make them from its weights)",
        json=_ZERO_OPTIMIZATION, needs={"fp16": (), "bf16": ()})
    ignore_unused_parameters: bool = setting(True, "accept parameters that get no gradient", json=_ZERO_OPTIMIZATION)
    round_robin_gradients: bool = setting(
        False, "each rank copies to the host only its own part of the gradients, an equal one",
        json=_ZERO_OPTIMIZATION, is_unread=True)
    sub_group_size: int = setting(1_000_000_000, "elements per tile of the optimizer step", json=_ZERO_OPTIMIZATION,
                                  ge=1, le=MAX_INT64)
    stage3_max_live_parameters: int = setting(1_000_000_000, "most parameters gathered at once",
                                              json=_ZERO_OPTIMIZATION, ge=0, le=MAX_INT64, needs=_STAGE_3)
    stage3_max_reuse_distance: int = setting(
        0, "keep a block gathered after its forward if its backward comes before that many other parameters are used",
        json=JsonKey(_ZERO_OPTIMIZATION, help="DeepSpeed's default, 1e9, keeps smaller models whole"),
        ge=0, le=MAX_INT64, needs=_STAGE_3)
    stage3_prefetch_bucket_size: int = setting(
        50_000_000, "gather the next block ahead of its use; 0: do not", json=_ZERO_OPTIMIZATION, ge=0, le=MAX_INT64,
        needs=_STAGE_3)
    stage3_param_persistence_threshold: int = setting(
        100_000, "never partition a parameter of fewer elements", json=_ZERO_OPTIMIZATION, ge=0, le=MAX_INT64,
        needs=_STAGE_3)
    stage3_gather_16bit_weights_on_model_save: bool = setting(
        False, "let save_16bit_model gather partitioned parameters", json=_ZERO_OPTIMIZATION, needs=_STAGE_3)

    def check(self, errors: ErrorList) -> None:
        errors.require(self.zero_stage in (0, 1, 2, 3), "{zero_stage} is {stage}: expected 0, 1, 2 or 3",
                       stage=self.zero_stage)
        errors.require(not self.prescale_gradients or self.gradient_predivide_factor == 1, "{prescale_gradients} "
                       "divides by the data parallel size, {gradient_predivide_factor} by {factor:g}: give one of them",
                       factor=self.gradient_predivide_factor)

    def shard_ranks(self, dp_size: int) -> int:
        """The number of data parallel ranks that share what the stage partitions; ConfigError if it does not fit."""
        size = self.zero_shard_group_size or dp_size
        require(dp_size % size == 0,
                f"--zero-shard-group-size {size} does not divide the {dp_size} data parallel ranks")
        return size if self.zero_stage else 1


_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM = "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."
_OPTIMIZER_OFFLOADED, _PARAM_OFFLOADED = ({f"offload_{kind}_device": ("cpu", "nvme")}
                                          for kind in ("optimizer", "param"))
_OPTIMIZER_ON_DRIVE, _PARAM_ON_DRIVE = {"offload_optimizer_device": ("nvme",)}, {"offload_param_device": ("nvme",)}
_DRIVE = _OPTIMIZER_ON_DRIVE | _PARAM_ON_DRIVE


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(ConfigSection):
    """Where the ranks' shards are kept when not in use: on the device, the host or NVMe."""

    offload_optimizer_device: Literal["none", "cpu", "nvme"] = setting(
        "none", "where master weights and moments are kept", json=_OFFLOAD_OPTIMIZER + "device")
    offload_optimizer_nvme_path: str | None = setting(
        None, "folder on the NVMe drive", json=_OFFLOAD_OPTIMIZER + "nvme_path", is_location=True,
        needs=_OPTIMIZER_ON_DRIVE)
    offload_optimizer_buffer_count: int = setting(4, "host buffers in front of the NVMe drive",
                                                  json=_OFFLOAD_OPTIMIZER + "buffer_count", ge=1,
                                                  needs=_OPTIMIZER_ON_DRIVE)
    offload_optimizer_pin_memory: bool = setting(
        True, "page-locked host memory, which a GPU copies from and to faster; on a CPU nothing is locked",
        json=_OFFLOAD_OPTIMIZER + "pin_memory", needs=_OPTIMIZER_OFFLOADED)
    offload_optimizer_pipeline_read: bool = setting(True, "read the next tile while this one is updated",
                                                    json=_OFFLOAD_OPTIMIZER + "pipeline_read",
                                                    needs=_OPTIMIZER_ON_DRIVE)
    offload_optimizer_pipeline_write: bool = setting(True, "write the last tile while this one is updated",
                                                     json=_OFFLOAD_OPTIMIZER + "pipeline_write",
                                                     needs=_OPTIMIZER_ON_DRIVE)
    offload_optimizer_ratio: float = setting(
        1.0, "share of the optimizer's state that leaves the device; the device keeps and updates the rest",
        "optimizer-offload-fraction", json=_OFFLOAD_OPTIMIZER + "ratio", ge=0, le=1, needs=_OPTIMIZER_OFFLOADED)
    offload_update: Literal["auto", "host", "device"] = setting(
        "auto", "where a GPU's offloaded optimizer state is updated: by the host, or on the device, a part at a time; "
        "auto measures both", json=_OFFLOAD_OPTIMIZER + "update", needs={"offload_optimizer_device": ("cpu",)})
    delayed_param_update: bool = setting(
        False, "the host updates beside the next forward and backward of the GPU, which use the weights of before: "
        "faster, and inexact", json=_OFFLOAD_OPTIMIZER + "delayed_param_update",
        needs={"offload_optimizer_device": ("cpu",)})
    offload_param_device: Literal["none", "cpu", "nvme"] = setting(
        "none", "where parameters are kept; stage 3 only", "remote-device", json=_OFFLOAD_PARAM + "device")
    offload_param_nvme_path: str | None = setting(
        None, "folder on the NVMe drive", json=_OFFLOAD_PARAM + "nvme_path", is_location=True, needs=_PARAM_ON_DRIVE)
    offload_param_buffer_count: int = setting(5, "host buffers in front of the NVMe drive",
                                              json=_OFFLOAD_PARAM + "buffer_count", ge=1, needs=_PARAM_ON_DRIVE)
    offload_param_buffer_size: int = setting(100_000_000, "elements per buffer", json=_OFFLOAD_PARAM + "buffer_size",
                                             ge=1, needs=_PARAM_ON_DRIVE)
    offload_param_max_in_cpu: int = setting(1_000_000_000, "elements kept on the host beside the NVMe drive",
                                            json=_OFFLOAD_PARAM + "max_in_cpu", ge=0, needs=_PARAM_ON_DRIVE)
    offload_param_pin_memory: bool = setting(
        True, "page-locked host memory, which a GPU copies from and to faster; on a CPU nothing is locked",
        "use-pin-memory", json=_OFFLOAD_PARAM + "pin_memory", needs=_PARAM_OFFLOADED)
    aio_block_size: int = setting(1_048_576, "bytes per NVMe request", json="aio.block_size", ge=1, needs=_DRIVE)
    aio_queue_depth: int = setting(8, "NVMe requests in flight", json="aio.queue_depth", ge=1, needs=_DRIVE)
    aio_intra_op_parallelism: int = setting(1, "reads under way at a time, and as many writes", "aio-thread-count",
                                            json="aio.intra_op_parallelism", ge=1, needs=_DRIVE)
    aio_single_submit: bool = setting(False, "submit NVMe requests one by one", json="aio.single_submit", needs=_DRIVE)
    aio_overlap_events: bool = setting(True, "submit further NVMe requests while others complete",
                                       json="aio.overlap_events", needs=_DRIVE)

    def check(self, errors: ErrorList) -> None:
        errors.require(self.offload_optimizer_device != "nvme" or bool(self.offload_optimizer_nvme_path),
                       "{offload_optimizer_device=} needs {offload_optimizer_nvme_path}")
        errors.require(self.offload_param_device != "nvme" or bool(self.offload_param_nvme_path),
                       "{offload_param_device=} needs {offload_param_nvme_path}")
        errors.require(not self.delayed_param_update or self.offload_optimizer_ratio == 1,
                       "{delayed_param_update} with {offload_optimizer_ratio=}: the device would update its share at "
                       "once, and the host the rest a step later; leave one of them out")
        errors.require(self.offload_update != "device" or self.offload_optimizer_device != "nvme",
                       "{offload_update=} with {offload_optimizer_device=}: state on a drive comes by way of the "
                       "host, and is updated there; leave the flag out, or keep the state on cpu")


_ACTIVATION_CHECKPOINTING = "activation_checkpointing."
RECOMPUTE_MODULES = "layernorm", "mlp_act", "core_attn"  # what megatron.recompute.selective may recompute


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(ConfigSection):
    """Activation checkpointing: keep the input of each chunk of blocks, or what is expensive in each block, and
    recompute the rest in backward."""

    checkpoint_activations: bool = setting(False, "recompute activations in backward",
                                           "deepspeed-activation-checkpointing", "gradient-checkpointing",
                                           common=True)
    recompute_granularity: Literal["full", "selective"] = setting(
        "full", "full: keep only the inputs of chunks; selective: keep the results of matrix products, and recompute "
        "--recompute-modules and what is cheap", needs="checkpoint_activations")
    recompute_modules: tuple[str, ...] = setting(
        ("layernorm", "mlp_act"), "selective: of layernorm, mlp_act (the MLP's activation) and core_attn (attention by "
        "a fused kernel)", metavar="MODULE", needs={"recompute_granularity": ("selective",)})
    checkpoint_num_layers: int = setting(1, "blocks per recomputed chunk", ge=1)
    partition_activations: bool = setting(False, "partition kept inputs over tensor parallel",
                                          json=_ACTIVATION_CHECKPOINTING, needs="checkpoint_activations")
    cpu_checkpointing: bool = setting(False, "keep inputs on the host", "checkpoint-in-cpu",
                                      json=_ACTIVATION_CHECKPOINTING, needs="checkpoint_activations")
    contiguous_memory_optimization: bool = setting(
        False, "keep inputs in one buffer", "contiguous-checkpointing", "contigious-checkpointing",
        json=JsonKey(_ACTIVATION_CHECKPOINTING, help="needs `partition_activations`"), needs="checkpoint_activations")
    number_checkpoints: int | None = setting(None, "chunks that fit into that buffer (default: those of one forward)",
                                             "num-checkpoints", json=_ACTIVATION_CHECKPOINTING, ge=1)
    synchronize_checkpoint_boundary: bool = setting(False, "wait for the device at each chunk",
                                                    "synchronize-each-layer", json=_ACTIVATION_CHECKPOINTING,
                                                    needs="checkpoint_activations")
    profile_backward: bool = setting(False, "time each chunk's forward and recomputation",
                                     json=_ACTIVATION_CHECKPOINTING + "profile", needs="checkpoint_activations")

    def check(self, errors: ErrorList) -> None:
        errors.require(
            self.partition_activations or not self.contiguous_memory_optimization,
            "{contiguous_memory_optimization} needs {partition_activations}: its buffer holds the parts of inputs")
        for module in self.recompute_modules:
            errors.require(module in RECOMPUTE_MODULES, "{recompute_modules} is {module}: expected of {known}",
                           module=module, known=", ".join(RECOMPUTE_MODULES))
        for name in ("checkpoint_num_layers", "partition_activations", "cpu_checkpointing", "number_checkpoints",
                     "synchronize_checkpoint_boundary", "profile_backward"):
            errors.require(not self.is_selective or getattr(self, name) == getattr(RecomputeConfig, name),
                           f"{{recompute_granularity=}} keeps no inputs of chunks: leave out {{{name}}}")

    @property
    def is_selective(self) -> bool:
        return self.checkpoint_activations and self.recompute_granularity == "selective"

    @property
    def recomputes_chunks(self) -> bool:
        return self.checkpoint_activations and self.recompute_granularity == "full"
