"""A plan as records, in bytes: memory, traffic and time of every row, and what is cheapest. Not here: the words
(table.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.plan.cheapest import Choice, cheapest, choices, left_out, rows
from megatron.plan.footprint import Run
from megatron.plan.memory import lasting, peak
from megatron.plan.rates import Rates
from megatron.plan.remedies import largest_micro_batches
from megatron.plan.time import step_time
from megatron.train.flops import flops_per_token

USABLE = 0.92
"""Share of a card that tensors may take; the rest is for the CUDA context, NCCL, work space and fragmentation."""

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Machine:
    """What the plan is to be compared with."""

    cards: Sequence[float]
    """Memory of cards in GB (of 2**30 bytes)."""
    ranks_per_node: int
    tflops: float | None = None
    """What a rank does in a second, as training reports it; None: not known."""
    rates: Rates | None = None
    """Those of a machine that was measured: every row then has the time of a step."""

    def capacities(self) -> list[float]:
        return [card * 2**30 * USABLE for card in self.cards]


def report(asked: Run, machine: Machine) -> dict[str, Any]:
    """Everything the table says, in bytes."""
    found = choices(asked)
    return {
        "ranks": asked.ranks, "ranks_per_node": machine.ranks_per_node, "tensor_parallel": asked.tp,
        "data_parallel": asked.dp, "accumulation": asked.accumulation, "parameters": asked.config.model.parameters(),
        "rows": [_record(run, asked, machine) for run in rows(asked)],
        "left_out": [{"stage": stage, "offload": str(homes), "why": why} for stage, homes, why in left_out(asked)],
        "cheapest": {f"{card:g}": _cheapest(cheapest(found, capacity))
                     for card, capacity in zip(machine.cards, machine.capacities(), strict=True)},
        "smallest": _cheapest(min(found, key=lambda choice: choice.needs)),
        "time": _time(asked, machine.tflops), "config": settings_of(asked)}


def settings_of(asked: Run) -> dict[str, Any]:
    """The configuration by section, with the homes that a plan keeps apart from it."""
    tree = asked.config.as_dict()
    tree["offload"] |= {"offload_optimizer_device": asked.homes.optimizer, "offload_param_device": asked.homes.params}
    return tree


def _record(run: Run, asked: Run, machine: Machine) -> dict[str, Any]:
    lasts, fullest, traffic, away = lasting(run), peak(run), run.traffic(), run.elsewhere
    largest = largest_micro_batches(run, machine.capacities())
    on_node = fullest.total if run.device == "cpu" else away.host
    return {
        "stage": run.config.zero.zero_stage, "offload": str(run.homes), "chosen": run == asked,
        "lasting": {**_parts(asdict(lasts), "parameters", "gradients", "optimizer"), "total": lasts.total},
        "peak": {"moment": fullest.name, "total": fullest.total,
                 **_parts(asdict(fullest), "parameters", "gradients", "optimizer", "activations", "buffers")},
        "device": fullest.total, "host": away.host, "nvme": away.nvme, "node_host": on_node * machine.ranks_per_node,
        "node_nvme": away.nvme * machine.ranks_per_node,
        **({} if machine.rates is None else {"step": step_time(run, machine.rates).as_dict()}),
        "sent_gradients": traffic.gradients, "sent_parameters": traffic.parameters,
        "sent_matrices": traffic.matrices,
        "cards": {f"{card:g}": {"fits": fullest.total <= capacity, "largest_micro_batch": count}
                  for card, capacity, count in zip(machine.cards, machine.capacities(), largest, strict=True)}}


def _parts(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _cheapest(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {"flags": choice.flags, "device": choice.needs, "slower_percent": choice.cost}


def _time(run: Run, tflops: float | None) -> dict[str, float]:
    """Work of a step, and how long it takes at so many TFLOP/s a rank: means over the run."""
    train = run.config.train
    tokens = run.config.global_batch_size(run.dp) * run.config.seq_length
    flops = tokens * flops_per_token(run.config.model, run.config.seq_length, run.running_blocks)
    found = {"tokens_per_step": float(tokens), "flops_per_step": flops}
    if tflops is not None:
        seconds = flops / (tflops * 1e12 * run.ranks)
        found |= {"seconds_per_step": seconds, "tokens_per_second": tokens / seconds,
                  "days": seconds * train.train_iters / SECONDS_PER_DAY}
    return found
