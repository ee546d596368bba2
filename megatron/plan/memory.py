"""How much memory a run needs, from its configuration alone: pure arithmetic, for any number of ranks.

A *moment* is a point of the run at which something is about to be given back: building the engine, the loss, the
backward of each block, the end of backward, the optimizer. A device must hold the largest of them. Its bytes are
counted as

    parameters    weights at work: whole, or this rank's shards
    gradients     what lasts from one block to the next: whole gradients, or shards
    optimizer     fp32 masters (where they are not the weights themselves) and moments
    activations   what autograd keeps, and gradients of activations on their way (activations.py)
    buffers       what comes and goes: gathered units, whole gradients of split ones, the exchange, chunks of logits

The layout is the engine's own (FlatLayout over the shapes of the parameters, padding included); the rules are those of
zero/engine.py, zero/bucket.py and mpu/loss_*.py, and tests hold them to what a run really allocates. Not here:
rounding by an allocator, the context of a device, the work space of libraries; plan.py leaves room for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace

from megatron.plan.activations import FP32
from megatron.plan.footprint import MOMENTS_PER_WEIGHT, MUON_WIRE, Run
from megatron.zero.homes.parts import STEP_BUFFER_SETS
from megatron.zero.layout import FlatLayout, Slot

# Sizes of the loops described here; a test compares them with the modules that have these loops.
CPU_CHUNK_BYTES, CUDA_CHUNK_BYTES = 104 << 20, 1 << 30  # logits at a time
CPU_BLOCK_ROWS = 64  # rows of them in fp32 at a time
CUDA_TILE_ROWS = 128  # chunks are multiples of these
CPU_SLAB_COLUMNS = 8192  # columns of a 16-bit weight gradient at a time
CPU_SUM_BLOCK = 2**17  # elements of an exchange summed at a time
CPU_ADAM_BLOCK = 2**17  # 16-bit gradients that Adam widens at a time, a thread
CPU_THREADS = 16  # of a rank, at most: the machine is not known here
DRAWN_ON_CPU, DRAWN_ON_CUDA = 2**16, 2**25  # initial weights drawn at a time
DRAWING = 22  # bytes of an initial weight while it is drawn


@dataclass(frozen=True)
class Moment:
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


def peak(run: Run) -> Moment:
    return max(moments(run), key=lambda moment: moment.total)


def moments(run: Run) -> Iterator[Moment]:
    yield _building(run)
    yield from step_moments(run)


def step_moments(run: Run) -> Iterator[Moment]:
    """Those of one optimizer step: its first micro-batch, its last one, the update."""
    for first, last in {(True, run.accumulation == 1), (run.accumulation == 1, True)}:
        yield _loss(run, first)
        for block in _extreme_blocks(run):
            yield _backward(run, block, first, last)
            yield _handing_over(run, block, first)
        yield _end_of_backward(run, first)
    yield _update(run)


def _extreme_blocks(run: Run) -> Iterator[int]:
    """From block to block everything grows or shrinks by equal amounts, and from chunk to chunk: the largest sum is
    at one of the ends. Two at each, as the exchange overlaps by one."""
    layers, chunk = run.layers, run.chunk or 1
    last_chunk = (layers - 1) // chunk * chunk
    ends = {0, 1, chunk - 1, chunk, last_chunk - 2, last_chunk - 1, layers - 2, layers - 1}
    return (block for block in range(layers) if block in ends)


def lasting(run: Run) -> Moment:
    """What is there from step to step, with the gradients of the whole model as far as they are kept: what the tables
    of the ZeRO papers count."""
    if run.policy.grads_are_sharded:
        gradients = (run.shard_numel - run.away_numel * run.gradients_leave) * run.sums
    else:
        gradients = (run.root.numel + run.layers * run.block.numel) * run.grads
    return Moment("lasting", run.weights, gradients, run.optimizer_here)


def _moment(run: Run, name: str, gradients: int, activations: int, buffers: int) -> Moment:
    """A moment of a step; shards of gradients that have their home on the host go there as they are made."""
    held = lasting(run)
    host = run.on_host if run.device == "cpu" else 0
    return Moment(name, held.parameters, min(gradients, held.gradients), held.optimizer, activations,
                  buffers + host + run.activations.waiting_buffer)


def _building(run: Run) -> Moment:
    """Bucket by bucket each rank draws what it keeps; then moments. The first bucket and the last are the extremes."""
    masters = sum(_masters(run, layout, leaves) for layout, leaves in run.leaving)
    stays = run.weights + masters - _staying(run, run.block)
    built = replace(lasting(run), name="building", gradients=0)
    held = max(_drawn(run, run.root, run.root_parameters), stays + _drawn(run, run.block, run.block_parameters))
    host = run.on_host if run.device == "cpu" else 0
    return replace(built, buffers=host + max(0, held - built.total))


def _staying(run: Run, layout: FlatLayout) -> int:
    """What lasts of a bucket before there are moments."""
    weights = layout.shard_numel if run.policy.params_are_sharded else layout.numel
    here = run.away.params == "none" or layout is run.resident
    leaves = next(leaves for bucket, leaves in reversed(run.leaving) if bucket is layout)
    return (weights * run.work if here else 0) + _masters(run, layout, leaves)


def _masters(run: Run, layout: FlatLayout, leaves: bool) -> int:
    """Bytes on the device."""
    return layout.shard_numel * FP32 if run.keeps_masters and not leaves else 0


def _drawn(run: Run, layout: FlatLayout, parameters: Iterable[Slot]) -> int:
    """A bucket that is being filled: at first the whole of it, which goes where parameters are split, then what lasts,
    with an fp32 shard where that is not what lasts, and what drawing needs."""
    at_a_time = DRAWN_ON_CPU if run.device == "cpu" else DRAWN_ON_CUDA
    room = DRAWING * min(at_a_time, layout.shard_numel, max(slot.numel for slot in parameters))
    return max(layout.numel * run.work, _staying(run, layout) + room)


def _loss(run: Run, first: bool) -> Moment:
    acts = run.activations
    alive = acts.before_blocks + acts.at_loss() + acts.stream + acts.statistics
    ends = (3 if run.tp > 1 else 2) * acts.stream  # the last LayerNorm's output, its gradient, the latter's sum
    kept, whole = _grads_at(run, run.layers, first, True)
    fresh = first or run.policy.grads_are_sharded
    return _moment(run, "loss", kept, alive + ends, whole + _logits(run, fresh) + _gathered(run, _kept(run)))


def _logits(run: Run, fresh: bool) -> int:
    """What linear_cross_entropy holds; `fresh`: its weight gradient may be made in its place."""
    tokens, columns, width = run.activations.tokens, run.columns, run.config.model.hidden_size
    on_cpu = run.device == "cpu"
    rows = min(max(CPU_BLOCK_ROWS, CPU_CHUNK_BYTES // (columns * run.work)), tokens) if on_cpu else rows_on_cuda(
        tokens, columns, run.work)
    scratch = min(CPU_BLOCK_ROWS, rows) * columns * FP32 if on_cpu else 0  # elsewhere one kernel does all, in place
    held = rows * columns * run.work + scratch + 2 * tokens * FP32  # losses and their weights
    total = run.work if rows >= tokens else FP32
    in_place = fresh and (total == run.grads or not on_cpu and run.grads == FP32)
    if not in_place:
        held += columns * width * total
    slab = min(CPU_SLAB_COLUMNS, columns) * width * run.work if on_cpu else 0
    if total == run.work:
        return held + (max(scratch, slab) if run.work < FP32 else 0)
    rounded = 0 if fresh else columns * width * run.work
    return held + max(scratch, slab, rounded)


def rows_on_cuda(tokens: int, columns: int, element: int) -> int:
    """Rows of logits at a time on a GPU: as few chunks as memory allows, about equal."""
    most = max(1, CUDA_CHUNK_BYTES // (columns * element) // CUDA_TILE_ROWS) * CUDA_TILE_ROWS
    chunks = max(1, -(-tokens // most))
    return min(tokens, -(-tokens // chunks // CUDA_TILE_ROWS) * CUDA_TILE_ROWS)


def _backward(run: Run, block: int, first: bool, last: bool) -> Moment:
    """The widest point of one block's backward."""
    acts = run.activations
    alive = acts.before_blocks + acts.kept(block) + acts.block_backward
    kept, whole = _grads_at(run, block, first, last)
    model = run.config.model
    one_weight = model.hidden_size * model.ffn_size // run.tp * run.work  # before it is in its bucket
    whole += max(0, one_weight - acts.widened)
    return _moment(run, "backward", kept, alive, whole + _gathered(run, _whole_blocks(run, block)))


