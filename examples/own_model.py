"""A model and a loop of your own on the engine: ZeRO stage 2, accumulation, clipping, and a checkpoint to resume from.

    PYTHONPATH=. python examples/own_model.py
    PYTHONPATH=. python -m megatron.launch --nproc-per-node 2 examples/own_model.py       # or torchrun

In a clone, that is; with an installation (docs/install.md) PYTHONPATH is not needed.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from megatron import zero
from megatron.distributed.process_group import read_environment

CONFIG = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 2},
}


class Model(nn.Module):
    """Whether a point is inside of a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, points: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.layers(points).squeeze(1), inside)


def main(folder: str) -> None:
    torch.manual_seed(1)
    points = 2 * torch.rand(4096, 2) - 1
    examples = list(zip(points, (points.norm(dim=1) < 0.8).float()))
    engine, _, loader, _ = zero.initialize(model=Model(), training_data=examples, config=CONFIG)
    path, state = engine.load_checkpoint(folder)
    first = state["epoch"] + 1 if path else 0
    for epoch in range(first, first + 3):
        for batch in loader:
            loss = engine(*(tensor.to(engine.device) for tensor in batch))
            engine.backward(loss)
            engine.step()
        if read_environment().rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
        engine.save_checkpoint(folder, client_state={"epoch": epoch})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own_model")
