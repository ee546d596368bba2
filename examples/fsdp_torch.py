"""The tiny GPT-2 in torch's style: fully_shard, module by module. One import says whose it is.

    PYTHONPATH=. python examples/fsdp_torch.py
    PYTHONPATH=. python -m megatron.launch --nproc-per-node 2 examples/fsdp_torch.py      # or torchrun

In a clone, that is; with an installation (docs/install.md) PYTHONPATH is not needed.
With `from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard` it runs on torch's.
"""

from __future__ import annotations

import torch

from megatron.config.tree import ModelConfig
from megatron.fsdp import MixedPrecisionPolicy, fully_shard
from megatron.model import GPT2
from megatron.zero import init_distributed


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count up from anywhere; a function of the step and the rank."""
    starts = torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    text = (starts + torch.arange(33)) % 64
    return text[:, :-1], text[:, 1:]


def main() -> None:
    init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)  # every rank starts from the same weights
    model = GPT2(ModelConfig(vocab_size=64, num_layers=2, hidden_size=32, num_attention_heads=4,
                             max_position_embeddings=32, attention_dropout=0.0, hidden_dropout=0.0))

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)

    for step in range(60):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = model(*batch(2 * step + micro, rank)) / 2
            loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {2 * loss.item():.3f}")


if __name__ == "__main__":
    main()
