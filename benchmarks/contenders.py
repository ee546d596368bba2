"""The ways to train a GPT-2 that the benchmarks compare. Each builder returns a function that does one whole training
step.

`Task` says what is trained; a builder runs inside a rank, with torch.distributed initialised when there are several.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from plain_gpt2 import PlainGPT2, adamw
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Task:
    """Model shape, micro-batch of one rank, precision."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    batch: int
    seq: int
    precision: str = "fp32"
    device: str = "cpu"
    compile: bool = False

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // 128) * 128


TASKS = {
    "14M": Task(6, 384, 6, 8192, 8, 256),
    "124M": Task(12, 768, 12, 50257, 2, 256),
    "345M": Task(24, 1024, 16, 50257, 8, 1024),
    "350M": Task(24, 1024, 16, 50257, 8, 1024),
    "774M": Task(36, 1280, 20, 50257, 8, 1024),
    "1.5B": Task(48, 1600, 25, 50257, 8, 1024),
    "tiny": Task(2, 32, 2, 257, 2, 16),
}


def autocast(task: Task) -> AbstractContextManager[object]:
    return torch.autocast(task.device, torch.bfloat16) if task.precision == "bf16" else nullcontext()


def _plain_step(task: Task, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor],
                optimizer: torch.optim.Optimizer | None = None) -> Step:
    """The usual loop: autocast for bf16, clip, fused AdamW."""
    optimizer = optimizer or adamw(model)

    def step(tokens: Tensor, targets: Tensor) -> None:
        with autocast(task):
            loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _plain_model(task: Task) -> PlainGPT2:
    model = PlainGPT2(task.layers, task.hidden, task.heads, task.padded_vocab, task.seq).to(task.device)
    if task.compile:
        model.compile()
    return model


def plain(task: Task) -> Step:
    model = _plain_model(task)
    return _plain_step(task, model, model)


def ddp(task: Task) -> Step:
    model = nn.parallel.DistributedDataParallel(_plain_model(task), gradient_as_bucket_view=True)
    return _plain_step(task, model, model)


def fsdp2(task: Task) -> Step:
    """torch's fully_shard, a block at a time, resharding after forward."""
    from torch.distributed.fsdp import fully_shard

    model = _plain_model(task)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _plain_step(task, model, model)


def fsdp_face(task: Task, model: str = "ours") -> Step:
    """Our fully_shard, as `fsdp2` has torch's: around our model, or (`model="plain"`) around the same plain one."""
    from megatron.config.cli import build_config
    from megatron.fsdp import clip_grad_norm_, fully_shard
    from megatron.model import GPT2

    whole: nn.Module = _plain_model(task) if model == "plain" else GPT2(build_config(values_of(task)).model)
    for block in whole.blocks:
        fully_shard(block)
    fully_shard(whole)
    optimizer = adamw(whole)

    def step(tokens: Tensor, targets: Tensor) -> None:
        with autocast(task):
            loss = whole(tokens, targets)
        loss.backward()
        clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def zero_redundancy(task: Task) -> Step:
    """torch's ZeroRedundancyOptimizer over DDP: its stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_plain_model(task), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return _plain_step(task, model, model, optimizer)


def hf(task: Task) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=task.padded_vocab,
        n_positions=task.seq,
        n_embd=task.hidden,
        n_layer=task.layers,
        n_head=task.heads,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).to(task.device)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens).logits  # their own `labels` would shift a second time
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return _plain_step(task, model, loss_of)


def deepspeed_offload(task: Task) -> Step:
    """DeepSpeed's ZeRO-2 with the optimizer on the host, on several ranks; how to have it: host_adam.py."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())  # it asks, and no launcher has set it
    model = _plain_model(task)
    precision = {} if task.precision == "fp32" else {task.precision: {"enabled": True}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-4),
        config={"train_micro_batch_size_per_gpu": task.batch, "gradient_clipping": 1.0, **precision,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})

    def step(tokens: Tensor, targets: Tensor) -> None:
        engine.backward(engine(tokens, targets))
        engine.step()

    return step


def values_of(task: Task, stage: int = 0) -> dict[str, object]:
    """A task as fields of our configuration."""
    return {
        "num_layers": task.layers,
        "hidden_size": task.hidden,
        "num_attention_heads": task.heads,
        "max_position_embeddings": task.seq,
        "vocab_size": task.vocab,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "batch_size": task.batch,
        "zero_stage": stage,
        "lr": 1e-4,
        "lr_decay_style": "constant",
        "compile": task.compile,
        **({} if task.precision == "fp32" else {task.precision: True}),
    }


def ours(task: Task, stage: int = 0, optimizer_home: str = "none", **settings: object) -> Step:
    from megatron.config.cli import build_config
    from megatron.train import build
    from mpu import groups

    home = {"offload_optimizer_device": optimizer_home, "offload_optimizer_nvme_path": os.environ.get("NVME_PATH", ".")}
    config = build_config({**values_of(task, stage), **(home if optimizer_home != "none" else {}), **settings})
    grid = groups.build(1)
    engine = build.engine(config, build.model(config, grid), grid, torch.device(task.device))

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = engine(tokens, targets, grad_scale=engine.backward_scale)
        engine.backward(loss)
        engine.step()

    return step


def with_allocator(build: Callable[[Task], Step]) -> Callable[[Task], Step]:
    """The contender with the trainer's setting of the C allocator for CPU runs, which plain torch does not make."""

    def built(task: Task) -> Step:
        from megatron.train.processor import keep_freed_memory

        if task.device == "cpu":
            keep_freed_memory()
        return build(task)

    return built


WITH_ALLOCATOR: dict[str, Callable[[Task], Step]] = {
    "ours": ours, "plain+malloc": plain, "ddp+malloc": ddp,
    **{f"zero{stage}": partial(ours, stage=stage) for stage in (1, 2, 3)},
    "zero3-reshard": partial(ours, stage=3, stage3_max_reuse_distance=0, stage3_param_persistence_threshold=0),
    "fsdp-face": fsdp_face, "fsdp-face-plain": partial(fsdp_face, model="plain"),
    "zero2-cpu": partial(ours, stage=2, optimizer_home="cpu"),
    "zero3-nvme": partial(ours, stage=3, optimizer_home="nvme"),  # in the folder NVME_PATH
}
CONTENDERS: dict[str, Callable[[Task], Step]] = {
    "plain": plain, "hf": hf, "ddp": ddp, "fsdp2": fsdp2, "zero-redundancy": zero_redundancy, "ours-malloc": ours,
    "deepspeed2-cpu": deepspeed_offload,
    **{name: with_allocator(build) for name, build in WITH_ALLOCATOR.items()},
}


def environment(name: str, device: str) -> dict[str, str]:
    """What a contender's processes are started with: for ours, as scripts/lib.sh starts a CPU run."""
    ours_on_cpu = device == "cpu" and name in WITH_ALLOCATOR
    return {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"} if ours_on_cpu else {}
