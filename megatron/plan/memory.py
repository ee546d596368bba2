"""Peak memory of a run, from its configuration alone: pure arithmetic, for any number of ranks.

Memory is computed at each phase (init, loss, backward of each block, reduction, update); a device must hold the
largest:
    parameters    16-bit or fp32 working values: full, or this rank's shards
    gradients     full gradients or shards that last from block to block
    optimizer     fp32 masters (unless they are the parameters) and moments
    activations   tensors saved by autograd, and gradients of activations in flight (activations.py)
    buffers       gathered units, full gradients before reduction, collectives, chunks of logits
The rules are those of the engine and the loss kernels; tests compare them with real allocations. Not included:
allocator rounding, the CUDA context, library workspaces (`USABLE_FRACTION` leaves room for them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace

from megatron.plan.activations import FP32
from megatron.plan.footprint import MOMENTS_PER_WEIGHT, MUON_WIRE_BYTES, PlannedRun
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.offload.chunk_sizes import STEP_BUFFER_SETS

# Sizes of the loops described here; a test compares them with the modules that have these loops.
CPU_CHUNK_BYTES, CUDA_CHUNK_BYTES = 104 << 20, 1 << 30  # logits at a time
CPU_BLOCK_ROWS = 64  # rows of them in fp32 at a time
CUDA_TILE_ROWS = 128  # chunks are multiples of these
CPU_SLAB_COLUMNS = 8192  # columns of a 16-bit weight gradient at a time
CPU_SUM_BLOCK = 2**17  # elements of an exchange summed at a time
CPU_ADAM_BLOCK = 2**17  # 16-bit gradients that Adam widens at a time, a thread
CPU_THREADS = 16  # of a rank, at most: the machine is not known here
INIT_ELEMENTS_CPU, INIT_ELEMENTS_CUDA = 2**16, 2**25  # initial weights drawn at a time
INIT_BYTES_PER_ELEMENT = 22  # bytes of an initial weight while it is drawn


@dataclass(frozen=True)
class PhaseMemory:
    """What a device holds at one moment, in bytes."""

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
    return max(all_phases(run), key=lambda moment: moment.total)


def all_phases(run: PlannedRun) -> Iterator[PhaseMemory]:
    yield _init_phase(run)
    yield from step_phases(run)


def step_phases(run: PlannedRun) -> Iterator[PhaseMemory]:
    """Those of one optimizer step: its first micro-batch, its last one, the update."""
    for first, last in {(True, run.accumulation == 1), (run.accumulation == 1, True)}:
        yield _loss_phase(run, first)
        for block in _extreme_blocks(run):
            yield _backward_phase(run, block, first, last)
            yield _overlap_phase(run, block, first)
        yield _reduction_phase(run, first)
    yield _update_phase(run)


def _extreme_blocks(run: PlannedRun) -> Iterator[int]:
    """From block to block everything grows or shrinks by equal amounts, and from chunk to chunk: the largest sum is
    at one of the ends. Two at each, as the exchange overlaps by one."""
    layers, chunk = run.num_layers, run.chunk or 1
    last_chunk = (layers - 1) // chunk * chunk
    ends = {0, 1, chunk - 1, chunk, last_chunk - 2, last_chunk - 1, layers - 2, layers - 1}
    return (block for block in range(layers) if block in ends)


def persistent_memory(run: PlannedRun) -> PhaseMemory:
    """What is there from step to step, with the gradients of the whole model as far as they are kept: what the tables
    of the ZeRO papers count."""
    if run.policy.grads_are_sharded:
        gradients = (run.shard_numel - run.offloaded_numel * run.gradients_are_offloaded) * run.grad_sum_bytes
    else:
        gradients = (run.root.numel + run.num_layers * run.block.numel) * run.grad_bytes
    return PhaseMemory("lasting", run.params_device_bytes, gradients, run.device_optimizer_bytes)


def _step_phase(run: PlannedRun, name: str, gradients: int, activations: int, buffers: int) -> PhaseMemory:
    """A moment of a step; shards of gradients that have their home on the host go there as they are made."""
    held = persistent_memory(run)
    host = run.host_bytes if run.device == "cpu" else 0
    return PhaseMemory(name, held.parameters, min(gradients, held.gradients), held.optimizer, activations,
                       buffers + host + run.activations.input_buffer_bytes)


def _init_phase(run: PlannedRun) -> PhaseMemory:
    """Bucket by bucket each rank draws what it keeps; then moments. The first bucket and the last are the extremes."""
    masters = sum(_master_bytes(run, layout, leaves) for layout, leaves in run.bucket_offload)
    stays = run.params_device_bytes + masters - _persistent_bytes(run, run.block)
    built = replace(persistent_memory(run), name="building", gradients=0)
    held = max(_init_bytes(run, run.root, run.root_parameters),
               stays + _init_bytes(run, run.block, run.block_parameters))
    host = run.host_bytes if run.device == "cpu" else 0
    return replace(built, buffers=host + max(0, held - built.total))


def _persistent_bytes(run: PlannedRun, layout: FlatLayout) -> int:
    """What lasts of a bucket before there are moments."""
    weights = layout.shard_numel if run.policy.params_are_sharded else layout.numel
    here = run.offload_placement.params == "none" or layout is run.persistent
    leaves = next(leaves for bucket, leaves in reversed(run.bucket_offload) if bucket is layout)
    return (weights * run.param_bytes if here else 0) + _master_bytes(run, layout, leaves)


def _master_bytes(run: PlannedRun, layout: FlatLayout, leaves: bool) -> int:
    """Bytes on the device."""
    return layout.shard_numel * FP32 if run.keeps_masters and not leaves else 0


def _init_bytes(run: PlannedRun, layout: FlatLayout, parameters: Iterable[Slot]) -> int:
    """A bucket that is being filled: at first the whole of it, which goes where parameters are split, then what lasts,
    with an fp32 shard where that is not what lasts, and what drawing needs."""
    at_a_time = INIT_ELEMENTS_CPU if run.device == "cpu" else INIT_ELEMENTS_CUDA
    scratch = INIT_BYTES_PER_ELEMENT * min(at_a_time, layout.shard_numel, max(slot.numel for slot in parameters))
    return max(layout.numel * run.param_bytes, _persistent_bytes(run, layout) + scratch)


def _loss_phase(run: PlannedRun, first: bool) -> PhaseMemory:
    acts = run.activations
    alive = acts.before_blocks + acts.alive_at_loss() + acts.residual_bytes + acts.layernorm_stats
    ends = (3 if run.tp > 1 else 2) * acts.residual_bytes  # the last LayerNorm's output, its gradient, the latter's sum
    kept, whole = _gradient_bytes(run, run.num_layers, first, True)
    fresh = first or run.policy.grads_are_sharded
    return _step_phase(run, "loss", kept, alive + ends,
                       whole + _logits_bytes(run, fresh) + _gathered_bytes(run, _num_reused_blocks(run)))


def _logits_bytes(run: PlannedRun, fresh: bool) -> int:
    """What linear_cross_entropy holds; `fresh`: its weight gradient may be made in its place."""
    tokens, columns, width = run.activations.tokens, run.vocab_columns, run.config.model.hidden_size
    on_cpu = run.device == "cpu"
    rows = min(max(CPU_BLOCK_ROWS, CPU_CHUNK_BYTES // (columns * run.param_bytes)),
               tokens) if on_cpu else cuda_logit_rows(tokens, columns, run.param_bytes)
    scratch = min(CPU_BLOCK_ROWS, rows) * columns * FP32 if on_cpu else 0  # elsewhere one kernel does all, in place
    held = rows * columns * run.param_bytes + scratch + 2 * tokens * FP32  # losses and their weights
    total = run.param_bytes if rows >= tokens else FP32
    in_place = fresh and (total == run.grad_bytes or not on_cpu and run.grad_bytes == FP32)
    if not in_place:
        held += columns * width * total
    slab = min(CPU_SLAB_COLUMNS, columns) * width * run.param_bytes if on_cpu else 0
    if total == run.param_bytes:
        return held + (max(scratch, slab) if run.param_bytes < FP32 else 0)
    rounded = 0 if fresh else columns * width * run.param_bytes
    return held + max(scratch, slab, rounded)


def cuda_logit_rows(tokens: int, columns: int, element: int) -> int:
    """Rows of logits at a time on a GPU: as few chunks as memory allows, about equal."""
    most = max(1, CUDA_CHUNK_BYTES // (columns * element) // CUDA_TILE_ROWS) * CUDA_TILE_ROWS
    chunks = max(1, -(-tokens // most))
    return min(tokens, -(-tokens // chunks // CUDA_TILE_ROWS) * CUDA_TILE_ROWS)


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
    """Split gradients: a block is done and its gradients leave; those of the block before it arrive."""
    acts = run.activations
    alive = acts.before_blocks + acts.alive_at_block(block) - acts.block + 2 * acts.residual_bytes
    kept, whole = _gradient_bytes(run, block, first, True)
    whole += _reduction_bytes(run, run.block, first) + _sum_scratch_bytes(run, run.block)
    return _step_phase(run, "backward", kept, alive, whole + _gathered_bytes(run, _num_gathered_blocks(run, block)))


def _reduction_phase(run: PlannedRun, first: bool) -> PhaseMemory:
    acts, model = run.activations, run.config.model
    embedding = 2 * acts.residual_bytes + model.max_position_embeddings * model.hidden_size * run.param_bytes
    if run.device == "cuda":
        embedding = max(embedding, acts.residual_bytes + run.vocab_columns * model.hidden_size * run.param_bytes)
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
    roots = 0 if first else _grad_shard_bytes(run, run.root) + _grad_shard_bytes(run, run.persistent)
    whole = whole_roots + min(2, run.num_layers if _uses_grad_buffers(run) else done) * run.block.numel * run.grad_bytes
    return shards * _grad_shard_bytes(run, run.block) + roots, whole + (_reduction_bytes(run, run.block, first)
                                                                        if done > 1 else 0)


def _uses_grad_buffers(run: PlannedRun) -> bool:
    """Whole gradients come and go in buffers that stay: from the second step on they are there all the time. (Where
    a rank is alone, and nothing is widened, they become the sums themselves.)"""
    return run.policy.grads_are_sharded and (run.num_shards > 1 or run.grad_sum_bytes != run.grad_bytes)


def _grad_shard_bytes(run: PlannedRun, layout: FlatLayout) -> int:
    return layout.shard_numel * run.grad_sum_bytes


def _sum_scratch_bytes(run: PlannedRun, layout: FlatLayout) -> int:
    """The accumulator of a sum that is taken here, and not by the backend."""
    return 0 if run.num_shards == 1 or run.device == "cuda" else min(CPU_SUM_BLOCK, layout.shard_numel) * FP32


def _reduction_bytes(run: PlannedRun, layout: FlatLayout, first: bool) -> int:
    """What a reduction holds beside the gradients: the sum, where it is wider or stays when the whole gradient goes,
    and what its wire needs. That of the CPU: what peers sent; a sum that is not wider has the place of what one peer
    sent. That of the GPU: 16-bit gradients widened, and their sum."""
    wider = run.grad_sum_bytes != run.grad_bytes
    stays = first and run.policy.grads_are_sharded and run.num_shards > 1 and not run.gradients_are_offloaded
    sum_ = _grad_shard_bytes(run, layout) if wider or stays else 0
    if run.device == "cuda":
        comes_back = (_grad_shard_bytes(run, layout) if run.gradients_are_offloaded and not first
                      and run.policy.grads_are_sharded else 0)
        return sum_ + comes_back + _fp32_reduction_bytes(run, layout)
    at_a_time = min(layout.shard_numel, max(1, run.config.zero.reduce_bucket_size // run.num_shards))
    return (run.num_shards - 1 - (stays and not wider)) * at_a_time * run.grad_bytes + sum_


def _fp32_reduction_bytes(run: PlannedRun, layout: FlatLayout) -> int:
    """A bucket's 16-bit gradients in fp32, in which they are summed over the ranks unless another precision was asked
    for, and this rank's part of the sum until it is rounded."""
    if run.dp == 1 or run.grad_bytes == FP32 or run.config.precision.communication in ("fp16", "bf16"):
        return 0
    return (layout.numel +
            (layout.shard_numel if run.policy.optim_is_sharded and run.grad_sum_bytes != FP32 else 0)) * FP32


