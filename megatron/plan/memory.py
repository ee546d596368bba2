"""Peak memory of a run, from its configuration alone: pure arithmetic, for any number of ranks.

Memory is computed at each phase (init, loss, backward of each block, reduction, update); the peak is the largest:
    parameters    16-bit or fp32 working values: full, or this rank's shards
    gradients     full gradients or shards that last from block to block
    optimizer     fp32 masters (unless they are the parameters) and moments
    activations   tensors saved by autograd, and gradients of activations in flight
    buffers       gathered units, full gradients before reduction, collectives, chunks of logits
The rules are those of the engine and the loss kernels, whose block sizes are imported where they are used: the command
line is checked without torch. Tests compare the results with real allocations. Not included: allocator rounding, the
CUDA context, library workspaces (`USABLE_FRACTION` leaves room for them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace

from megatron.plan.footprint import FP32, MOMENTS_PER_WEIGHT, PlannedRun
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.offload.chunk_sizes import STEP_BUFFER_SETS

# Share of a card that tensors may take; the rest is for the CUDA context, NCCL, work space and fragmentation.
USABLE_FRACTION = 0.92
CPU_THREADS = 16  # threads of a rank, at most: the machine is not known here
INIT_BYTES_PER_ELEMENT = 22  # bytes of an initial weight while it is drawn


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a device in one phase, in bytes."""

    name: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self)[1:])


def peak_memory(run: PlannedRun) -> PhaseMemory:
    return max(all_phases(run), key=lambda phase: phase.total)


def all_phases(run: PlannedRun) -> Iterator[PhaseMemory]:
    yield _init_phase(run)
    yield from step_phases(run)


def step_phases(run: PlannedRun) -> Iterator[PhaseMemory]:
    """Phases of one optimizer step: its first micro-batch, its last one, the update."""
    for first, last in {(True, run.accumulation == 1), (run.accumulation == 1, True)}:
        yield _loss_phase(run, first)
        for block in _extreme_blocks(run):
            yield _backward_phase(run, block, first, last)
            yield _overlap_phase(run, block, first)
        yield _reduction_phase(run, first)
    yield _update_phase(run)


def _extreme_blocks(run: PlannedRun) -> Iterator[int]:
    """Memory changes linearly from block to block, and from chunk to chunk, so the peak is at one of the ends. Two
    blocks at each, as communication overlaps by one."""
    layers, chunk = run.num_layers, run.activations.chunk or 1
    last_chunk = (layers - 1) // chunk * chunk
    ends = {0, 1, chunk - 1, chunk, last_chunk - 2, last_chunk - 1, layers - 2, layers - 1}
    return (block for block in range(layers) if block in ends)


def persistent_memory(run: PlannedRun) -> PhaseMemory:
    """Memory between steps, with all gradients that are kept: what the tables of the ZeRO papers count."""
    if run.policy.grads_are_sharded:
        gradients = (run.shard_numel - run.offloaded_numel * run.gradients_are_offloaded) * run.grad_sum_bytes
    else:
        gradients = (run.root.numel + run.num_layers * run.block.numel) * run.grad_bytes
    return PhaseMemory("lasting", run.params_device_bytes, gradients, run.device_optimizer_bytes)


def _step_phase(run: PlannedRun, name: str, gradients: int, activations: int, buffers: int) -> PhaseMemory:
    """A phase of a step; offloaded gradient shards leave the device as soon as they are reduced."""
    lasting = persistent_memory(run)
    host = run.host_bytes if run.device == "cpu" else 0
    return PhaseMemory(name, lasting.parameters, min(gradients, lasting.gradients), lasting.optimizer, activations,
                       buffers + host + run.activations.input_buffer_bytes)


