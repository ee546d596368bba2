"""Adam on the host, beside others and beside what memory allows: `python benchmarks/host_adam.py`.

    fp32    an fp32 gradient: reads it, master and moments, writes master and moments: 4 x 4 + 3 x 4 bytes a parameter
    bf16    a bf16 gradient, bf16 weights wanted: the same 3 x 8 bytes, and 2 + 2

Everybody updates the same weights, in turn; whose optimizer knows fp32 alone widens the gradients before it and narrows
the weights behind it. The *floor* moves the same bytes in the same mix by plain operations of torch with as many
threads: master and moments are multiplied by 1 in place; the gradient is added up (fp32), or copied to the narrow
weights (bf16). Reported are medians over the rounds: ns a parameter, the share of the floor (its time / the
contender's, of one round), and the time in units of ours.

DeepSpeedCPUAdam takes part where `import deepspeed` works and its extension can be built. It is no dependency; a folder
of its own, which borrows torch, will do:

    python -m venv ds && realpath .venv/lib/python3*/site-packages > $(echo ds/lib/python3*/site-packages)/torch.pth
    ds/bin/pip install wheel setuptools hjson py-cpuinfo psutil einops msgpack ninja
    DS_BUILD_OPS=0 ds/bin/pip install --no-build-isolation --no-deps deepspeed==0.18.4
    PATH=$PWD/ds/bin:$PATH ds/bin/python benchmarks/host_adam.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import Parameter  # noqa: E402

from megatron.optim.adam import AdamW  # noqa: E402
from megatron.optim.rule import StepScalars, UpdateSegment  # noqa: E402

BYTES = 28
HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PAUSE = 0.02
"""Seconds in which the threads of the one before go to sleep."""

Action = Callable[[], object]


@dataclass(frozen=True)
class Flats:
    """Weights and gradients, as many tensors of each."""

    masters: list[Tensor]
    grads: list[Tensor]
    """In fp32: what others widen into, where the gradients are 16 bit."""
    narrow_grads: list[Tensor]
    narrow: list[Tensor]

    @staticmethod
    def made(count: int, numel: int) -> Flats:
        grads = [torch.randn(numel).mul_(1e-3) for _ in range(count)]
        masters = [torch.randn(numel) for _ in range(count)]
        return Flats(masters, grads, [grad.bfloat16() for grad in grads], [master.bfloat16() for master in masters])


def floor(flats: Flats, is_narrow: bool) -> Action:
    moments = [torch.zeros_like(master) for master in flats.masters for _ in range(2)]

    def step() -> None:
        for flat in (*flats.masters, *moments):
            flat.mul_(1.0)
        for number, grad in enumerate(flats.grads):
            if is_narrow:
                flats.narrow[number].copy_(flats.narrow_grads[number])
            else:
                grad.sum()

    return step


def ours(flats: Flats, is_narrow: bool) -> Action:
    rule = AdamW()
    spans = [UpdateSegment(0, master, flats.narrow_grads[number] if is_narrow else flats.grads[number],
                           {name: torch.zeros_like(master) for name in rule.states}, (), 1, lambda sums: sums,
                           flats.narrow[number] if is_narrow else None) for number, master in enumerate(flats.masters)]
    return lambda: rule.step(spans, HYPER, StepScalars.for_applied_step(1.0, 10, torch.device("cpu")))


def around(optimizer: torch.optim.Optimizer, parameters: list[Parameter], flats: Flats, is_narrow: bool) -> Action:
    """An optimizer that knows fp32 alone."""
    for parameter, grad in zip(parameters, flats.grads, strict=True):
        parameter.grad = grad

    def step() -> None:
        if is_narrow:
            torch._foreach_copy_(flats.grads, flats.narrow_grads)
        optimizer.step()
        if is_narrow:
            torch._foreach_copy_(flats.narrow, flats.masters)

    return step


def torchs(flats: Flats, is_narrow: bool, **way: bool) -> Action:
    parameters = [Parameter(master) for master in flats.masters]
    return around(torch.optim.AdamW(parameters, **HYPER, **way), parameters, flats, is_narrow)


def deepspeeds(flats: Flats, is_narrow: bool) -> Action:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters = [Parameter(master) for master in flats.masters]
    return around(DeepSpeedCPUAdam(parameters, **HYPER), parameters, flats, is_narrow)


def contenders(flats: Flats, is_narrow: bool) -> dict[str, Action]:
    found = {"floor": floor(flats, is_narrow), "ours": ours(flats, is_narrow),
             "torch fused": torchs(flats, is_narrow, fused=True),
             "torch foreach": torchs(flats, is_narrow, foreach=True)}
    try:
        found["DeepSpeedCPUAdam"] = deepspeeds(flats, is_narrow)
    except Exception as error:  # it is not there, or what builds its extension is not
        print(f"without DeepSpeedCPUAdam: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    return found


def seconds(action: Action) -> float:
    time.sleep(PAUSE)
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def compare(count: int, numel: int, rounds: int) -> None:
    flats = Flats.made(count, numel)
    for kind in ("fp32", "bf16"):
        actions = contenders(flats, kind == "bf16")
        for action in actions.values():
            action()  # the first one makes its state
        times = [{name: seconds(action) for name, action in actions.items()} for _ in range(rounds)]
        for name in actions:
            took = statistics.median(row[name] for row in times) / (count * numel) * 1e9
            share = statistics.median(row["floor"] / row[name] for row in times)
            ratio = statistics.median(row[name] / row["ours"] for row in times)
            print(f"{kind}  {torch.get_num_threads()} thread(s)  {name:17s} {took:6.2f} ns  {BYTES / took:5.1f} GB/s  "
                  f"share of the floor {share:.2f}  x ours {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--numel", type=int, default=1 << 22, help="of a tensor")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") == str(args.threads[0]) and len(args.threads) == 1:
        compare(args.tensors, args.numel, args.rounds)
        return
    for threads in args.threads:  # an extension has an OpenMP of its own, which asks the environment only
        subprocess.run([sys.executable, __file__, f"--threads={threads}", f"--tensors={args.tensors}",
                        f"--numel={args.numel}", f"--rounds={args.rounds}"],
                       env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True)


if __name__ == "__main__":
    main()
