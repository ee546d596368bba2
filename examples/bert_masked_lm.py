"""A small BERT that fills in masked tokens, with a checkpoint it goes on from, written as a DeepSpeed script.

    PYTHONPATH=. python examples/bert_masked_lm.py --checkpoint_dir runs/bert --num_iterations 60
    PYTHONPATH=. python examples/bert_masked_lm.py --checkpoint_dir runs/bert --num_iterations 120 --stage 3   # goes on

In a clone, that is; with an installation (docs/install.md) PYTHONPATH is not needed.
With `import deepspeed` for its one line of import it runs on DeepSpeed. The text is made here: each sequence counts up.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

from megatron import zero as deepspeed

VOCABULARY, LENGTH, WIDTH, MASK = 32, 16, 32, 31


class Bert(nn.Module):
    """Embeddings tied to the output layer, and two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.encoder(self.tokens(tokens) + self.positions))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def batch(step: int, rank: int, size: int) -> tuple:
    """Sequences that count up from anywhere, a fifth of the tokens masked; a function of the step and the rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(MASK, (size, 1), generator=generator)
    text = (starts + torch.arange(LENGTH)) % MASK
    masked = torch.rand(text.shape, generator=generator) < 0.2
    masked[:, 0] = True  # each batch has something to guess
    return text.masked_fill(masked, MASK), text.masked_fill(~masked, -100)


def main() -> None:
    parser = argparse.ArgumentParser(description="masked language model")
    parser.add_argument("--checkpoint_dir", default=None)
    parser.add_argument("--num_iterations", type=int, default=60)
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Bert()
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
    }
    model, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=config)

    start, losses = 0, []
    if args.checkpoint_dir is not None:
        os.makedirs(args.checkpoint_dir, exist_ok=True)
        path, client_state = model.load_checkpoint(args.checkpoint_dir)
        if path is not None:
            start, losses = client_state["iteration"], client_state["losses"]
    model.train()
    for step in range(start, args.num_iterations):
        tokens, labels = batch(step, model.global_rank, model.train_micro_batch_size_per_gpu())
        loss = model(tokens.to(model.device), labels.to(model.device))
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step % 10 == 0 and model.global_rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    if args.checkpoint_dir is not None and start < args.num_iterations:
        model.save_checkpoint(args.checkpoint_dir, client_state={"iteration": args.num_iterations, "losses": losses})
    if model.global_rank == 0:
        print(f"{len(losses)} steps, from {start}: last loss {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
