"""The time of a step by a roofline: matrix products, memory traffic and exchange between ranks, each at one rate.

The rates of this machine are measured in about 10 seconds by as many ranks as share it; those of known GPUs are in a
table. Latencies complete them: the seconds of an operation, of a collective, and of each link that it passes. A
collective takes alpha + bytes / beta: its latency, and its bytes at the rate of the slowest link. Not predicted: NVMe
drives, optimizers other than Adam and `--compile`.

`python -m megatron.plan.roofline FILE PRECISION MATMUL_PRECISION`, as every rank of a job, measures the rates.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from megatron.config.tree import Config, require
from megatron.distributed.exit_codes import run
from megatron.errors import PeerError
from megatron.launch.supervisor import die_with_parent
from megatron.plan.footprint import FP32, Collectives, PlannedRun
from megatron.train.flops import GPUS, peak_tflops


@dataclass(frozen=True)
class MachineRates:
    """Rates of one rank while the other ranks work as well."""

    machine: str
    device: str
    ranks: int  # ranks that were measured at the same time; exchange is known for two or more
    flops: float  # FLOP/s of matrix products
    memory: float  # bytes per second that elementwise operations read and write
    exchange: float  # bytes per second that a rank sends in a collective
    operation_seconds: float  # latency of an operation: the work of the host for it
    collective_seconds: float  # latency of a collective
    hop_seconds: float = 0.0  # what it takes longer for each link that it passes within a node
    node_hop_seconds: float = 6e-6  # and between nodes: a usual value of InfiniBand, not measured
    network: float = math.inf  # bytes per second that a rank sends to other nodes
    ranks_per_node: int = sys.maxsize


@dataclass(frozen=True)
class ElementPasses:
    """Reads and writes of a tensor by elementwise operations, (in the forward, in the backward). A CPU computes GELU,
    softmax and random numbers for the time of that many reads."""

    hidden: tuple[int, int]  # passes over [T, h] in a block: LayerNorm, bias, residual sums, copies
    mlp: tuple[int, int]  # passes over [T, f/t]: GELU
    dropout: tuple[int, int]  # passes over [T, h] for one dropout
    scores: tuple[int, int]  # passes over fp32 [s, s] matrices, by attention that is not fused
    logits: int  # passes over [T, V/t] in both directions


PASSES = {"cpu": ElementPasses((10, 20), (10, 12), (40, 3), (100, 15), 24),
          "cuda": ElementPasses((12, 22), (2, 3), (3, 3), (0, 0), 6)}
ATTENTION_BACKWARD = 2.5  # FLOPs of fused attention in its backward, by those of its forward: it recomputes the scores
# Operations of a block in both directions, and of its recomputation.
BLOCK_OPERATIONS, RECOMPUTE_OPERATIONS = 56, 110
# Operations of a micro-batch outside the blocks, of a unit's reduction and update, of a step.
PASS_OPERATIONS, UNIT_OPERATIONS, STEP_OPERATIONS = 140, 12, 60
UPDATE_BYTES = 28  # bytes of memory traffic of an Adam update by parameter: gradient, and three fp32 states in and out
HOST_MEMORY, PCIE = 20e9, 20e9  # bytes per second of an update on the host of GPUs, and of copies between both


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of collectives in one optimizer step."""

    of: Collectives
    nodes: int  # that a group is on
    latency: float  # of their launches, and of the way of the first byte through the group
    transfer: float  # at the rate of the slowest link
    hidden: float  # the part of both beside computation


PARTS = ("products", "memory", "latency", "optimizer", "exchange", "hidden", "total")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    products: float
    memory: float  # elementwise operations
    latency: float  # the host's work for operations, as far as the device waits for it
    optimizer: float
    collectives: Sequence[CollectiveTime]

    @property
    def exchange(self) -> float:
        return sum(one.latency + one.transfer for one in self.collectives)

    @property
    def hidden(self) -> float:
        """The part of `exchange` that overlaps computation."""
        return sum(one.hidden for one in self.collectives)

    @property
    def total(self) -> float:
        return self.products + self.memory + self.latency + self.optimizer + self.exchange - self.hidden

    def as_dict(self) -> dict[str, float]:
        return {part: getattr(self, part) for part in PARTS}


