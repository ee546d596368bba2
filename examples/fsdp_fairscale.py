"""The tiny GPT-2 in FairScale's style: nested wrapping, clipping, bf16, and a state dict of the whole model.

    PYTHONPATH=. python examples/fsdp_fairscale.py
    PYTHONPATH=. python -m megatron.launch --nproc-per-node 2 examples/fsdp_fairscale.py      # or torchrun

In a clone, that is; with an installation (docs/install.md) PYTHONPATH is not needed.
With `from fairscale.nn import checkpoint_wrapper, enable_wrap, wrap` for its line of import it is a FairScale script.
"""

from __future__ import annotations

import torch

from megatron.config.tree import ModelConfig
from megatron.fsdp import checkpoint_wrapper, enable_wrap, wrap
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

    with enable_wrap(mixed_precision=True, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True):
        for number, block in enumerate(model.blocks):
            model.blocks[number] = wrap(checkpoint_wrapper(block))
        model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(60):
        loss = model(*batch(step, rank))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    weights, state = model.state_dict(), model.gather_full_optim_state_dict(optimizer)
    if rank == 0:
        print(f"{len(weights)} tensors of the whole model, state of {len(state['state'])} parameters")


if __name__ == "__main__":
    main()
