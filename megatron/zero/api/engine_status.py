"""The read-only part of `Engine`: counters, batch sizes, precision, norms and loss scale."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.tree import Config
from megatron.distributed.process_group import read_environment
from megatron.metrics.step_metrics import NvmeStats
from megatron.zero.api.data_loader import BatchSizes
from megatron.zero.engine import ZeroEngine
from megatron.zero.flat_buffers import DTYPES
from megatron.zero.offload.nvme import NvmeStorage
from mpu.groups import Groups


class EngineStatus:
    """The read-only part of an `Engine`."""

    core: ZeroEngine
    config: Config
    _batch_sizes: BatchSizes

    @property
    def module(self) -> nn.Module:
        return self.core.module

    @property
    def groups(self) -> Groups:
        """The process groups: world, data parallel, tensor parallel."""
        return self.core.groups

    @property
    def device(self) -> torch.device:
        return self.core.state.device

    @property
    def global_steps(self) -> int:
        """Number of optimizer steps so far, skipped ones included."""
        return self.core.global_steps

    @property
    def skipped_steps(self) -> int:
        return self.core.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        return self.core.state.counters.micro_steps

    @property
    def global_samples(self) -> int:
        """Number of samples in all optimizer steps so far, summed over changes of the batch size."""
        return self._batch_sizes.consumed_samples

    @property
    def local_rank(self) -> int:
        """This rank's place on its node."""
        return read_environment().local_rank

    @property
    def working_dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return DTYPES[self.config.precision.name]

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that changed the weights (skipped ones excluded)."""
        return self.core.counters.applied_steps

    @property
    def backward_scale(self) -> float:
        """The factor by which `backward` multiplies the loss."""
        return self.core.backward_scale

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self.core.state.counters.scaler.scale

    loss_scale = cur_scale

    def was_step_applied(self) -> bool:
        """The last optimizer step changed the weights (it was not skipped for an overflow)."""
        return self.core.last_report is not None and self.core.last_report.applied

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last optimizer step, before clipping; None before the first."""
        return None if self.core.last_report is None else self.core.last_report.grad_norm

    def get_type(self) -> list[str]:
        """The optimizer's name, for each param group."""
        return [self.core.rule.name] * len(self.core.param_groups)

    def fp16_enabled(self) -> bool:
        return self.config.precision.fp16

    def bfloat16_enabled(self) -> bool:
        return self.config.precision.bf16

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch_sizes.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.core.accumulation_steps

    def train_batch_size(self) -> int:
        return self._batch_sizes.train_batch_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro-batch size, micro-batches per step)."""
        return self.train_batch_size(), self._batch_sizes.micro_batch_size, self.core.accumulation_steps

    def zero_optimization_stage(self) -> int:
        return self.config.zero.zero_stage

    def drive_use(self) -> NvmeStats | None:
        """Seconds the training thread waited for NVMe, and bytes read and written, since the engine was created. None
        if no state is on NVMe."""
        storage = self.core.engine_storage
        stats = [backend.stats for backend in (storage.optimizer, storage.params)
                 if isinstance(backend, NvmeStorage) and backend.has_nvme_shards]
        return sum(stats, NvmeStats()) if stats else None

    @property
    def parameters_kept(self) -> int:
        """Parameter elements that this rank stores between steps, with padding: at stage 3 its shards."""
        return sum(bucket.layout.shard_numel if bucket.params_are_sharded else bucket.layout.numel
                   for bucket in (*self.core.buckets, *self.core.frozen_buckets))

    @property
    def layout(self) -> dict[str, int]:
        """Tensor and data parallel size and ZeRO stage, as stored in checkpoints."""
        return {"tp": self.groups.tp.size, "dp": self.groups.dp.size, "zero_stage": self.config.zero.zero_stage}
