"""How the proofs of the engine build it, drive it and read it: the only file of them that knows its names.

A *plain loop* is beside it, which they compare it with: one process, torch's own AdamW, no code of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.cli import build_config
from megatron.config.tree import Config
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero.api.checkpoint_io import read_state
from megatron.zero.api.engine import Engine
from megatron.zero.api.init import GatheredParameters
from megatron.zero.api.initialize import initialize
from megatron.zero.bucket import FlatBucket
from megatron.zero.engine import ZeroEngine
from megatron.zero.layout import FlatLayout, Segment
from megatron.zero.offload.storage import WEIGHT
from mpu.groups import Groups, build as build_groups
from mpu.partition import join_local_slices, partition_of

CLIP, DECAY = 0.5, 0.1

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

EPS = 1e-5  # the gradient of a key bias is zero but for rounding, which a small epsilon would blow up


def configure(**settings: Any) -> Config:
    """A config whose optimizer has something to do: every step of the proofs clips or decays."""
    split_everything = {"stage3_param_persistence_threshold": 0}
    return build_config({"clip_grad": CLIP, "weight_decay": DECAY, "adam_eps": EPS, **split_everything, **settings})


def configure_gpt2(**settings: Any) -> Config:
    """The smallest GPT-2 that has everything."""
    return configure(**{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
                        "vocab_size": 61, "make_vocab_size_divisible_by": 8, "attention_dropout": 0.0,
                        "hidden_dropout": 0.0, **settings})


def built(config: Config, grid: Groups | None = None) -> Engine:
    """The trainer's engine around its GPT-2."""
    grid = grid or build_groups(config.parallel.model_parallel_size)
    return build_engine(config, build_model(config, grid), grid, torch.device("cpu"))


def gpt2_engine(config: Config, grid: Groups) -> ZeroEngine:
    return built(config, grid).core