def _init_phase(run: PlannedRun) -> PhaseMemory:
    """Each rank draws its weights bucket by bucket, then allocates moments. The peak is at the first or last bucket."""
    def master_bytes(layout: FlatLayout, leaves: bool) -> int:
        return layout.shard_numel * FP32 if run.keeps_masters and not leaves else 0

    def lasting_bytes(layout: FlatLayout) -> int:
        """Of a bucket, before moments exist."""
        weights = layout.shard_numel if run.policy.params_are_sharded else layout.numel
        on_device = run.offload_placement.params == "none" or layout is run.persistent
        leaves = next(leaves for bucket, leaves in reversed(run.bucket_offload) if bucket is layout)
        return (weights * run.param_bytes if on_device else 0) + master_bytes(layout, leaves)

    def init_bytes(layout: FlatLayout, parameters: Iterable[Slot]) -> int:
        """Of a bucket while it is filled: first the full bucket, then its lasting part and scratch for drawing."""
        from mpu.weight_init import ACCELERATOR_BLOCK, CPU_BLOCK

        at_a_time = CPU_BLOCK if run.device == "cpu" else ACCELERATOR_BLOCK
        scratch = INIT_BYTES_PER_ELEMENT * min(at_a_time, layout.shard_numel, max(slot.numel for slot in parameters))
        return max(layout.numel * run.param_bytes, lasting_bytes(layout) + scratch)

    masters = sum(master_bytes(layout, leaves) for layout, leaves in run.bucket_offload)
    other_buckets = run.params_device_bytes + masters - lasting_bytes(run.block)
    built = replace(persistent_memory(run), name="building", gradients=0)
    peak = max(init_bytes(run.root, run.root_parameters), other_buckets + init_bytes(run.block, run.block_parameters))
    host = run.host_bytes if run.device == "cpu" else 0
    return replace(built, buffers=host + max(0, peak - built.total))


def _loss_phase(run: PlannedRun, first: bool) -> PhaseMemory:
    acts = run.activations
    alive = acts.before_blocks + acts.alive_at_loss() + acts.residual_bytes + acts.norm_bytes
    ends = 2 * acts.gathered_bytes  # the last LayerNorm's output and its gradient
    kept, whole = _gradient_bytes(run, run.num_layers, first, True)
    fresh = first or run.policy.grads_are_sharded
    return _step_phase(run, "loss", kept, alive + ends,
                       whole + _logits_bytes(run, fresh) + _gathered_bytes(run, run.reused_blocks))


