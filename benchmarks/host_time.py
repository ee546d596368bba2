"""How long the host is busy with the engine in a micro-batch, for each layer: `python benchmarks/host_time.py`.

An accelerator works while the host prepares what comes next, as long as the host is faster. So what counts is processor
time of the host that is not the model's own. The model has blocks so small that its operations take next to nothing,
the engine goes the accelerator's way (mpu/device.py), and the other ranks are simulated: torch's fake backend answers
at once. Printed is the processor time of a forward and a backward with the engine less that of the bare model, the
smallest of some rounds, divided by the number of layers. It holds the time of torch's own Python around collectives.
Beside them torch's fully_shard, a block at a time, in the same way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import mpu.device  # noqa: E402
from megatron.config.tree import Config, build_config  # noqa: E402
from megatron.model import GPT2  # noqa: E402
from megatron.train import build  # noqa: E402
from mpu import groups  # noqa: E402


def config_of(layers: int, stage: int) -> Config:
    return build_config({"num_layers": layers, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64,
                         "max_position_embeddings": 8, "seq_length": 8, "batch_size": 1, "zero_stage": stage,
                         "stage3_param_persistence_threshold": 0, "attention_dropout": 0.0,
                         "hidden_dropout": 0.0})


def least(micro_batch: Callable[[], None], rounds: int) -> float:
    """Processor time of one, in ms."""
    for _ in range(3):
        micro_batch()
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        micro_batch()
        times.append(time.thread_time() - begin)
    return 1000 * min(times)


def bare(layers: int, rounds: int, prepare: Callable[[GPT2], object] = lambda model: None) -> float:
    """Of the model alone, or as `prepare` leaves it."""
    model = GPT2(config_of(layers, 0).model, groups.build().tp)
    prepare(model)
    tokens = torch.zeros(1, 8, dtype=torch.int64)

    def micro_batch() -> None:
        loss: Tensor = model(tokens, tokens)
        loss.mean().backward()

    return least(micro_batch, rounds)


def fully_sharded(model: GPT2) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def engine(layers: int, stage: int, rounds: int) -> float:
    config, grid = config_of(layers, stage), groups.build()
    core = build.engine(config, build.model(config, grid), grid, torch.device("cpu")).core
    core.forced_boundary = False  # a step would find that the simulated ranks did nothing
    tokens = torch.zeros(1, 8, dtype=torch.int64)

    def micro_batch() -> None:
        core.backward(core(tokens, tokens, grad_scale=core.backward_scale))
        core.step()

    return least(micro_batch, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 96])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    mpu.device.FORCE_ACCELERATOR_PATH = True
    dist.init_process_group("fake", rank=0, world_size=chosen.ranks, store=FakeStore())
    print("ms a layer\n| layers | bare model | stage 0 | stage 1 | stage 2 | stage 3 | fully_shard |")
    print("|---" * 7 + "|")
    for layers in chosen.layers:
        alone = bare(layers, chosen.rounds)
        others = [*(engine(layers, stage, chosen.rounds) for stage in range(4)),
                  bare(layers, chosen.rounds, fully_sharded)]
        row = [alone / layers, *((other - alone) / layers for other in others)]
        print(f"| {layers} | " + " | ".join(f"{ms:.3f}" for ms in row) + " |", flush=True)


if __name__ == "__main__":
    main()