def engine_around(module: nn.Module, config: Config, grid: Groups, accumulation: int = 1,
                  device: torch.device | None = None) -> Engine:
    """An engine for any module; matrices decay."""
    batch = replace(config.train, batch_size=1, global_batch_size=accumulation * grid.dp.size)
    groups = [{"params": [p for p in module.parameters() if p.dim() >= 2], "weight_decay": config.optim.weight_decay},
              {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return initialize(model=module, model_parameters=groups, config=replace(config, train=batch), mpu=grid,
                      lr_scheduler=Held(), device=device)[0]


def step(engine: Engine, lr: float) -> None:
    for group in engine.core.param_groups:
        group["lr"] = lr
    engine.step()


class Held:
    """A scheduler that leaves the rate alone."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def gpt2_loss(engine: ZeroEngine, rows: Tensor) -> Tensor:
    """The loss of [b, s + 1] tokens, ready for `engine.backward`."""
    loss: Tensor = engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale)
    return loss


def weights(engine: ZeroEngine | Engine) -> dict[str, Tensor]:
    """The parameters as a forward would see them: whole over data parallel, this rank's slice of tensor parallel."""
    with GatheredParameters(engine.module.parameters()):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def state(engine: ZeroEngine) -> list[Tensor]:
    """Everything that lasts from step to step on this rank, replicas and padding included: masters, the working
    precision and moments."""
    return [tensor for bucket in engine.buckets
            for tensor in (master(bucket), work(bucket), *states(bucket))]


def kept(bucket: FlatBucket, kind: str) -> Tensor:
    """A copy of all numbers of one kind."""
    out = torch.empty(bucket.master_state.numel, dtype=bucket.master_state.dtype)
    bucket.master_state.read(kind, 0, out)
    return out


def master(bucket: FlatBucket) -> Tensor:
    return kept(bucket, WEIGHT)


def work(bucket: FlatBucket) -> Tensor:
    """A copy of the rank's part of the weights at work."""
    out = torch.empty(bucket.param_shard.numel, dtype=bucket.param_shard.dtype)
    bucket.param_shard.read(WEIGHT, 0, out)
    return out


def states(bucket: FlatBucket) -> list[Tensor]:
    return [kept(bucket, kind) for kind in bucket.master_state.kinds if kind != WEIGHT]


def gradient_runs(engine: ZeroEngine) -> Iterator[tuple[Segment, Tensor]]:
    """(segment, its run of the reduced gradient) for everything this rank owns."""
    for bucket in engine.buckets:
        for segment in bucket.layout.segments(bucket.shard_group.rank):
            yield segment, bucket.grads.shard[segment.shard_offset : segment.shard_offset + segment.count]


Run = tuple[str, tuple[int, ...], int, Tensor]


def master_runs(engine: ZeroEngine) -> list[Run]:
    """(parameter, local shape, offset, values) of the fp32 weights of this rank's shards; of a part of what every rank
    has."""
    parts = ((bucket, engine.groups.dp if bucket.shard_group.is_solo else bucket.shard_group)
             for bucket in engine.all_buckets)
    return [(own.slot.name, own.slot.shape, own.slot_offset,
             read_state(bucket, "weight", own.slot, own.slot_offset, own.count).clone())
            for bucket, ranks in parts for own in FlatLayout(bucket.layout.slots, ranks.size).segments(ranks.rank)]


def assemble(runs: Sequence[Run]) -> dict[str, Tensor]:
    """The tensors whose runs these are; every element must be there once."""
    flat = {name: torch.full((math.prod(shape),), math.nan) for name, shape, _, _ in runs}
    for name, _, offset, values in runs:
        place = flat[name][offset : offset + len(values)]
        assert place.isnan().all(), f"{name} is there twice at {offset}"
        place.copy_(values)
    assert not any(tensor.isnan().any() for tensor in flat.values()), "an element is nowhere"
    return {name: flat[name].view(shape) for name, shape, _, _ in runs}


def join_runs(by_rank: Sequence[list[Run]], tp: int, model: nn.Module) -> dict[str, Tensor]:
    """The logical weights, from what all ranks hold."""
    pieces = [assemble([run for runs in by_rank[rank::tp] for run in runs]) for rank in range(tp)]
    return join_tensor_parallel(pieces, model) if tp > 1 else pieces[0]


def join_tensor_parallel(pieces: list[dict[str, Tensor]], model: nn.Module) -> dict[str, Tensor]:
    """Logical weights from those of every tensor parallel rank, in rank order; `model` says how they are cut."""
    joined = {}
    for name, parameter in model.named_parameters():
        partition = partition_of(parameter)
        joined[name] = pieces[0][name] if partition is None else join_local_slices([p[name] for p in pieces], partition)
    return joined


class PlainLoop:
    """Training as a textbook has it: fp32 weights in torch's AdamW, copied into the model before every step.

    The model works in `dtype`. A parameter that no gradient reaches has a gradient of zeros.
    """

    def __init__(self, model: nn.Module, config: Config, dtype: torch.dtype = torch.float32) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.model, self._clip = model.to(dtype), config.optim.clip_grad
        self._used = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        optim, tensors = config.optim, self.weights.values()
        groups = [{"params": [w for w in tensors if w.dim() >= 2], "weight_decay": optim.weight_decay},
                  {"params": [w for w in tensors if w.dim() < 2], "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_eps)

    def step(self, loss_of: Callable[[nn.Module], Tensor], lr: float, scale: float = 1.0) -> tuple[float, float]:
        """(loss, gradient norm before clipping) of one step."""
        self.load_model()
        loss = loss_of(self.model)
        (loss * scale).backward()
        for name, parameter in self._used.items():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.weights[name].grad = grad.float() / scale
        grads = [w.grad for w in self.weights.values() if w.grad is not None]
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        for grad in grads:
            grad.mul_(min(1.0, self._clip / (norm + 1e-6)))
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        return loss.item(), norm

    def load_model(self) -> None:
        """The weights as the model sees them; no gradients."""
        for name, parameter in self._used.items():
            parameter.data.copy_(self.weights[name])
            parameter.grad = None