def _handing_over(run: Run, block: int, first: bool) -> Moment:
    """Split gradients: a block is done and its gradients leave; those of the block before it arrive."""
    acts = run.activations
    alive = acts.before_blocks + acts.kept(block) - acts.block + 2 * acts.stream
    kept, whole = _grads_at(run, block, first, True)
    whole += _exchange(run, run.block, first) + _summing(run, run.block)
    return _moment(run, "backward", kept, alive, whole + _gathered(run, _whole_blocks(run, block)))


def _end_of_backward(run: Run, first: bool) -> Moment:
    acts, model = run.activations, run.config.model
    embedding = 2 * acts.stream + model.max_position_embeddings * model.hidden_size * run.work
    if run.device == "cuda":
        embedding = max(embedding, acts.stream + run.columns * model.hidden_size * run.work)
    kept, whole = _grads_at(run, 0, first, True)
    leaving = _exchange(run, run.root, first) + _exchange(run, run.resident, first) + _summing(run, run.root)
    buffers = whole + max(embedding, leaving) + _gathered(run, 0)
    return _moment(run, "reduction", kept, acts.before_blocks, buffers)


def _grads_at(run: Run, block: int, first: bool, last: bool) -> tuple[int, int]:
    """(kept, on the way) bytes of gradients in the backward of block number `block`."""
    done = run.layers - block  # this block included
    small = run.resident.numel if done or _takes_turns(run) else 0  # the loss has written to the token table only
    whole_roots = (run.root.numel + small) * run.grads
    if not run.policy.grads_are_sharded:
        blocks = done if first else run.layers
        leaving = _exchange(run, run.block, first) if done > 1 and last else 0
        return whole_roots + blocks * run.block.numel * run.grads, leaving
    shards = max(0, done - 2) if first else run.layers
    roots = 0 if first else _part(run, run.root) + _part(run, run.resident)
    whole = whole_roots + min(2, run.layers if _takes_turns(run) else done) * run.block.numel * run.grads
    return shards * _part(run, run.block) + roots, whole + (_exchange(run, run.block, first) if done > 1 else 0)


