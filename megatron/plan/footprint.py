"""The persistent memory and the traffic of a run, and its activations, from its configuration alone: pure arithmetic,
for any number of ranks.

`PlannedRun` is a configuration on a number of ranks of one device type. It uses the engine's own layout (FlatLayout
with its padding) and precisions. Transient memory of a step is in memory.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from shlex import quote
from typing import Literal

from megatron.config.optimizer_config import ONE_BIT_OPTIMIZERS
from megatron.config.tree import Config, OffloadConfig, data_parallel_size
from megatron.layer_drop import expected_blocks
from megatron.zero.layout import FlatLayout, Slot, align
from megatron.zero.offload.chunk_sizes import (STEP_BUFFER_SETS, OffloadRatio, largest_chunk, param_chunks,
                                               split_into_chunks, step_chunk_numel)
from megatron.zero.stages import StagePolicy, gradient_precisions, stage_policy

Device = Literal["cpu", "cuda"]
OffloadTarget = Literal["none", "cpu", "nvme"]
Units = Literal["blocks", "root", "all"]  # of which parameters

FP32 = 4  # bytes
ITEMSIZE = {"fp32": FP32, "fp16": 2, "bf16": 2}
MOMENTS_PER_WEIGHT = 2  # AdamW's moments per weight


@dataclass(frozen=True)
class StatePlacement:
    """Where a rank's shards are between uses: on the device ("none"), on the host, on an NVMe drive."""

    optimizer: OffloadTarget = "none"
    params: OffloadTarget = "none"

    def __str__(self) -> str:
        if self.params == "none":
            return self.optimizer
        return self.optimizer + ("+params" if self.params == self.optimizer else f", params {self.params}")

    @property
    def min_stage(self) -> int:
        """The lowest ZeRO stage that allows this placement."""
        return 3 if self.params != "none" else 1 if self.optimizer != "none" else 0

    def apply_to(self, offload: OffloadConfig) -> OffloadConfig:
        """A kind of state on NVMe without a configured folder uses the other's, or a placeholder."""
        own, params = offload.offload_optimizer_nvme_path, offload.offload_param_nvme_path
        default = own or params or "DIR"
        return replace(offload, offload_optimizer_device=self.optimizer, offload_param_device=self.params,
                       offload_optimizer_nvme_path=own or (default if self.optimizer == "nvme" else None),
                       offload_param_nvme_path=params or (default if self.params == "nvme" else None))

    def flags(self, offload: OffloadConfig = OffloadConfig()) -> str:
        """With the NVMe folders of `apply_to`."""
        placed = self.apply_to(offload)
        kinds = (("optimizer", self.optimizer, placed.offload_optimizer_nvme_path),
                 ("param", self.params, placed.offload_param_nvme_path))
        return " ".join(f"--offload-{kind}-device {place}"
                        + f" --offload-{kind}-nvme-path {quote(folder or '')}" * (place == "nvme")
                        for kind, place, folder in kinds if place != "none")


ALL_ON_DEVICE = StatePlacement()