def step_time(planned: PlannedRun, rates: MachineRates) -> StepTime:
    acts, model, passes = planned.activations, planned.config.model, PASSES[planned.device]
    matrices = sum(slot.numel for slot in planned.block_parameters if len(slot.shape) == 2)
    scores = acts.tokens * planned.config.seq_length * model.num_attention_heads / planned.tp
    is_fused = not (planned.device == "cpu" and model.attention_dropout)
    # two products of the lower triangle of the scores; attention that is not fused computes all of it
    attention = (2 if is_fused else 4) * scores * model.hidden_size / model.num_attention_heads
    dropout = acts.residual_bytes if model.hidden_dropout else 0

    def block(backward: bool) -> tuple[float, float]:
        """(FLOPs, bytes of memory traffic) of a block in one direction."""
        flops = (4 if backward else 2) * acts.tokens * matrices + attention * (ATTENTION_BACKWARD if backward else 1)
        traffic: float = passes.hidden[backward] * acts.residual_bytes + passes.mlp[backward] * acts.mlp_bytes
        traffic += 2 * passes.dropout[backward] * dropout
        if not is_fused:
            traffic += passes.scores[backward] * scores * FP32
        if backward:
            traffic += 3 * matrices * planned.param_bytes  # their gradients are added to the bucket
        return flops, traffic

    recompute = planned.config.recompute
    directions = [False, True] + [False] * recompute.checkpoint_activations  # recomputation is another forward
    flops, traffic = (planned.mean_active_blocks * sum(column) for column in zip(*map(block, directions), strict=True))
    if recompute.is_selective:  # without the products, and mostly without attention
        attends = "core_attn" in recompute.recompute_modules or not is_fused
        flops -= planned.mean_active_blocks * (2 * acts.tokens * matrices + (0 if attends else attention))
    if acts.chunk is not None and not model.hidden_dropout:
        # the last product of a chunk is not recomputed: only a dropout behind it would need the output
        flops -= 2 * acts.tokens * model.hidden_size * model.ffn_size / planned.tp * acts.num_chunks
    flops += 6 * acts.tokens * model.hidden_size * planned.vocab_columns
    traffic += passes.logits * acts.tokens * planned.vocab_columns * planned.param_bytes + sum(passes.dropout) * dropout
    of_block = BLOCK_OPERATIONS + (RECOMPUTE_OPERATIONS if recompute.checkpoint_activations else 0)
    operations = (planned.accumulation * (of_block * planned.mean_active_blocks + PASS_OPERATIONS)
                  + UNIT_OPERATIONS * (planned.num_layers + 1) + STEP_OPERATIONS)
    products, memory = planned.accumulation * flops / rates.flops, planned.accumulation * traffic / rates.memory
    latency = operations * rates.operation_seconds
    if planned.device == "cuda":  # the host runs ahead of the device
        latency = max(0.0, latency - products - memory)
    return StepTime(products, memory, latency, _update(planned, rates),
                    _exchange(planned, rates, products + memory))


def _update(planned: PlannedRun, rates: MachineRates) -> float:
    """Offloaded state is updated by the host, or copied to the device and back."""
    if planned.state_is_updated_on_device:
        return planned.shard_numel * UPDATE_BYTES / rates.memory + 2 * planned.offloaded_optimizer_bytes / PCIE
    seconds = (planned.shard_numel - planned.offloaded_numel) * UPDATE_BYTES / rates.memory
    on_host = rates.memory if planned.device == "cpu" else HOST_MEMORY
    copied = 0 if planned.device == "cpu" else planned.grad_sum_bytes + planned.param_bytes
    return seconds + planned.offloaded_numel * (UPDATE_BYTES / on_host + copied / PCIE)


