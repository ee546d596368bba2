"""Activation memory of one micro-batch between its forward and its backward: pure arithmetic, in bytes.

Autograd saves the tensors that a backward formula reads, each storage once (T tokens, h hidden, f MLP width, t
tensor parallel ranks): LayerNorm its input [T, h] with mean and 1/std [T]; a linear layer its input; attention q,
k, v [T, 3h/t], its output [T, h/t] and an fp32 log-sum-exp per row and head; GELU its input [T, f/t]; dropout a
mask [T, h]. Activation checkpointing saves the input [T, h] of each chunk of blocks instead: in place, partitioned
over tensor parallel ranks, on the host, or in a contiguous buffer. CPU attention with dropout is unfused: fp32,
three [s, s] matrices a head.
"""

from __future__ import annotations

from typing import Literal

from megatron.config.tree import ModelConfig, RecomputeConfig

Device = Literal["cpu", "cuda"]

FP32 = 4


class Activations:
    """One micro-batch of `batch` x `sequence` tokens in a working precision of `param_bytes` bytes."""

    def __init__(self, model: ModelConfig, batch: int, sequence: int, tp: int, param_bytes: int, device: Device, *,
                 document_mask: bool, recompute: RecomputeConfig) -> None:
        """`document_mask`: documents are kept apart, so attention gets a mask."""
        self.model, self.batch, self.sequence = model, batch, sequence
        self.tokens = tokens = batch * sequence
        on_gpu = device == "cuda"
        self.residual_bytes = tokens * model.hidden_size * param_bytes  # [T, h] of the residual stream
        self.mlp_bytes = tokens * model.ffn_size // tp * param_bytes  # [T, f/t] inside the MLP
        self.layernorm_stats = 2 * tokens * (FP32 if on_gpu else param_bytes)  # mean and 1/std of one LayerNorm
        dropout_mask = tokens * model.hidden_size * (1 if on_gpu else param_bytes) if model.hidden_dropout else 0

        # attention: q, k, v and the output, each [T, h/t]
        is_unfused = not on_gpu and model.attention_dropout > 0
        split = tokens * model.hidden_size // tp
        scores = tokens * sequence * model.num_attention_heads // tp * FP32  # an fp32 [s, s] for each head and sample
        if is_unfused:
            attention = split * param_bytes + 3 * split * FP32 + 3 * scores
        else:
            rows = tokens * model.num_attention_heads // tp
            mask = batch * sequence**2 * param_bytes if document_mask else 0
            attention = 4 * split * param_bytes + rows * FP32 + mask
        streams = 4 * self.residual_bytes  # inputs of two LayerNorms, of the q, k, v projection and of the MLP
        # Everything one block saves, its input included (the next block's input is its output).
        self.block = streams + 2 * self.layernorm_stats + attention + 2 * self.mlp_bytes + 2 * dropout_mask
        # gradients of the residual stream; of GELU's output, while that of its input is computed
        # Peak of a block's backward beyond its saved tensors: gradients of activations.
        self.block_backward = self.residual_bytes + self.mlp_bytes
        if is_unfused:
            freed = 2 * self.residual_bytes + 2 * self.mlp_bytes  # the second half of the block is done
            self.block_backward = max(self.block_backward, self.residual_bytes + 2 * scores - freed)
        split_lookup = tokens * (8 + 1 + 1) if tp > 1 else 0
        # The tokens, their targets and weights, and tensors saved by the embeddings.
        self.before_blocks = tokens * (8 + 8 + FP32) + split_lookup + dropout_mask

        # Blocks recomputed at a time; None: nothing is recomputed.
        self.chunk = recompute.checkpoint_num_layers if recompute.checkpoint_activations else None
        self.num_chunks = -(-model.num_layers // (self.chunk or 1))
        self.inputs_are_on_host = recompute.cpu_checkpointing and on_gpu
        parts = tp if recompute.partition_activations else 1
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
        self._copies_input = recompute.partition_activations and tp > 1 or self.inputs_are_on_host or self._has_buffer

    def _device_input_bytes(self, chunks: int) -> int:
        """Inputs of that many chunks on the device, outside the buffer."""
        return 0 if self.inputs_are_on_host or self._has_buffer else chunks * self._chunk_input

    def alive_at_block(self, block: int) -> int:
        """Alive when the backward of block number `block` begins: the blocks up to it, or with recomputation the inputs
        of the chunks up to its own, and the recomputed blocks of its own chunk."""
        if self.chunk is None:
            return (block + 1) * self.block
        number, inside = divmod(block, self.chunk)
        recomputed = (inside + 1) * self.block
        # the next chunk's input is copied to the device meanwhile
        prefetched = self.residual_bytes if self.inputs_are_on_host and number else 0
        return self._device_input_bytes(number + self._copies_input) + recomputed + prefetched

    def alive_at_loss(self) -> int:
        """Alive at the end of the forward: all blocks, or the input of each chunk."""
        return self.model.num_layers * self.block if self.chunk is None else self._device_input_bytes(self.num_chunks)