@dataclass(frozen=True)
class Collectives:
    """The collectives of one kind and purpose in one optimizer step."""

    purpose: Literal["gradients", "parameters", "matrices", "activations", "norm"]
    units: Units
    kind: Literal["all-reduce", "reduce-scatter", "all-gather"]
    size: int  # ranks of a group
    stride: int  # from one rank of a group to the next
    calls: float
    full_bytes: int  # of the full tensors of all calls

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, by rings: all but its own shard. An all-reduce is a reduce-scatter and an
        all-gather."""
        return (1 + (self.kind == "all-reduce")) * (self.full_bytes * (self.size - 1) // self.size)


@dataclass(frozen=True)
class PlannedRun:
    """A configuration on a number of ranks of one device type."""

    config: Config
    ranks: int = 1
    device: Device = "cuda"

    @cached_property
    def placement(self) -> StatePlacement:
        return StatePlacement(self.config.offload.offload_optimizer_device, self.config.offload.offload_param_device)

    @cached_property
    def offload_placement(self) -> StatePlacement:
        """The placement as it works on this device: a CPU is its own host."""
        if self.device == "cuda":
            return self.placement
        return StatePlacement(*("none" if place == "cpu" else place
                                for place in (self.placement.optimizer, self.placement.params)))

    # ---- sizes ----------------------------------------------------------------------------------------------------

    @property
    def tp(self) -> int:
        return self.config.parallel.model_parallel_size

    @property
    def sequence_shards(self) -> int:
        """Ranks that split the positions of the residual stream."""
        return self.tp if self.config.parallel.sequence_parallel else 1

    @cached_property
    def dp(self) -> int:
        return data_parallel_size(self.ranks, self.tp)

    @cached_property
    def accumulation(self) -> int:
        return self.config.accumulation(self.dp)

    @cached_property
    def policy(self) -> StagePolicy:
        return stage_policy(self.config.zero.zero_stage)

    @property
    def num_shards(self) -> int:
        return self.config.zero.shard_ranks(self.dp)

    @property
    def num_layers(self) -> int:
        return self.config.model.num_layers

    @cached_property
    def mean_active_blocks(self) -> float:
        """Blocks that a step runs, on average over the run: fewer than num_layers with progressive layer drop."""
        schedule = self.config.layer_drop.schedule
        theta = 1.0 if schedule is None else schedule.mean(self.config.train.train_iters)
        return expected_blocks(self.num_layers, theta)

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of a working weight."""
        return ITEMSIZE[self.config.precision.name]

    @cached_property
    def grad_bytes(self) -> int:
        """Bytes of a gradient after backward."""
        return ITEMSIZE[gradient_precisions(self.policy, self.config.precision, self.accumulation)[0]]

    @cached_property
    def grad_sum_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        return ITEMSIZE[gradient_precisions(self.policy, self.config.precision, self.accumulation)[1]]

    @cached_property
    def vocab_columns(self) -> int:
        """Columns of the logits on one rank: the rows of the token embedding."""
        return next(slot.shape[0] for slot in self.root_parameters if slot.name == "wte.weight")

    @cached_property
    def root(self) -> FlatLayout:
        """The bucket of the embeddings and the last LayerNorm."""
        return FlatLayout([slot for slot in self.root_parameters if not self._is_persistent(slot)], self.num_shards)

    @cached_property
    def block(self) -> FlatLayout:
        """The bucket of one transformer block."""
        return FlatLayout([slot for slot in self.block_parameters if not self._is_persistent(slot)], self.num_shards)

    @cached_property
    def persistent(self) -> FlatLayout:
        """The bucket of parameters too small to be sharded."""
        slots = [*self.root_parameters, *self.block_parameters * self.num_layers]
        return FlatLayout([slot for slot in slots if self._is_persistent(slot)], self.num_shards)

    def _is_persistent(self, slot: Slot) -> bool:
        """Whether the parameter stays gathered on every rank at stage 3."""
        return self.policy.params_are_sharded and slot.numel < self.config.zero.stage3_param_persistence_threshold

    @cached_property
    def root_parameters(self) -> list[Slot]:
        """The parameters outside the blocks."""
        from megatron.model.gpt2 import parameter_shapes  # flags are parsed, and wrong ones refused, without torch

        return [Slot(*item) for item in parameter_shapes(self.config.model, self.tp)[0].items()]

    @cached_property
    def block_parameters(self) -> list[Slot]:
        """The parameters of one transformer block on one tensor parallel rank."""
        from megatron.model.gpt2 import parameter_shapes

        return [Slot(*item) for item in parameter_shapes(self.config.model, self.tp)[1].items()]

    @cached_property
    def activations(self) -> Activations:
        return Activations(self)

    # ---- persistent memory ----------------------------------------------------------------------------------------

    @cached_property
    def shard_numel(self) -> int:
        """Parameters whose optimizer state is on this rank."""
        return self._sharded_numel + self.persistent.shard_numel

    @cached_property
    def params_device_bytes(self) -> int:
        """Bytes of the working weights between steps."""
        if self.offload_placement.params != "none":
            return self.persistent.numel * self.param_bytes
        if self.policy.params_are_sharded:
            return (self._sharded_numel + self.persistent.numel) * self.param_bytes
        return (self.root.numel + self.num_layers * self.block.numel) * self.param_bytes

    @cached_property
    def bucket_offload(self) -> Sequence[tuple[FlatLayout, bool]]:
        """Each bucket, and whether its optimizer state is offloaded."""
        is_offloaded = self.offload_placement.optimizer != "none"
        ratio = OffloadRatio(self.config.offload.offload_optimizer_ratio if is_offloaded else 0.0)
        buckets = [self.root, *[self.persistent] * bool(self.persistent.numel), *[self.block] * self.num_layers]
        return [(layout, ratio.offloads_next(layout.shard_numel)) for layout in buckets]

    @cached_property
    def offloaded_numel(self) -> int:
        """Parameters of this rank whose optimizer state is not on the device."""
        return sum(layout.shard_numel for layout, leaves in self.bucket_offload if leaves)

    @cached_property
    def offloaded_optimizer_bytes(self) -> int:
        """Bytes of this rank's masters and moments that are not on the device."""
        return self.offloaded_numel * FP32 * (1 + MOMENTS_PER_WEIGHT)

    @property
    def keeps_masters(self) -> bool:
        """Whether the device has fp32 masters apart from the working weights."""
        return (self.param_bytes < FP32 or self.offload_placement.params != "none"
                or self.config.quantize.quantize_training)

    @cached_property
    def device_optimizer_bytes(self) -> int:
        """Bytes of this rank's masters, moments and error feedback on the device."""
        optimizer = self.config.optim.optimizer
        per_weight = MOMENTS_PER_WEIGHT + (optimizer == "onebit_lamb") + self.keeps_masters
        error_feedback = 0
        if optimizer in ONE_BIT_OPTIMIZERS:
            numel = self.root.numel + self.num_layers * self.block.numel
            # worker and server errors, and two bits per element: its sign, and whether it is 0
            error_feedback = numel * FP32 + numel * FP32 // self.dp + numel * 2 // 8
        return (self.shard_numel - self.offloaded_numel) * FP32 * per_weight + error_feedback

    @property
    def tile_numel(self) -> int:
        """Elements of an optimizer step at a time."""
        from megatron.optim.adam import MAX_TILE_NUMEL

        return min(MAX_TILE_NUMEL, align(self.config.zero.sub_group_size))

    @property
    def nvme_bytes(self) -> int:
        return sum(self.nvme_by_kind.values())

    @property
    def offloaded_host_bytes(self) -> int:
        """Offloaded state, and activation checkpoints on the host; a CPU is its own host."""
        return self.host_bytes if self.device == "cuda" else 0

    @cached_property
    def nvme_by_kind(self) -> dict[str, int]:
        """Bytes on the drive."""
        weights = sum(layout.shard_numel for layout in self._nvme_buckets) * self.param_bytes
        return {"parameters": weights if self.offload_placement.params == "nvme" else 0,
                "optimizer": self.offloaded_optimizer_bytes if self.offload_placement.optimizer == "nvme" else 0}

    @property
    def host_bytes(self) -> int:
        return sum(self.host_by_kind.values())

    @cached_property
    def host_by_kind(self) -> dict[str, int]:
        """Bytes of offloaded state, of the buffers in front of a drive, and of activation checkpoints."""
        offload, placement = self.config.offload, self.offload_placement
        by_kind = {"parameters": 0,
                   "gradients": self.offloaded_numel * self.grad_sum_bytes if self.gradients_are_offloaded else 0,
                   "optimizer": self.offloaded_optimizer_bytes if placement.optimizer == "cpu" else 0,
                   "activations": self.activations.host_input_bytes, "buffers": 0}
        if placement.optimizer == "nvme":
            by_kind["buffers"] += STEP_BUFFER_SETS * (1 + MOMENTS_PER_WEIGHT) * self.max_offload_chunk_numel * FP32
        if self.gradients_are_offloaded and placement.optimizer == "cpu" and offload.delayed_param_update:
            by_kind["gradients"] *= 2  # of the running update, and of the next one
            by_kind["buffers"] += self.shard_numel * self.param_bytes
        elif self.gradients_are_offloaded and placement.params == "none":
            by_kind["buffers"] += 2 * self.max_offload_chunk_numel * self.param_bytes  # new weights, leaving
        if placement.params == "cpu":
            by_kind["parameters"] = self._sharded_numel * self.param_bytes
        elif placement.params == "nvme":
            shards, of_step = [layout.shard_numel for layout in self._nvme_buckets], self._offload_chunk_numel
            chunk, sets = param_chunks(offload.offload_param_buffer_size, offload.offload_param_buffer_count, of_step)
            chunks = [one for numel in shards for one in split_into_chunks(numel, chunk, of_step)]
            by_kind["parameters"] = (self._sharded_numel - sum(shards)) * self.param_bytes
            by_kind["buffers"] += min(sets, len(chunks)) * largest_chunk(chunks) * self.param_bytes
        return by_kind

    @property
    def _offload_chunk_numel(self) -> int | None:
        """Elements of offloaded optimizer state that a step updates at a time."""
        return step_chunk_numel(self.offload_placement.optimizer, self.tile_numel,
                                self.config.offload.offload_optimizer_buffer_count, 1 + MOMENTS_PER_WEIGHT)

    @property
    def max_offload_chunk_numel(self) -> int:
        """The largest chunk of it that occurs, in elements."""
        return max(largest_chunk(split_into_chunks(layout.shard_numel, self._offload_chunk_numel or layout.shard_numel))
                   for layout in (self.root, self.persistent, self.block) if layout.shard_numel)

    @property
    def state_is_updated_on_device(self) -> bool:
        """Optimizer state is copied to the device for its update, a chunk at a time, and back to the host."""
        return self.device == "cuda" and self.offload_placement.optimizer == "cpu" and \
            self.config.offload.offload_update == "device"

    @property
    def _sharded_numel(self) -> int:
        """Elements of this rank's parameter shards, without the persistent ones."""
        return self.root.shard_numel + self.num_layers * self.block.shard_numel

    @cached_property
    def _nvme_buckets(self) -> list[FlatLayout]:
        """Buckets whose weights are on a drive: those beyond --offload-param-max-in-cpu, in their order."""
        left, on_drive = self.config.offload.offload_param_max_in_cpu, []
        for layout in [self.root, *[self.block] * self.num_layers]:
            if layout.shard_numel <= left:
                left -= layout.shard_numel
            else:
                on_drive.append(layout)
        return on_drive

    @property
    def gradients_are_offloaded(self) -> bool:
        """The device does not keep the gradient sums of offloaded state. (`auto` keeps them only if there is much free
        memory.)"""
        return (self.device == "cuda" and self.offload_placement.optimizer != "none"
                and not self.state_is_updated_on_device)

    # ---- traffic ------------------------------------------------------------------------------------------------

    def traffic(self) -> Counter[str]:
        """Purpose -> bytes that a rank sends in one optimizer step."""
        return sum((Counter({one.purpose: one.sent}) for one in self.collectives()), Counter[str]())

    def collectives(self) -> list[Collectives]:
        """Each unit is reduced, and gathered from stage 1 on. Replicas of shards then all-reduce them."""
        shards, tp, on_gpu = self.num_shards, self.tp, self.device == "cuda"
        rounds = self.accumulation if self.policy.grads_are_sharded else 1
        # accelerators reduce in fp32 unless configured otherwise
        sent_in = self.config.precision.communication
        sent_bytes = ITEMSIZE[sent_in] if sent_in else FP32 if on_gpu else self.grad_bytes
        found = [Collectives("norm", "all", "all-reduce", self.ranks, 1, 1, 0)]
        units: dict[Units, list[FlatLayout]] = {"blocks": [self.block] * self.num_layers,
                                                "root": [self.root, self.persistent]}
        for unit, layouts in units.items():
            buckets, numel = sum(bool(layout.numel) for layout in layouts), sum(layout.numel for layout in layouts)
            calls, full_bytes = rounds * buckets, rounds * numel * sent_bytes
            if self.config.optim.optimizer in ONE_BIT_OPTIMIZERS:  # after the warm-up, to the servers and back
                found.append(Collectives("gradients", "all", "all-reduce", self.dp, tp, buckets, numel // 8))
            elif shards == 1 or not self.config.zero.reduce_scatter:
                found.append(Collectives("gradients", unit, "all-reduce", self.dp, tp, calls, full_bytes))
            else:
                between = (full_bytes if on_gpu else rounds * numel * FP32) // shards
                found += [Collectives("gradients", unit, "reduce-scatter", shards, tp, calls, full_bytes),
                          Collectives("gradients", unit, "all-reduce", self.dp // shards, tp * shards, calls, between)]
            if self.policy.optim_is_sharded:
                gathers = [self._gathers_of(layout) * bool(layout.numel) for layout in layouts]
                gathered = sum(count * layout.numel for count, layout in zip(gathers, layouts, strict=True))
                found.append(Collectives("parameters", unit, "all-gather", shards, tp, round(sum(gathers), 1),
                                         round(gathered) * self.param_bytes))
        if matrices := shards * self.muon_bytes * sum(self.matrices_numel(layout) for layout, _ in self.bucket_offload):
            found.append(Collectives("matrices", "all", "all-gather", shards, tp, self.num_layers, matrices))
        return [one for one in (*found, self._tensor_parallel_collectives()) if one.size > 1 and one.calls]

    def _gathers_of(self, layout: FlatLayout) -> float:
        """Mean all-gathers of a bucket in a step: one after it, or at stage 3 those of its uses."""
        if not self.policy.params_are_sharded or layout is self.persistent:
            return 1.0
        uses = max(0.0, 2 * self.mean_active_blocks - self.reused_blocks) / self.num_layers
        return self.accumulation * (1 if layout is self.root else uses)

    def _tensor_parallel_collectives(self) -> Collectives:
        """Two sums of a block in each direction; those of the embedding and of the loss."""
        from mpu.cross_entropy import CPU_BLOCK_ROWS

        acts, active = self.activations, self.mean_active_blocks
        passes = 2 * active * (2 if acts.chunk is None else 3) + 2
        small: float = 2 * acts.tokens / CPU_BLOCK_ROWS if self.device == "cpu" else 1  # sums of losses, of few bytes
        kind: Literal["all-reduce", "all-gather"] = "all-reduce"
        if self.sequence_shards > 1:  # backward gathers inputs again, and sums gradients of LayerNorms
            kind, passes, small = "all-gather", 2 * passes + 2 * active, small + 2 * active + 1
        return Collectives("activations", "all", kind, self.tp, 1, self.accumulation * (passes + small),
                           round(self.accumulation * passes * acts.gathered_bytes))

    @property
    def reused_blocks(self) -> int:
        """Blocks that stay gathered from their forward to their backward (stage 3)."""
        return min(self.num_layers,
                   self.config.zero.stage3_max_reuse_distance // (2 * max(1, self.block.numel)) + 1)

    @cached_property
    def muon_bytes(self) -> int:
        """Bytes of an element of a matrix that Muon gathers: in the dtype of its products."""
        from megatron.optim.muon import has_fast_bf16_matmul

        return ITEMSIZE["bf16" if has_fast_bf16_matmul(self.device) else "fp32"]

    def matrices_numel(self, layout: FlatLayout) -> int:
        """Upper bound on a rank's elements of a bucket's hidden matrices; 0 unless Muon gathers them."""
        if self.config.optim.optimizer != "muon":
            return 0
        in_block = {slot.name for slot in self.block_parameters}
        hidden = (slot for slot in layout.slots if len(slot.shape) == 2 and slot.name in in_block)
        return min(layout.shard_numel, sum(align(slot.numel) for slot in hidden))


# ---- activations ------------------------------------------------------------------------------------------------


class Activations:
    """Activation memory of one micro-batch between its forward and its backward, in bytes.

    Autograd saves the tensors that a backward formula reads, each storage once (T tokens, h hidden, f MLP width, t
    tensor parallel ranks): LayerNorm its input [T, h] with mean and 1/std [T]; a linear layer its input; attention q,
    k, v [T, 3h/t], its output [T, h/t] and an fp32 log-sum-exp per row and head; GELU its input [T, f/t]; dropout a
    mask [T, h]. With sequence parallelism every [T, h] and [T] is [T/t, h] and [T/t]. Activation checkpointing saves
    the input [T, h] of each chunk of blocks instead: in place, partitioned over tensor parallel ranks, on the host, or
    in a contiguous buffer. Selective recomputation saves a block's input and the results of its matrix products and
    collectives (recompute/selective.py). CPU attention with dropout is unfused: fp32, three [s, s] matrices a head.
    """

    def __init__(self, run: PlannedRun) -> None:
        model, recompute, tp, param_bytes = run.config.model, run.config.recompute, run.tp, run.param_bytes
        sequence, on_gpu = run.config.seq_length, run.device == "cuda"
        self.tokens = tokens = run.config.train.batch_size * sequence
        shards = run.sequence_shards
        self.gathered_bytes = tokens * model.hidden_size * param_bytes  # [T, h] of the residual stream, all positions
        self.residual_bytes = self.gathered_bytes // shards  # those of this rank
        self.mlp_bytes = tokens * model.ffn_size // tp * param_bytes  # [T, f/t] inside the MLP
        self.norm_bytes = 2 * tokens // shards * (FP32 if on_gpu else param_bytes)  # of one LayerNorm
        if shards > 1:
            self.norm_bytes += 2 * model.hidden_size * param_bytes  # weight and bias, stacked
        if model.normalization == "RMSNorm" and not on_gpu:  # not fused there: x / rms(x) is kept too
            self.norm_bytes += self.residual_bytes
        mask_bytes = 1 if on_gpu else param_bytes
        dropout_mask = tokens // shards * model.hidden_size * mask_bytes if model.hidden_dropout else 0

        # attention: q and the output [T, h/t], k and v [T, h/t] or as many heads as they have
        is_unfused = not on_gpu and model.attention_dropout > 0
        queries, keys = (tokens * model.head_size * heads // tp
                         for heads in (model.num_attention_heads, model.kv_heads))
        scores = tokens * sequence * model.num_attention_heads // tp * FP32  # an fp32 [s, s] for each head and sample
        if is_unfused:
            attention = queries * param_bytes + (queries + 2 * keys) * FP32 + 3 * scores
        else:
            rows = tokens * model.num_attention_heads // tp
            # documents that are kept apart give attention a mask
            mask = tokens * sequence * param_bytes if run.config.data.reset_attention_mask else 0
            attention = 2 * (queries + keys) * param_bytes + rows * FP32 + mask
        if model.qk_norm or model.position_embedding_type == "rope":  # beside those of the projection
            attention += (queries + keys) * param_bytes
        streams = 4 * self.residual_bytes  # inputs of two LayerNorms, of the q, k, v projection and of the MLP
        # Everything one block saves, its input included (the next block's input is its output).
        in_mlp = 4 if model.activation == "swiglu" else 2  # tensors [T, f/t]
        self.block = streams + 2 * self.norm_bytes + attention + in_mlp * self.mlp_bytes + 2 * dropout_mask
        self.kept = self.block  # until its backward begins
        if recompute.is_selective:
            modules = recompute.recompute_modules
            # Autograd itself would not save the results of the projections to the residual stream, and of the
            # collectives behind them (on a CPU a reduce-scatter is an all-to-all).
            reduced = 0 if tp == 1 else self.residual_bytes if on_gpu or shards == 1 else self.gathered_bytes
            self.kept = (self.residual_bytes + (queries + 2 * keys) * param_bytes + 2 * (self.gathered_bytes + reduced)
                         + in_mlp // 2 * self.mlp_bytes)
            if "core_attn" not in modules and not is_unfused:
                self.kept += queries * param_bytes + rows * FP32
            if "layernorm" not in modules:
                self.kept += 2 * (self.residual_bytes + self.norm_bytes)
            if "mlp_act" not in modules:
                self.kept += self.mlp_bytes
        # Peak of a block's backward beyond its saved tensors: gradients of the residual stream, and of the activation's
        # output while that of its input is computed (of a square through two more tensors).
        self.block_backward = self.residual_bytes + (3 if model.activation == "squared_relu" else 1) * self.mlp_bytes
        if is_unfused:
            freed = 2 * self.residual_bytes + 2 * self.mlp_bytes  # the second half of the block is done
            self.block_backward = max(self.block_backward, self.residual_bytes + 2 * scores - freed)
        split_lookup = tokens * (8 + 1 + 1) if tp > 1 else 0
        # The tokens, their targets and weights, and tensors saved by the embeddings.
        self.before_blocks = tokens * (8 + 8 + FP32) + split_lookup + dropout_mask

        # Blocks recomputed at a time; None: nothing is recomputed.
        self.chunk = recompute.checkpoint_num_layers if recompute.recomputes_chunks else None
        self.num_layers, self.num_chunks = model.num_layers, -(-model.num_layers // (self.chunk or 1))
        self.inputs_are_on_host = recompute.cpu_checkpointing and on_gpu
        parts = tp if recompute.partition_activations else shards
        self._chunk_input = -(-tokens * model.hidden_size // parts) * param_bytes  # the saved input of one chunk
        # of the contiguous buffer of saved inputs
        self._has_buffer = self.chunk is not None and recompute.contiguous_memory_optimization
        buffer_rows = (recompute.number_checkpoints or self.num_chunks) if self._has_buffer else 0
        # Bytes on the host at the end of the forward.
        self.host_input_bytes = (max(self.num_chunks, buffer_rows) * self._chunk_input
                                 if self.inputs_are_on_host and self.chunk else 0)
        # The buffer on the device: allocated in the first forward, and kept.
        self.input_buffer_bytes = 0 if self.inputs_are_on_host else buffer_rows * self._chunk_input
        # the full input exists beside a saved copy of it
        self._copies_input = (recompute.partition_activations and tp > shards or self.inputs_are_on_host
                              or self._has_buffer)

    def _device_input_bytes(self, chunks: int) -> int:
        """Inputs of that many chunks on the device, outside the buffer."""
        return 0 if self.inputs_are_on_host or self._has_buffer else chunks * self._chunk_input

    def alive_at_block(self, block: int) -> int:
        """Alive when the backward of block number `block` begins: all of it, and what is kept of the blocks before it;
        or the inputs of the chunks up to its own, and the recomputed blocks of its own chunk."""
        if self.chunk is None:
            return block * self.kept + self.block
        number, inside = divmod(block, self.chunk)
        recomputed = (inside + 1) * self.block
        # the next chunk's input is copied to the device meanwhile
        prefetched = self.residual_bytes if self.inputs_are_on_host and number else 0
        return self._device_input_bytes(number + self._copies_input) + recomputed + prefetched

    def alive_at_loss(self) -> int:
        """Alive at the end of the forward: all blocks, or the input of each chunk."""
        return self.num_layers * self.kept if self.chunk is None else self._device_input_bytes(self.num_chunks)