def _takes_turns(run: Run) -> bool:
    """Whole gradients come and go in buffers that stay: from the second step on they are there all the time. (Where
    a rank is alone, and nothing is widened, they become the sums themselves.)"""
    return run.policy.grads_are_sharded and (run.shards > 1 or run.sums != run.grads)


def _part(run: Run, layout: FlatLayout) -> int:
    return layout.shard_numel * run.sums


def _summing(run: Run, layout: FlatLayout) -> int:
    """The accumulator of a sum that is taken here, and not by the backend."""
    return 0 if run.shards == 1 or run.device == "cuda" else min(CPU_SUM_BLOCK, layout.shard_numel) * FP32


def _exchange(run: Run, layout: FlatLayout, first: bool) -> int:
    """What a reduction holds beside the gradients: the sum, where it is wider or stays when the whole gradient goes,
    and what its wire needs. That of the CPU: what peers sent; a sum that is not wider has the place of what one peer
    sent. That of the GPU: 16-bit gradients widened, and their sum."""
    wider = run.sums != run.grads
    stays = first and run.policy.grads_are_sharded and run.shards > 1 and not run.gradients_leave
    sum_ = _part(run, layout) if wider or stays else 0
    if run.device == "cuda":
        comes_back = _part(run, layout) if run.gradients_leave and not first and run.policy.grads_are_sharded else 0
        return sum_ + comes_back + _widened(run, layout)
    at_a_time = min(layout.shard_numel, max(1, run.config.zero.reduce_bucket_size // run.shards))
    return (run.shards - 1 - (stays and not wider)) * at_a_time * run.grads + sum_


def _widened(run: Run, layout: FlatLayout) -> int:
    """A bucket's 16-bit gradients in fp32, in which they are summed over the ranks unless another precision was asked
    for, and this rank's part of the sum until it is rounded."""
    if run.dp == 1 or run.grads == FP32 or run.config.precision.communication in ("fp16", "bf16"):
        return 0
    return (layout.numel + (layout.shard_numel if run.policy.optim_is_sharded and run.sums != FP32 else 0)) * FP32


def _gathered(run: Run, blocks: int) -> int:
    """Split parameters that are whole: the root during a pass, and so many blocks."""
    if not run.policy.params_are_sharded:
        return 0
    return min(run.root.numel + blocks * run.block.numel, run.config.zero.stage3_max_live_parameters) * run.work


def _kept(run: Run) -> int:
    """Blocks that stay whole from their forward to their backward."""
    return min(run.layers, run.config.zero.stage3_max_reuse_distance // (2 * max(1, run.block.numel)) + 1)


def _whole_blocks(run: Run, block: int) -> int:
    """Blocks that are whole in the backward of one: those of its chunk up to it, which were recomputed, and at its end
    one ahead; or those that were kept."""
    chunk = run.chunk or 1
    first = block // chunk * chunk
    ahead = block == first > 0 and run.config.zero.stage3_prefetch_bucket_size > 0
    return max(block - first + 1 + ahead, block - (run.layers - _kept(run)) + 1)


def _update(run: Run) -> Moment:
    """Norm, Adam and the new weights, a tile at a time. Where the host does it the new weights come to their places."""
    span = max(layout.shard_numel for layout in (run.root, run.resident, run.block))
    tile = min(run.tile, span)
    waiting = _grads_at(run, run.layers, False, True)[1] if _takes_turns(run) else 0
    passing = 0
    if run.streams:
        passing += STEP_BUFFER_SETS * (1 + MOMENTS_PER_WEIGHT) * run.part_at_a_time * FP32
    here = any(not leaves for _, leaves in run.leaving)
    if run.device == "cuda" and run.away.params != "none" and (run.streams or here):
        passing += 2 * (span if here else run.part_at_a_time) * run.work
    elif here or run.device == "cpu":
        passing += _widened_for_update(run, tile)
    return _moment(run, "update", lasting(run).gradients, 0, waiting + max(passing, _whole_matrices(run)))


def _whole_matrices(run: Run) -> int:
    """Of a bucket's matrices this rank's numbers and those of all ranks; of one that is made orthogonal, itself, a step
    and the next one, and the one before; and its square products."""
    span = max(run.span_of_matrices(layout) for layout in (run.root, run.resident, run.block))
    if not span:
        return 0
    largest = max(slot.numel for slot in run.block_parameters) * run.tp
    joined = 4 * largest + 2 * run.config.model.hidden_size ** 2
    return (span * (1 + run.shards * run.tp) + joined) * MUON_WIRE


def _widened_for_update(run: Run, tile: int) -> int:
    """Of 16-bit gradients. Adam's kernel on a GPU reads them as they are, that on a CPU what fits its caches."""
    if run.sums == FP32:
        return 0
    if run.config.optim.optimizer not in ("adam", "adamw"):
        return tile * FP32
    return 0 if run.device == "cuda" else min(tile, CPU_THREADS * CPU_ADAM_BLOCK) * FP32
