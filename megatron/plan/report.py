"""A plan as records, in bytes: memory, traffic and time of every row, and what is cheapest. Not here: the words
(table.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.plan.cheapest import PlanChoice, all_choices, cheapest_fit, forbidden_rows, plan_rows
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import peak_memory, persistent_memory
from megatron.plan.rates import MachineRates
from megatron.plan.remedies import largest_micro_batches
from megatron.plan.time import step_time
from megatron.train.flops import flops_per_token

USABLE_FRACTION = 0.92
"""Share of a card that tensors may take; the rest is for the CUDA context, NCCL, work space and fragmentation."""

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class TargetMachine:
    """What the plan is to be compared with."""

    cards: Sequence[float]
    """Memory of cards in GB (of 2**30 bytes)."""
    ranks_per_node: int
    tflops: float | None = None
    """What a rank does in a second, as training reports it; None: not known."""
    rates: MachineRates | None = None
    """Those of a machine that was measured: every row then has the time of a step."""

    def usable_bytes(self) -> list[float]:
        return [card * 2**30 * USABLE_FRACTION for card in self.cards]


def build_report(requested: PlannedRun, machine: TargetMachine) -> dict[str, Any]:
    """Everything the table says, in bytes."""
    found = all_choices(requested)
    return {
        "ranks": requested.ranks, "ranks_per_node": machine.ranks_per_node, "tensor_parallel": requested.tp,
        "data_parallel": requested.dp, "accumulation": requested.accumulation,
        "parameters": requested.config.model.parameters(),
        "rows": [_row_record(run, requested, machine) for run in plan_rows(requested)
                 ], "left_out": [{"stage": stage, "offload": str(homes), "why": why}
                                 for stage, homes, why in forbidden_rows(requested)], "cheapest": {
                                     f"{card:g}": _choice_record(cheapest_fit(found, capacity))
                                     for card, capacity in zip(machine.cards, machine.usable_bytes(), strict=True)
                                 }, "smallest": _choice_record(min(found, key=lambda choice: choice.device_bytes)),
        "time": _time_record(requested, machine.tflops), "config": settings_by_section(requested)
    }


def settings_by_section(requested: PlannedRun) -> dict[str, Any]:
    """The configuration by section, with the homes that a plan keeps apart from it."""
    tree = requested.config.as_dict()
    tree["offload"] |= {
        "offload_optimizer_device": requested.placement.optimizer, "offload_param_device": requested.placement.params
    }
    return tree


def _row_record(run: PlannedRun, requested: PlannedRun, machine: TargetMachine) -> dict[str, Any]:
    lasts, fullest, traffic, offloaded = persistent_memory(run), peak_memory(run), run.traffic(), run.offloaded_bytes
    largest = largest_micro_batches(run, machine.usable_bytes())
    on_node = fullest.total if run.device == "cpu" else offloaded.host
    return {
        "stage": run.config.zero.zero_stage, "offload": str(run.placement), "chosen": run == requested,
        "lasting": {**_select(asdict(lasts), "parameters", "gradients", "optimizer"), "total": lasts.total}, "peak": {
                        "moment": fullest.name, "total": fullest.total,
                        **_select(asdict(fullest), "parameters", "gradients", "optimizer", "activations", "buffers")
                    }, "device": fullest.total, "host": offloaded.host, "nvme": offloaded.nvme,
        "node_host": on_node * machine.ranks_per_node,
        "node_nvme": offloaded.nvme * machine.ranks_per_node, **({} if machine.rates is None else {
                                                                     "step": step_time(run, machine.rates).as_dict()
                                                                 }), "sent_gradients": traffic.gradients,
        "sent_parameters": traffic.parameters, "sent_matrices": traffic.matrices, "cards": {
            f"{card:g}": {"fits": fullest.total <= capacity, "largest_micro_batch": count}
            for card, capacity, count in zip(machine.cards, machine.usable_bytes(), largest, strict=True)
        }
    }


def _select(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _choice_record(choice: PlanChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {"flags": choice.flags, "device": choice.device_bytes, "slower_percent": choice.slowdown_percent}


def _time_record(run: PlannedRun, tflops: float | None) -> dict[str, float]:
    """Work of a step, and how long it takes at so many TFLOP/s a rank: means over the run."""
    train = run.config.train
    tokens = run.config.global_batch_size(run.dp) * run.config.seq_length
    flops = tokens * flops_per_token(run.config.model, run.config.seq_length, run.mean_active_blocks)
    found = {"tokens_per_step": float(tokens), "flops_per_step": flops}
    if tflops is not None:
        seconds = flops / (tflops * 1e12 * run.ranks)
        found |= {"seconds_per_step": seconds, "tokens_per_second": tokens / seconds,
                  "days": seconds * train.train_iters / SECONDS_PER_DAY}
    return found
