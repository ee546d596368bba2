"""Activation memory of one micro-batch between its forward and its backward: pure arithmetic, in bytes.

Autograd saves the tensors that a backward formula reads, each storage once (T tokens, h hidden, f MLP width, t
tensor parallel ranks): LayerNorm its input [T, h] with mean and 1/std [T]; a linear layer its input; attention q,
k, v [T, 3h/t], its output [T, h/t] and an fp32 log-sum-exp per row and head; GELU its input [T, f/t]; dropout a
mask [T, h]. Activation checkpointing saves the input [T, h] of each chunk of blocks instead: in place, partitioned
over tensor parallel ranks, on the host, or in a contiguous buffer. CPU attention with dropout is unfused: fp32,
three [s, s] matrices a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.tree import ModelConfig, RecomputeConfig

Device = Literal["cpu", "cuda"]

FP32 = 4


@dataclass(frozen=True)
class Activations:
    """One micro-batch of `batch` x `sequence` tokens in a working precision of `param_bytes` bytes."""

    model: ModelConfig
    batch: int
    sequence: int
    tp: int
    param_bytes: int
    device: Device
    document_mask: bool = False  # documents are kept apart, so attention gets a mask
    recompute: RecomputeConfig = RecomputeConfig()

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def residual_bytes(self) -> int:
        """One [T, h] tensor of the residual stream."""
        return self.tokens * self.model.hidden_size * self.param_bytes

    @property
    def mlp_bytes(self) -> int:
        """One [T, f/t] tensor inside the MLP."""
        return self.tokens * self.model.ffn_size // self.tp * self.param_bytes

    @property
    def layernorm_stats(self) -> int:
        """Mean and 1/std of one LayerNorm."""
        return 2 * self.tokens * (FP32 if self.device == "cuda" else self.param_bytes)

    @property
    def dropout_mask(self) -> int:
        if not self.model.hidden_dropout:
            return 0
        return self.tokens * self.model.hidden_size * (1 if self.device == "cuda" else self.param_bytes)

    @property
    def block(self) -> int:
        """Everything one block saves, its input included (the next block's input is its output)."""
        streams = 4 * self.residual_bytes  # inputs of two LayerNorms, of the q, k, v projection and of the MLP
        return streams + 2 * self.layernorm_stats + self._attention + 2 * self.mlp_bytes + 2 * self.dropout_mask

    @property
    def _scores(self) -> int:
        """One fp32 [s, s] matrix for each head of this rank and sample."""
        return self.tokens * self.sequence * self.model.num_attention_heads // self.tp * FP32

    @property
    def _attends_unfused(self) -> bool:
        return self.device == "cpu" and self.model.attention_dropout > 0

    @property
    def _attention(self) -> int:
        split = self.tokens * self.model.hidden_size // self.tp  # elements of one [T, h/t]
        if self._attends_unfused:
            return split * self.param_bytes + 3 * split * FP32 + 3 * self._scores
        rows = self.tokens * self.model.num_attention_heads // self.tp
        mask = self.batch * self.sequence**2 * self.param_bytes if self.document_mask else 0
        return 4 * split * self.param_bytes + rows * FP32 + mask

    @property
    def block_backward(self) -> int:
        """Peak of a block's backward beyond its saved tensors: gradients of activations."""
        # of the residual stream; of GELU's output, while that of its input is computed
        mlp = self.residual_bytes + self.mlp_bytes
        if not self._attends_unfused:
            return mlp
        freed = 2 * self.residual_bytes + 2 * self.mlp_bytes  # the second half of the block is done
        return max(mlp, self.residual_bytes + 2 * self._scores - freed)

    @property
    def before_blocks(self) -> int:
        """The tokens, their targets and weights, and tensors saved by the embeddings."""
        split_lookup = self.tokens * (8 + 1 + 1) if self.tp > 1 else 0
        return self.tokens * (8 + 8 + FP32) + split_lookup + self.dropout_mask

    # ---- recomputation ------------------------------------------------------------------------------------------

    @property
    def chunk(self) -> int | None:
        """Blocks recomputed at a time."""
        return self.recompute.checkpoint_num_layers if self.recompute.checkpoint_activations else None

    @property
    def chunk_input(self) -> int:
        """The saved input of one chunk."""
        parts = self.tp if self.recompute.partition_activations else 1
        return -(-self.tokens * self.model.hidden_size // parts) * self.param_bytes

    @property
    def inputs_are_on_host(self) -> bool:
        return self.recompute.cpu_checkpointing and self.device == "cuda"

    @property
    def input_buffer_rows(self) -> int:
        """Rows of the contiguous buffer of saved inputs; 0: there is no buffer."""
        if self.chunk is None or not self.recompute.contiguous_memory_optimization:
            return 0
        return self.recompute.number_checkpoints or self.chunks

    @property
    def host_input_bytes(self) -> int:
        """Bytes on the host at the end of the forward."""
        rows = max(self.chunks, self.input_buffer_rows)
        return rows * self.chunk_input if self.inputs_are_on_host and self.chunk else 0

    @property
    def input_buffer_bytes(self) -> int:
        """The buffer on the device: allocated in the first forward, and kept."""
        return 0 if self.inputs_are_on_host else self.input_buffer_rows * self.chunk_input

    @property
    def chunks(self) -> int:
        return -(-self.model.num_layers // (self.chunk or 1))

    def _device_input_bytes(self, chunks: int) -> int:
        """Inputs of that many chunks on the device, outside the buffer."""
        return 0 if self.inputs_are_on_host or self.input_buffer_rows else chunks * self.chunk_input

    def alive_at_block(self, block: int) -> int:
        """Alive when the backward of block number `block` begins: the blocks up to it, or with recomputation the inputs
        of the chunks up to its own, and the recomputed blocks of its own chunk."""
        if self.chunk is None:
            return (block + 1) * self.block
        number, inside = divmod(block, self.chunk)
        recomputed = (inside + 1) * self.block
        # the full input exists beside a saved copy of it
        is_copy = (self.recompute.partition_activations and self.tp > 1 or self.inputs_are_on_host
                   or self.input_buffer_rows > 0)
        # the next chunk's input is copied to the device meanwhile
        prefetched = self.residual_bytes if self.inputs_are_on_host and number else 0
        return self._device_input_bytes(number + is_copy) + recomputed + prefetched

    def alive_at_loss(self) -> int:
        """Alive at the end of the forward: all blocks, or the input of each chunk."""
        return self.model.num_layers * self.block if self.chunk is None else self._device_input_bytes(self.chunks)