def _logits_bytes(run: PlannedRun, fresh: bool) -> int:
    """Memory of linear_cross_entropy; `fresh`: it may write its weight gradient directly into the bucket."""
    from mpu.cross_entropy import CPU_BLOCK_ROWS, CPU_CHUNK_BYTES, SLAB_COLUMNS, accelerator_rows_per_chunk

    tokens, columns, width = run.activations.tokens, run.vocab_columns, run.config.model.hidden_size
    on_cpu = run.device == "cpu"
    rows = min(tokens, max(CPU_BLOCK_ROWS, CPU_CHUNK_BYTES // (columns * run.param_bytes))) if on_cpu else \
        accelerator_rows_per_chunk(tokens, columns, run.param_bytes)
    block = min(CPU_BLOCK_ROWS, rows) * columns * FP32 if on_cpu else 0  # a GPU kernel works in place
    held = rows * columns * run.param_bytes + 2 * tokens * FP32  # losses and their weights
    total = run.param_bytes if rows >= tokens else FP32
    in_place = fresh and (total == run.grad_bytes or not on_cpu and run.grad_bytes == FP32)
    if not in_place:
        held += columns * width * total
    slab = min(SLAB_COLUMNS, columns) * width * run.param_bytes if on_cpu and run.param_bytes < FP32 else 0
    rounded = 0 if fresh or total == run.param_bytes else columns * width * run.param_bytes
    return held + max(block, slab, rounded)


def _backward_phase(run: PlannedRun, block: int, first: bool, last: bool) -> PhaseMemory:
    """The widest point of one block's backward."""
    acts = run.activations
    alive = acts.before_blocks + acts.alive_at_block(block) + acts.block_backward
    kept, whole = _gradient_bytes(run, block, first, last)
    model = run.config.model
    one_weight = model.hidden_size * model.ffn_size // run.tp * run.param_bytes  # before it is in its bucket
    whole += max(0, one_weight - acts.mlp_bytes)
    return _step_phase(run, "backward", kept, alive, whole + _gathered_bytes(run, _num_gathered_blocks(run, block)))


def _overlap_phase(run: PlannedRun, block: int, first: bool) -> PhaseMemory:
    """Sharded gradients: a block's gradients are reduced while those of the block before it arrive."""
    acts = run.activations
    alive = acts.before_blocks + acts.alive_at_block(block) - acts.block + 2 * acts.residual_bytes
    kept, whole = _gradient_bytes(run, block, first, True)
    whole += _reduction_bytes(run, run.block, first) + _sum_scratch_bytes(run, run.block)
    return _step_phase(run, "backward", kept, alive, whole + _gathered_bytes(run, _num_gathered_blocks(run, block)))


def _reduction_phase(run: PlannedRun, first: bool) -> PhaseMemory:
    acts = run.activations
    tables = {slot.name: slot.numel * run.param_bytes for slot in run.root_parameters}
    embedding = 2 * acts.gathered_bytes + tables.get("wpe.weight", 0)
    if run.device == "cuda":
        embedding = max(embedding, acts.gathered_bytes + tables["wte.weight"])
    kept, whole = _gradient_bytes(run, 0, first, True)
    leaving = (_reduction_bytes(run, run.root, first) + _reduction_bytes(run, run.persistent, first)
               + _sum_scratch_bytes(run, run.root))
    buffers = whole + max(embedding, leaving) + _gathered_bytes(run, 0)
    return _step_phase(run, "reduction", kept, acts.before_blocks, buffers)


def _gradient_bytes(run: PlannedRun, block: int, first: bool, last: bool) -> tuple[int, int]:
    """(kept, on the way) bytes of gradients in the backward of block number `block`."""
    done = run.num_layers - block  # this block included
    small = (run.persistent.numel if done or _uses_grad_buffers(run)
             else 0)  # the loss has written to the token table only
    whole_roots = (run.root.numel + small) * run.grad_bytes
    if not run.policy.grads_are_sharded:
        blocks = done if first else run.num_layers
        leaving = _reduction_bytes(run, run.block, first) if done > 1 and last else 0
        return whole_roots + blocks * run.block.numel * run.grad_bytes, leaving
    shards = max(0, done - 2) if first else run.num_layers
    roots = 0 if first else (run.root.shard_numel + run.persistent.shard_numel) * run.grad_sum_bytes
    whole = whole_roots + min(2, run.num_layers if _uses_grad_buffers(run) else done) * run.block.numel * run.grad_bytes
    leaving = _reduction_bytes(run, run.block, first) if done > 1 else 0
    return shards * run.block.shard_numel * run.grad_sum_bytes + roots, whole + leaving


def _uses_grad_buffers(run: PlannedRun) -> bool:
    """Full gradients are in buffers that are kept from the second step on. (On a single rank without widening they
    become the sums themselves.)"""
    return run.policy.grads_are_sharded and (run.num_shards > 1 or run.grad_sum_bytes != run.grad_bytes)


def _sum_scratch_bytes(run: PlannedRun, layout: FlatLayout) -> int:
    """The accumulator of our own CPU reduction."""
    from mpu.collectives import SUM_BLOCK

    return 0 if run.num_shards == 1 or run.device == "cuda" else min(SUM_BLOCK, layout.shard_numel) * FP32


def _reduction_bytes(run: PlannedRun, layout: FlatLayout, first: bool) -> int:
    """Memory of a reduction beside the gradients: its result, if that is wider or outlives the full gradient, and
    buffers. On a CPU: what the peers sent, where a result that is not wider takes the place of one peer's. On a GPU:
    gradients widened to fp32, and their sum."""
    wider = run.grad_sum_bytes != run.grad_bytes
    stays = first and run.policy.grads_are_sharded and run.num_shards > 1 and not run.gradients_are_offloaded
    shard_bytes = layout.shard_numel * run.grad_sum_bytes
    sum_bytes = shard_bytes if wider or stays else 0
    if 1 < run.num_shards < run.dp:
        sum_bytes += layout.shard_numel * FP32  # of the bucket before, while it is summed over replicas
    if run.device == "cuda":
        if run.gradients_are_offloaded and not first and run.policy.grads_are_sharded:
            sum_bytes += shard_bytes  # the earlier sum comes back from the host
        if run.dp > 1 and run.grad_bytes < FP32 and run.config.precision.communication not in ("fp16", "bf16"):
            rounded = run.policy.optim_is_sharded and run.grad_sum_bytes != FP32
            sum_bytes += (layout.numel + (layout.shard_numel if rounded else 0)) * FP32
        return sum_bytes
    at_a_time = min(layout.shard_numel, max(1, run.config.zero.reduce_bucket_size // run.num_shards))
    return (run.num_shards - 1 - (stays and not wider)) * at_a_time * run.grad_bytes + sum_bytes


def _gathered_bytes(run: PlannedRun, blocks: int) -> int:
    """Gathered parameters: the root during a pass, and that many blocks."""
    if not run.policy.params_are_sharded:
        return 0
    return min(run.root.numel + blocks * run.block.numel, run.config.zero.stage3_max_live_parameters) * run.param_bytes


def _num_gathered_blocks(run: PlannedRun, block: int) -> int:
    """Gathered blocks in the backward of one: those of its chunk up to it, which were recomputed, and at the chunk's
    end one prefetched; or those that were kept."""
    chunk = run.activations.chunk or 1
    first = block // chunk * chunk
    ahead = block == first > 0 and run.config.zero.stage3_prefetch_bucket_size > 0
    return max(block - first + 1 + ahead, block - (run.num_layers - run.reused_blocks) + 1)


def _update_phase(run: PlannedRun) -> PhaseMemory:
    """Norm, Adam and the new weights, a tile at a time; the host's new weights are copied to the device."""
    from megatron.optim.adam import CACHE_TILE_NUMEL

    layouts = run.root, run.persistent, run.block
    numel = max(layout.shard_numel for layout in layouts)
    waiting = _gradient_bytes(run, run.num_layers, False, True)[1] if _uses_grad_buffers(run) else 0
    buffers = 0
    if run.state_is_updated_on_device:
        buffers += STEP_BUFFER_SETS * (1 + MOMENTS_PER_WEIGHT) * run.max_offload_chunk_numel * FP32
    on_device = any(not leaves for _, leaves in run.bucket_offload)
    if run.device == "cuda" and run.offload_placement.params != "none" \
            and (run.state_is_updated_on_device or on_device):
        buffers += 2 * (numel if on_device else run.max_offload_chunk_numel) * run.param_bytes
    elif (on_device or run.device == "cpu") and run.grad_sum_bytes < FP32:
        tile = min(run.tile_numel, numel)  # widened to fp32; Adam reads 16 bits on a GPU, and widens blocks on a CPU
        if run.config.optim.optimizer in ("adam", "adamw"):
            tile = 0 if run.device == "cuda" else min(tile, CPU_THREADS * CACHE_TILE_NUMEL)
        buffers += tile * FP32
    if matrices := max(map(run.matrices_numel, layouts)):  # Muon
        # this rank's part of a bucket and the parts of all ranks; four copies of a matrix, and its square products
        largest = max(slot.numel for slot in run.block_parameters) * run.tp
        joined = 4 * largest + 2 * run.config.model.hidden_size ** 2
        buffers = max(buffers, (matrices * (1 + run.num_shards * run.tp) + joined) * run.muon_bytes)
    return _step_phase(run, "update", persistent_memory(run).gradients, 0, waiting + buffers)
