"""What progressive layer dropping saves: time of a training step with and without it, in turn in one process, against
the formula (1 - theta) (L - 1) / (2 L).

    python benchmarks/layer_drop.py                                      24 layers, theta 0.5 from the first step on
    python benchmarks/layer_drop.py --device cuda --hidden-size 1024 --seq-length 1024 --bf16

Every pair of steps is timed next to each other, so that drift of the machine hits both; means are over all steps, as
each leaves out other blocks. The blocks that ran are counted, too: their mean is the formula's only in the long run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron.config.tree import build_config  # noqa: E402
from megatron.layer_drop import expected_blocks, kept  # noqa: E402
from megatron.train.build import engine as build_engine  # noqa: E402
from megatron.train.build import model as build_model  # noqa: E402
from megatron.zero.api.engine import Engine  # noqa: E402
from mpu import groups as mpu_groups  # noqa: E402

AT_ONCE = 1e3
"""A gamma with which theta is at its limit from the second step on."""


def made(options: argparse.Namespace, drops: bool) -> Engine:
    config = build_config({
        "num_layers": options.num_layers, "hidden_size": options.hidden_size, "num_attention_heads": options.heads,
        "max_position_embeddings": options.seq_length, "vocab_size": options.vocab_size,
        "batch_size": options.batch_size, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": options.bf16,
        "compile": False,
        "progressive_layer_drop": drops, "pld_theta": options.theta, "pld_gamma": AT_ONCE})
    groups = mpu_groups.build(1)
    return build_engine(config, build_model(config, groups), groups, torch.device(options.device))


def seconds(engine: Engine, rows: torch.Tensor) -> float:
    """Of one step."""
    begin = time.perf_counter()
    engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
    engine.step()
    if rows.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    for name, default in (("num-layers", 24), ("hidden-size", 192), ("heads", 6), ("seq-length", 128),
                          ("vocab-size", 512), ("batch-size", 8), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    whole, drops = made(options, False), made(options, True)
    rows = torch.randint(options.vocab_size, (options.batch_size, options.seq_length + 1), device=options.device)
    for engine in (whole, drops) * 2:
        seconds(engine, rows)  # warm up; theta is 1 in the first step
    first, times = drops.global_steps, [(seconds(whole, rows), seconds(drops, rows)) for _ in range(options.steps)]
    ran = [len(kept(drops.config.train.seed, step, options.num_layers, options.theta))
           for step in range(first, first + options.steps)]
    all_of_them, fewer = (sum(one) / options.steps for one in zip(*times, strict=True))
    layers = options.num_layers
    print(f"{layers} layers of width {options.hidden_size}, theta {options.theta:g}, {options.steps} pairs of steps on "
          f"{options.device}")
    print(f"whole {all_of_them * 1e3:.1f} ms, dropping {fewer * 1e3:.1f} ms a step: {1 - fewer / all_of_them:.1%} less")
    mean = sum(ran) / options.steps
    print(f"blocks that ran: {mean:.2f} of {layers}, {1 - mean / layers:.1%} less; formula: "
          f"{1 - expected_blocks(layers, options.theta) / layers:.1%}")


if __name__ == "__main__":
    main()