def _gathered_bytes(run: PlannedRun, blocks: int) -> int:
    """Split parameters that are whole: the root during a pass, and so many blocks."""
    if not run.policy.params_are_sharded:
        return 0
    return min(run.root.numel + blocks * run.block.numel, run.config.zero.stage3_max_live_parameters) * run.param_bytes


def _num_reused_blocks(run: PlannedRun) -> int:
    """Blocks that stay whole from their forward to their backward."""
    return min(run.num_layers, run.config.zero.stage3_max_reuse_distance // (2 * max(1, run.block.numel)) + 1)


def _num_gathered_blocks(run: PlannedRun, block: int) -> int:
    """Blocks that are whole in the backward of one: those of its chunk up to it, which were recomputed, and at its end
    one ahead; or those that were kept."""
    chunk = run.chunk or 1
    first = block // chunk * chunk
    ahead = block == first > 0 and run.config.zero.stage3_prefetch_bucket_size > 0
    return max(block - first + 1 + ahead, block - (run.num_layers - _num_reused_blocks(run)) + 1)


def _update_phase(run: PlannedRun) -> PhaseMemory:
    """Norm, Adam and the new weights, a tile at a time. Where the host does it the new weights come to their places."""
    span = max(layout.shard_numel for layout in (run.root, run.persistent, run.block))
    tile = min(run.tile_numel, span)
    waiting = _gradient_bytes(run, run.num_layers, False, True)[1] if _uses_grad_buffers(run) else 0
    passing = 0
    if run.state_is_updated_on_device:
        passing += STEP_BUFFER_SETS * (1 + MOMENTS_PER_WEIGHT) * run.max_swap_part * FP32
    here = any(not leaves for _, leaves in run.bucket_offload)
    if run.device == "cuda" and run.offload_placement.params != "none" and (run.state_is_updated_on_device or here):
        passing += 2 * (span if here else run.max_swap_part) * run.param_bytes
    elif here or run.device == "cpu":
        passing += _update_cast_bytes(run, tile)
    return _step_phase(run, "update",
                       persistent_memory(run).gradients, 0, waiting + max(passing, _full_matrices_bytes(run)))


def _full_matrices_bytes(run: PlannedRun) -> int:
    """Of a bucket's matrices this rank's numbers and those of all ranks; of one that is made orthogonal, itself, a step
    and the next one, and the one before; and its square products."""
    span = max(run.matrices_numel(layout) for layout in (run.root, run.persistent, run.block))
    if not span:
        return 0
    largest = max(slot.numel for slot in run.block_parameters) * run.tp
    joined = 4 * largest + 2 * run.config.model.hidden_size ** 2
    return (span * (1 + run.num_shards * run.tp) + joined) * MUON_WIRE_BYTES


def _update_cast_bytes(run: PlannedRun, tile: int) -> int:
    """Of 16-bit gradients. Adam's kernel on a GPU reads them as they are, that on a CPU what fits its caches."""
    if run.grad_sum_bytes == FP32:
        return 0
    if run.config.optim.optimizer not in ("adam", "adamw"):
        return tile * FP32
    return 0 if run.device == "cuda" else min(tile, CPU_THREADS * CPU_ADAM_BLOCK) * FP32
