"""A small convolutional net on CIFAR-like pictures, written as a DeepSpeed script.

    PYTHONPATH=. python examples/cifar10_deepspeed.py --stage 2
    PYTHONPATH=. python -m megatron.launch --nproc-per-node 2 examples/cifar10_deepspeed.py --dtype bf16

In a clone, that is; with an installation (docs/install.md) PYTHONPATH is not needed.
With `deepspeed` for `megatron.zero` in its two lines of import it runs on DeepSpeed. The pictures are made here: ten
noisy patterns.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

from megatron import zero as deepspeed
from megatron.zero.accelerator import get_accelerator


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 5)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def pictures(count: int, seed: int) -> list:
    """(picture of 3 x 32 x 32, class) pairs: a pattern for each class, and noise."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=noise)
    samples = patterns[labels] + torch.randn(count, 3, 32, 32, generator=noise)
    return list(zip(samples, labels))


def ds_config(args: argparse.Namespace) -> dict:
    return {
        "train_batch_size": 16,
        "steps_per_print": 20,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                                                     "warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 10},
        "zero_optimization": {"stage": args.stage},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CIFAR-like pictures")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=0)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(local_rank)
    device = get_accelerator().device_name(local_rank)
    torch.manual_seed(0)
    net = Net()
    model_engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=pictures(args.samples, seed=1), config=ds_config(args))
    dtype = torch.float32
    if model_engine.bfloat16_enabled():
        dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        dtype = torch.half

    for epoch in range(args.epochs):
        for inputs, labels in loader:
            outputs = model_engine(inputs.to(device).to(dtype))
            loss = F.cross_entropy(outputs.float(), labels.to(device))
            model_engine.backward(loss)
            model_engine.step()
        if torch.distributed.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    model_engine.eval()
    correct = total = 0
    with torch.no_grad():
        for inputs, labels in torch.utils.data.DataLoader(pictures(200, seed=2), batch_size=50):
            guesses = model_engine(inputs.to(device).to(dtype)).argmax(dim=1).cpu()
            correct, total = correct + int((guesses == labels).sum()), total + len(labels)
    if torch.distributed.get_rank() == 0:
        print(f"accuracy {100 * correct / total:.0f} %")


if __name__ == "__main__":
    main()
