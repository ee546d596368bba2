"""How much memory a run takes, from its configuration alone: pure arithmetic, for any number of ranks.

A *moment* is a point of the run at which something is about to be given back: building the engine, the loss, the
backward of each block, the end of backward, the optimizer. A device must hold the largest of them. Its bytes are told
as

    parameters    weights at work: whole, or this rank's shards
    gradients     what lasts from one block to the next: whole gradients, or shards
    optimizer     fp32 masters (where they are not the weights themselves) and moments
    activations   what autograd keeps, and gradients of activations on their way (activations.py)
    buffers       what comes and goes: gathered units, whole gradients of split ones, the exchange, chunks of logits

The layout is the engine's own (FlatLayout over the shapes of the parameters, padding included); the rules are those of
zero/engine.py, zero/bucket.py and mpu/cross_entropy.py, and tests hold them to what a run really allocates. Not here:
rounding by an allocator, the context of a device, the work space of libraries; plan.py leaves room for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Literal

from megatron.activations import FP32, Activations, Device
from megatron.config import Config, ModelConfig, ZeroConfig, data_parallel_size
from megatron.zero.layout import ALIGNMENT, FlatLayout, Slot
from megatron.zero.policy import HAS_EFFECT, Policy, policy
from mpu.split import pad_vocab

Offload = Literal["none", "optimizer", "optimizer+params"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "optimizer+params")

# Sizes of the loops described here; a test compares them with the modules they stand in.
CPU_CHUNK_BYTES, CUDA_CHUNK_ROWS = 104 << 20, 4096  # logits at a time
CPU_BLOCK_ROWS, CUDA_BLOCK_ROWS = 64, 1024  # rows of them in fp32 at a time
CPU_SLAB_COLUMNS = 8192  # columns of a 16-bit weight gradient at a time
LARGEST_TILE = 2**24  # elements of an optimizer step at a time
MOMENTS_PER_WEIGHT = 2


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


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends to others of its data parallel group in one optimizer step."""

    gradients: int
    parameters: int