def _exchange(planned: PlannedRun, rates: MachineRates, compute: float) -> list[CollectiveTime]:
    """`compute`: seconds of computation in a step. Gradients are reduced in the backward, at stages 0 and 1 in that of
    the last micro-batch. Parameters are gathered in the first forward, at stage 3 in every pass."""
    forward, found = compute / (4 if planned.activations.chunk else 3), list[CollectiveTime]()
    policy, steps, backward = planned.policy, planned.accumulation, compute - forward
    # seconds of computation beside which a collective may run, by its purpose
    spare = {"gradients": backward / (1 if policy.grads_are_sharded else steps),
             "parameters": compute if policy.params_are_sharded else forward / steps}
    # collectives of a CPU take its cores from the computation
    overlaps = planned.device == "cuda" and planned.config.zero.overlap_comm
    for one in planned.collectives():
        per_node = min(one.size, max(1, rates.ranks_per_node // one.stride))
        nodes = -(-one.size // per_node)
        if one.kind == "all-reduce":  # a chain of the ranks of a node and a tree of nodes, there and back
            hops, node_hops = 2 * (per_node - 1), 2 * (nodes - 1).bit_length()
        else:  # a ring
            hops, node_hops = one.size - nodes, nodes - 1
        latency = one.calls * (rates.collective_seconds + hops * rates.hop_seconds + node_hops * rates.node_hop_seconds)
        transfer = one.sent / (rates.exchange if nodes == 1 else min(rates.exchange, per_node * rates.network))
        # what is left of the root is reduced last and gathered first
        hidden = min(latency + transfer, spare[one.purpose]) if overlaps and one.units == "blocks" else 0.0
        found.append(CollectiveTime(one, nodes, latency, transfer, hidden))
        if one.purpose == "gradients" and one.stride == planned.tp:  # within a shard group; those come first
            spare["gradients"] = max(spare["gradients"], latency + transfer)  # sums between replicas run beside these
            if policy.params_are_sharded:  # gathers run beside these, over the same links
                spare["parameters"] -= min(hidden, transfer)
    return found


# ---- the rates -----------------------------------------------------------------------------------------------------

KNOWN_GPUS = {name: peaks[2:] for name, peaks in GPUS.items() if peaks[2:]}
PRODUCTS_SHARE, MEMORY_SHARE, EXCHANGE_SHARE = 0.6, 0.75, 0.75  # shares of the peaks that training reaches
GPU_OPERATION_SECONDS, GPU_COLLECTIVE_SECONDS = 8e-6, 2e-5
NVLINK_SECONDS, NETWORK_GBS = 1.5e-6, 50.0  # of a hop, a usual value; InfiniBand of 400 Gb/s for each rank


def known_rates(gpu: str, config: Config) -> MachineRates:
    """Rates of a GPU by its data sheet; ConfigError if its name is not in the table."""
    import torch

    from megatron.train.compile import arithmetic_precision

    require(gpu in KNOWN_GPUS, f"--time {gpu}: expected one of {', '.join(KNOWN_GPUS)}, or no value for this machine")
    memory, links = KNOWN_GPUS[gpu]
    peak = peak_tflops(gpu, arithmetic_precision(config, torch.device("cuda"))) or 0.0
    return MachineRates(gpu, "cuda", 0, PRODUCTS_SHARE * peak * 1e12, MEMORY_SHARE * memory * 1e9,
                        EXCHANGE_SHARE * links * 1e9, GPU_OPERATION_SECONDS, GPU_COLLECTIVE_SECONDS, NVLINK_SECONDS)


def measured_rates(planned: PlannedRun, ranks_per_node: int | None = None) -> MachineRates:
    """The rates of this machine with as many ranks as a node of the run has and as this machine serves."""
    import torch

    from megatron.train.compile import matmul_precision

    devices = torch.cuda.device_count() if planned.device == "cuda" else len(os.sched_getaffinity(0))
    require(devices > 0, "the run is planned for GPUs, and this machine has none that may be used: give --time and the "
            f"name of a GPU ({', '.join(KNOWN_GPUS)}), or --device cpu")
    ranks, precision = min(ranks_per_node or planned.ranks, planned.ranks, devices), planned.config.precision.name
    require(planned.ranks == 1 or ranks > 1, f"the run has {planned.ranks} ranks, and this machine serves one, so that "
            "no exchange can be measured: give --time and the name of a GPU, or plan on a machine with more")
    print(f"measuring this machine with {ranks} rank{'s' * (ranks > 1)} in {precision}, about 10 s", file=sys.stderr,
          flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rates.json"
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "megatron.launch",
                   "--nproc-per-node", str(ranks), "-m", "megatron.plan.roofline", str(file), precision,
                   matmul_precision(planned.config, torch.device(planned.device))]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if planned.device == "cpu" else {})
        ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False, capture_output=True,
                               text=True, errors="replace", preexec_fn=die_with_parent())
        if ended.returncode or not file.exists():
            raise PeerError(f"measuring this machine ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")
        return MachineRates(**json.loads(file.read_text(encoding="utf-8")))


SECONDS = 1.2  # seconds of one measurement


def measure(precision: str) -> MachineRates:
    """The rates of this rank's machine, the same on all ranks: each is the median of the slowest rank."""
    import torch
    import torch.nn.functional as F

    from megatron.distributed import process_group
    from mpu import groups
    from mpu.collectives import all_gather_json, all_reduce_into, barrier

    device, world = process_group.device_for(process_group.read_environment()), groups.build().world
    on_gpu = device.type == "cuda"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def seconds(operation: Callable[[], object], calls: int = 1) -> float:
        """Of one operation, by samples of that many calls; all ranks take as many samples."""
        def sample() -> float:
            begin = time.perf_counter()
            for _ in range(calls):
                operation()
            if on_gpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - begin) / calls

        once = [max(all_gather_json(sample(), world)) for _ in range(2)][-1]
        count = max(5, min(500, int(SECONDS / (once * calls))))
        barrier(world)
        return float(max(all_gather_json(median(sample() for _ in range(count)), world)))

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    few, gain, shift = (tensor(*shape).requires_grad_() for shape in ((4, 64), (64,), (64,)))
    gradient = torch.ones_like(few)

    def small_operations() -> object:
        normed = F.layer_norm(few, (64,), gain, shift)
        return torch.autograd.grad(F.gelu(normed, approximate="tanh"), (few, gain, shift), gradient)

    rows, width = (8192, 4096) if on_gpu else (1024, 1024)
    x, weight, bias = tensor(rows, width), tensor(width, width), tensor(width)
    products = seconds(lambda: (F.linear(x, weight, bias), x @ weight, x.t() @ x[:, :width]))
    one, other, total = (torch.ones(1 << 26 if on_gpu else 1 << 24, device=device) for _ in range(3))
    memory = seconds(lambda: torch.add(one, other, out=total))
    operation = seconds(small_operations, 100) / 4  # two forward, two backward
    exchange = collective = 0.0
    if not world.is_solo:
        small, large = tensor(256), tensor((1 << 28 if on_gpu else 1 << 24) // dtype.itemsize)
        collective = seconds(lambda: all_reduce_into(small, world).wait(), 10)
        sent = 2 * large.nbytes * (world.size - 1) / world.size
        exchange = sent / seconds(lambda: all_reduce_into(large, world).wait())
    return MachineRates(torch.cuda.get_device_name(device) if on_gpu else "CPU", device.type, world.size,
                        6 * rows * width**2 / products, 3 * total.nbytes / memory, exchange, operation, collective)


def main(path: str, precision: str, matmul_precision: str) -> int:
    import torch

    from megatron.distributed import process_group
    from megatron.train.processor import keep_freed_memory

    env = process_group.init_process_group()
    if not torch.cuda.is_available():
        keep_freed_memory()
    torch.set_float32_matmul_precision(matmul_precision)
    rates = measure(precision)
    if env.rank == 0:
        Path(path).write_text(json.dumps(asdict(rates)), encoding="utf-8")
    process_group.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run(lambda: main(*sys.argv[1:]), is_job=True))
