"""What a run keeps, from its configuration alone: pure arithmetic, for any number of ranks.

`Run` is a configuration on so many ranks of one kind of device. It knows the layout of the engine (FlatLayout over the
shapes of the parameters, padding included), the precisions of zero/engine.py, what lasts from step to step, and what is
sent. Not here: what comes and goes within a step (memory.py), activations (activations.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron.config.tree import Config, ModelConfig, ZeroConfig, data_parallel_size
from megatron.plan.activations import FP32, Activations, Device
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.policy import Policy, policy
from mpu.split import pad_vocab

Offload = Literal["none", "optimizer", "optimizer+params"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "optimizer+params")

MOMENTS_PER_WEIGHT = 2
"""Numbers that AdamW keeps beside each weight."""


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
        return FlatLayout([slot for slot in self.root_parameters if not _resides(slot, self.config.zero)], self.shards)

    @cached_property
    def block(self) -> FlatLayout:
        """The bucket of one transformer block."""
        return FlatLayout([slot for slot in self.block_parameters if not _resides(slot, self.config.zero)], self.shards)

    @cached_property
    def resident(self) -> FlatLayout:
        """The bucket of parameters too small to be split."""
        slots = [*self.root_parameters, *self.block_parameters * self.layers]
        return FlatLayout([slot for slot in slots if _resides(slot, self.config.zero)], self.shards)

    @cached_property
    def root_parameters(self) -> list[Slot]:
        return root_slots(self.config.model, self.columns)

    @cached_property
    def block_parameters(self) -> list[Slot]:
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
        return max(self.drawing, offloaded)

    @cached_property
    def drawn_model(self) -> int:
        return FP32 * (numel_of(self.root_parameters) + self.layers * numel_of(self.block_parameters))

    @property
    def drawing(self) -> int:
        """The fp32 weights while they are drawn, every matrix whole before it is sliced: the token table first, with a
        padded copy; a matrix of the last block last. At stage 3 a layer that is finished leaves this rank's part."""
        model, padded = self.config.model, self.columns * self.tp
        table = self.columns + model.tokens + (padded if padded > model.tokens else 0)
        matrix = FP32 * model.hidden_size * model.ffn_size
        model_so_far = self.drawn_model // self.dp + matrix if self.policy.split_params else self.drawn_model
        return max(FP32 * model.hidden_size * table, model_so_far + matrix)

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
    return policy(zero.zero_stage).split_params and slot.numel < zero.stage3_param_persistence_threshold


def numel_of(slots: Iterable[Slot]) -> int:
    return sum(slot.numel for slot in slots)