@dataclass(frozen=True)
class Run:
    """A configuration on so many ranks of one kind of device."""

    config: Config
    ranks: int = 1
    device: Device = "cuda"
    offload: Offload = "none"

    # ---- the sizes that everything follows from -----------------------------------------------------------------

    @property
    def tp(self) -> int:
        return self.config.parallel.model_parallel_size

    @cached_property
    def dp(self) -> int:
        return data_parallel_size(self.ranks, self.tp)

    @cached_property
    def accumulation(self) -> int:
        return self.config.accumulation(self.dp)

    @cached_property
    def policy(self) -> Policy:
        return policy(self.config.zero.zero_stage)

    @property
    def shards(self) -> int:
        return self.dp if self.policy.split_optim else 1

    @property
    def layers(self) -> int:
        return self.config.model.num_layers

    @cached_property
    def work(self) -> int:
        """Bytes of a weight at work."""
        return FP32 if self.config.precision.name == "fp32" else 2

    @cached_property
    def sums(self) -> int:
        """Bytes of a gradient as it is added up: over micro-batches, or over ranks where asked for, in fp32."""
        return FP32 if self.config.precision.fp32_allreduce or self.accumulation > 1 else self.work

    @cached_property
    def grads(self) -> int:
        """Bytes of a gradient as backward leaves it."""
        in_place = self.config.precision.fp32_allreduce or not self.policy.split_grads
        return self.sums if in_place else self.work

    @cached_property
    def columns(self) -> int:
        """Columns of the logits on one rank."""
        model = self.config.model
        return pad_vocab(model.tokens, model.make_vocab_size_divisible_by, self.tp) // self.tp

    @cached_property
    def root(self) -> FlatLayout:
        """The bucket of the embeddings and the last LayerNorm."""
        return FlatLayout([slot for slot in self._root_slots if not _resides(slot, self.config.zero)], self.shards)

    @cached_property
    def block(self) -> FlatLayout:
        """The bucket of one transformer block."""
        return FlatLayout([slot for slot in self._block_slots if not _resides(slot, self.config.zero)], self.shards)

    @cached_property
    def resident(self) -> FlatLayout:
        """The bucket of parameters too small to be split."""
        slots = [*self._root_slots, *self._block_slots * self.layers]
        return FlatLayout([slot for slot in slots if _resides(slot, self.config.zero)], self.shards)

    @cached_property
    def _root_slots(self) -> list[Slot]:
        return root_slots(self.config.model, self.columns)

    @cached_property
    def _block_slots(self) -> list[Slot]:
        return block_slots(self.config.model, self.tp)

    @cached_property
    def activations(self) -> Activations:
        data = self.config.data
        return Activations(self.config.model, self.config.train.batch_size, self.config.seq_length, self.tp, self.work,
                           self.device, data.reset_attention_mask)

    @property
    def chunk(self) -> int | None:
        """Blocks recomputed at a time."""
        recompute = self.config.recompute
        return recompute.checkpoint_num_layers if recompute.checkpoint_activations else None

    # ---- what lasts ---------------------------------------------------------------------------------------------

    @cached_property
    def shard_numel(self) -> int:
        """Parameters whose optimizer state is on this rank."""
        return self.root.shard_numel + self.resident.shard_numel + self.layers * self.block.shard_numel

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights at work between steps."""
        if self.offload == "optimizer+params":
            return self.resident.numel * self.work
        if self.policy.split_params:
            return (self.root.shard_numel + self.layers * self.block.shard_numel + self.resident.numel) * self.work
        return (self.root.numel + self.layers * self.block.numel) * self.work

    @cached_property
    def optimizer(self) -> int:
        """Bytes of this rank's masters and moments, wherever they live."""
        has_masters = self.work < FP32 or self.offload != "none"
        return self.shard_numel * FP32 * (MOMENTS_PER_WEIGHT + has_masters)

    @property
    def host(self) -> int:
        """Bytes of one rank on the host: the fp32 model before it goes to the device, or what is offloaded."""
        if self.device == "cpu":
            return 0
        offloaded = 0
        if self.offload != "none":
            offloaded = self.optimizer + self.shard_numel * self.sums
        if self.offload == "optimizer+params":
            offloaded += (self.root.shard_numel + self.layers * self.block.shard_numel) * self.work
        return max(self._drawing, offloaded)

    @cached_property
    def _drawn_model(self) -> int:
        return FP32 * (_used(self._root_slots) + self.layers * _used(self._block_slots))

    @property
    def _drawing(self) -> int:
        """The fp32 weights while they are drawn, every matrix whole before it is sliced: the token table first, with a
        padded copy; a matrix of the last block last."""
        model, padded = self.config.model, self.columns * self.tp
        table = self.columns + model.tokens + (padded if padded > model.tokens else 0)
        return max(FP32 * model.hidden_size * table, self._drawn_model + FP32 * model.hidden_size * model.ffn_size)

    # ---- moments ------------------------------------------------------------------------------------------------

    def peak(self) -> Moment:
        return max(self.moments(), key=lambda moment: moment.total)

    def moments(self) -> Iterator[Moment]:
        yield self._building()
        yield from self.step_moments()

    def step_moments(self) -> Iterator[Moment]:
        """Those of one optimizer step: its first micro-batch, its last one, the update."""
        for first, last in {(True, self.accumulation == 1), (self.accumulation == 1, True)}:
            yield self._loss(first)
            for block in self._extreme_blocks():
                yield self._backward(block, first, last)
                yield self._handing_over(block, first)
            yield self._end_of_backward(first)
        yield self._update()

    def _extreme_blocks(self) -> Iterator[int]:
        """From block to block everything grows or shrinks by equal amounts, and from chunk to chunk: the largest sum is
        at one of the ends. Two at each, as the exchange overlaps by one."""
        layers, chunk = self.layers, self.chunk or 1
        last_chunk = (layers - 1) // chunk * chunk
        ends = {0, 1, chunk - 1, chunk, last_chunk - 2, last_chunk - 1, layers - 2, layers - 1}
        return (block for block in range(layers) if block in ends)

    def _moment(self, name: str, gradients: int, activations: int, buffers: int) -> Moment:
        optimizer = self.optimizer if self.offload == "none" else 0
        if self.offload != "none" and self.policy.split_grads:
            gradients = 0  # shards go to the host as they are made
        return Moment(name, self.weights, gradients, optimizer, activations, buffers)

    def _building(self) -> Moment:
        """The whole model in fp32; unit by unit moves into its bucket; then moments. The first unit and the last are
        the extremes of the moving."""
        masters = FP32 if self.work < FP32 else 0
        root, last = self.root, self.block
        root_weights = (root.shard_numel if self.policy.split_params else root.numel) * self.work
        at_root = self._drawn_model + root_weights + root.shard_numel * masters + self._moving(root)
        at_last = self.weights + self.shard_numel * masters + FP32 * _used(self._block_slots) + self._moving(last)
        drawing = self._drawing if self.device == "cpu" else 0  # elsewhere the host draws
        built = self._moment("building", 0, 0, 0)
        return replace(built, buffers=max(0, *(held - built.total for held in (at_root, at_last, drawing))))

    def _moving(self, layout: FlatLayout) -> int:
        """A bucket that is being filled, beside what stays of it: its fp32 values, and all of what will be split."""
        wide = layout.numel * FP32 if self.work < FP32 else 0
        return wide + (layout.numel * self.work if self.policy.split_params else 0)

    def _loss(self, first: bool) -> Moment:
        acts = self.activations
        alive = acts.before_blocks + acts.at_loss(self.chunk) + acts.stream + acts.statistics
        ends = (3 if self.tp > 1 else 2) * acts.stream  # the last LayerNorm's output, its gradient, the latter's sum
        kept, whole = self._grads_at(self.layers, first, True)
        fresh = first or self.policy.split_grads
        return self._moment("loss", kept, alive + ends, whole + self._logits(fresh) + self._gathered(0))

    def _logits(self, fresh: bool) -> int:
        """What linear_cross_entropy holds; `fresh`: its weight gradient may be made in its place."""
        tokens, columns, width = self.activations.tokens, self.columns, self.config.model.hidden_size
        on_cpu = self.device == "cpu"
        chunk = max(CPU_BLOCK_ROWS, CPU_CHUNK_BYTES // (columns * self.work)) if on_cpu else CUDA_CHUNK_ROWS
        rows = min(chunk, tokens)
        scratch = min(CPU_BLOCK_ROWS if on_cpu else CUDA_BLOCK_ROWS, rows) * columns * FP32
        held = rows * columns * self.work + scratch + 2 * tokens * FP32  # losses and their weights
        total = self.work if rows >= tokens else FP32
        if not (fresh and total == self.grads):
            held += columns * width * total
        if total == self.work:
            return held + (scratch if self.work < FP32 else 0)
        slab = (min(CPU_SLAB_COLUMNS, columns) if on_cpu else columns) * width * self.work
        rounded = 0 if fresh else columns * width * self.work
        return held + max(scratch, slab, rounded)

    def _backward(self, block: int, first: bool, last: bool) -> Moment:
        """The widest point of one block's backward."""
        acts = self.activations
        alive = acts.before_blocks + acts.kept(self.chunk, block) + acts.block_backward
        kept, whole = self._grads_at(block, first, last)
        model = self.config.model
        one_weight = model.hidden_size * model.ffn_size // self.tp * self.work  # before it is in its bucket
        whole += max(0, one_weight - acts.widened)
        return self._moment("backward", kept, alive, whole + self._gathered(2 if block else 1))

    def _handing_over(self, block: int, first: bool) -> Moment:
        """Split gradients: a block is done and its gradients leave; those of the block before it arrive."""
        acts = self.activations
        alive = acts.before_blocks + acts.kept(self.chunk, block) - acts.block + 2 * acts.stream
        kept, whole = self._grads_at(block, first, True)
        if self.policy.split_grads:
            whole += self._exchange(self.block) + (self._part(self.block) if block + 1 < self.layers and first else 0)
        return self._moment("backward", kept, alive, whole + self._gathered(2 if block else 1))

    def _end_of_backward(self, first: bool) -> Moment:
        acts, model = self.activations, self.config.model
        embedding = 2 * acts.stream + model.max_position_embeddings * model.hidden_size * self.work
        if self.device == "cuda":
            embedding = max(embedding, acts.stream + self.columns * model.hidden_size * self.work)
        kept, whole = self._grads_at(0, first, True)
        leaving = self._exchange(self.root) + self._exchange(self.resident)
        if self.policy.split_grads:
            leaving += self._exchange(self.block) + (self._part(self.block) if first else 0)
        elif self.policy.split_optim:
            leaving += self._exchange(self.block)
        buffers = whole + max(embedding, leaving) + self._gathered(0)
        return self._moment("reduction", kept, acts.before_blocks, buffers)

    def _grads_at(self, block: int, first: bool, last: bool) -> tuple[int, int]:
        """(kept, on the way) bytes of gradients in the backward of block number `block`."""
        whole_roots = (self.root.numel + self.resident.numel) * self.grads
        done = self.layers - block  # this block included
        if not self.policy.split_grads:
            blocks = done if first else self.layers
            leaving = max(0, done - 1) * self._exchange(self.block) if last and self.policy.split_optim else 0
            return whole_roots + blocks * self.block.numel * self.grads, leaving
        shards = max(0, done - 2) if first else self.layers
        roots = 0 if first else self._part(self.root) + self._part(self.resident)
        whole = whole_roots + min(2, done) * self.block.numel * self.grads
        return shards * self._part(self.block) + roots, whole + (self._exchange(self.block) if done > 1 else 0)

    def _part(self, layout: FlatLayout) -> int:
        return layout.shard_numel * self.sums

    def _exchange(self, layout: FlatLayout) -> int:
        """What a reduction holds beside the gradients: what peers sent, where it is summed here and not by NCCL, and
        the sum where it is wider."""
        widens = self.sums != self.grads
        staged = self.device == "cpu" or widens
        received = (self.shards - 1) * layout.shard_numel * self.grads if staged and self.shards > 1 else 0
        return received + (self._part(layout) if widens else 0)

    def _gathered(self, blocks: int) -> int:
        """Split parameters that are whole: the root during a pass, and so many blocks."""
        if not self.policy.split_params:
            return 0
        if self.block.numel > self.config.zero.stage3_prefetch_bucket_size:
            blocks = min(blocks, 1)
        return (self.root.numel + blocks * self.block.numel) * self.work

    def _update(self) -> Moment:
        """Norm, Adam and the new weights, a tile at a time."""
        layouts = (self.root, self.resident, self.block)
        if self.policy.split_grads:
            kept = self.shard_numel * self.sums
        else:
            kept = (self.root.numel + self.layers * self.block.numel) * self.grads
        span = max(layout.shard_numel for layout in layouts)
        tile = min(LARGEST_TILE, -(-self.config.zero.sub_group_size // ALIGNMENT) * ALIGNMENT, span)
        widened = 0 if self.sums == FP32 else tile * FP32
        return self._moment("update", kept, 0, widened)

    # ---- traffic ------------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """By rings: all that is not a rank's own part goes out once in a reduce-scatter, and once in an all-gather."""
        peers = self.dp - 1
        blocks = self.layers * self.block.numel
        numel = self.root.numel + self.resident.numel + blocks
        times = self.accumulation if self.policy.split_grads else 1
        gradients = numel * self.grads * peers // self.dp * times
        if not self.policy.split_optim:
            return Traffic(2 * gradients, 0)
        gathered = numel
        if self.policy.split_params:
            gathered = self.resident.numel + self.accumulation * (self.root.numel + 2 * blocks)
        return Traffic(gradients, gathered * self.work * peers // self.dp)


# ---- parameters ---------------------------------------------------------------------------------------------------


def block_slots(model: ModelConfig, tp: int) -> list[Slot]:
    """The parameters of one transformer block on one tensor parallel rank (megatron/model/block.py)."""
    h, ffn = model.hidden_size, model.ffn_size
    matrices = {"attn.qkv.weight": (3 * h // tp, h), "attn.proj.weight": (h, h // tp),
                "mlp.fc.weight": (ffn // tp, h), "mlp.proj.weight": (h, ffn // tp)}
    vectors = {"ln_1.weight": h, "ln_1.bias": h, "attn.qkv.bias": 3 * h // tp, "attn.proj.bias": h,
               "ln_2.weight": h, "ln_2.bias": h, "mlp.fc.bias": ffn // tp, "mlp.proj.bias": h}
    return [*(Slot(name, shape) for name, shape in matrices.items()),
            *(Slot(name, (size,), group=1) for name, size in vectors.items())]


def root_slots(model: ModelConfig, columns: int) -> list[Slot]:
    """The parameters outside the blocks (megatron/model/gpt2.py)."""
    h = model.hidden_size
    return [Slot("wte.weight", (columns, h)), Slot("wpe.weight", (model.max_position_embeddings, h)),
            Slot("ln_f.weight", (h,), group=1), Slot("ln_f.bias", (h,), group=1)]


def _resides(slot: Slot, zero: ZeroConfig) -> bool:
    """The parameter is whole on every rank at stage 3, too: the engine keeps small ones in a bucket of their own."""
    acts = "stage3_param_persistence_threshold" in HAS_EFFECT and zero.zero_stage == 3
    return acts and slot.numel < zero.stage3_param_persistence_threshold


def _used(slots: list[Slot]) -> int:
    return sum(slot.numel for slot in slots)
