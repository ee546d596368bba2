"""A plan as records (`report`) and as text for people (`table`): memory, traffic and time of every row. Arithmetic and
words only; command.py reads the flags."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.config.tree import OFFLOAD_DEVICES
from megatron.plan.cheapest import Choice, cheapest, choices, rows
from megatron.plan.footprint import Run
from megatron.plan.memory import lasting, peak
from megatron.plan.remedies import largest_micro_batches, size
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

    def capacities(self) -> list[float]:
        return [card * 2**30 * USABLE for card in self.cards]


def report(asked: Run, machine: Machine) -> dict[str, Any]:
    """Everything the table says, in bytes."""
    found = choices(asked)
    return {
        "ranks": asked.ranks, "ranks_per_node": machine.ranks_per_node, "tensor_parallel": asked.tp,
        "data_parallel": asked.dp, "accumulation": asked.accumulation, "parameters": asked.config.model.parameters(),
        "rows": [_record(run, asked, machine) for run in rows(asked)],
        "cheapest": {f"{card:g}": _cheapest(cheapest(found, capacity))
                     for card, capacity in zip(machine.cards, machine.capacities(), strict=True)},
        "smallest": _cheapest(min(found, key=lambda choice: choice.needs)),
        "time": _time(asked, machine.tflops), "config": _config(asked)}


def _config(asked: Run) -> dict[str, Any]:
    tree = asked.config.as_dict()
    tree["offload"] |= {"offload_optimizer_device": asked.homes.optimizer, "offload_param_device": asked.homes.params}
    return tree


def _record(run: Run, asked: Run, machine: Machine) -> dict[str, Any]:
    lasts, fullest, traffic, away = lasting(run), peak(run), run.traffic(), run.elsewhere
    largest = largest_micro_batches(run, machine.capacities())
    on_node = fullest.total if run.device == "cpu" else away.host
    return {
        "stage": run.config.zero.zero_stage, "offload": str(run.homes), "chosen": run == asked,
        "supported": {run.homes.optimizer, run.homes.params} <= set(OFFLOAD_DEVICES),
        "lasting": {**_parts(asdict(lasts), "parameters", "gradients", "optimizer"), "total": lasts.total},
        "fullest": {"moment": fullest.name, "total": fullest.total,
                    **_parts(asdict(fullest), "parameters", "gradients", "optimizer", "activations", "buffers")},
        "device": fullest.total, "host": away.host, "nvme": away.nvme, "node_host": on_node * machine.ranks_per_node,
        "node_nvme": away.nvme * machine.ranks_per_node,
        "sent_gradients": traffic.gradients, "sent_parameters": traffic.parameters,
        "cards": {f"{card:g}": {"fits": fullest.total <= capacity, "largest_micro_batch": count}
                  for card, capacity, count in zip(machine.cards, machine.capacities(), largest, strict=True)}}


def _parts(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _cheapest(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {"flags": choice.flags, "device": choice.needs, "slower_percent": choice.cost,
            "supported": choice.is_available}


def _time(run: Run, tflops: float | None) -> dict[str, float]:
    """Work of a step, and how long it takes at so many TFLOP/s a rank."""
    train = run.config.train
    tokens = run.config.global_batch_size(run.dp) * run.config.seq_length
    flops = tokens * flops_per_token(run.config.model, run.config.seq_length)
    found = {"tokens_per_step": float(tokens), "flops_per_step": flops}
    if tflops is not None:
        seconds = flops / (tflops * 1e12 * run.ranks)
        found |= {"seconds_per_step": seconds, "tokens_per_second": tokens / seconds,
                  "days": seconds * train.train_iters / SECONDS_PER_DAY}
    return found


# ---- for people ---------------------------------------------------------------------------------------------------


def table(asked: Run, machine: Machine) -> Iterator[str]:
    found = report(asked, machine)
    yield from _run_in_words(asked, machine, found)
    unit, name = (2**30, "GiB") if max(row["fullest"]["total"] for row in found["rows"]) >= 2**30 else (2**20, "MiB")
    yield from ("", f"{name}: of one rank from step to step, and at its fullest moment; of one node; sent by a rank")
    yield from _aligned([MEMORY_HEAD, *(_memory_cells(row, unit) for row in found["rows"])], left=(0, 1, 9))
    yield from ("", "largest --batch-size on a card of so many GB ("
                f"{1 - USABLE:.0%} are left to libraries; <: less than the {asked.config.train.batch_size} asked for)")
    cards = [f"{card:g}" for card in machine.cards]
    yield from _aligned([CARDS_HEAD + cards, *(_card_cells(row, asked) for row in found["rows"])], left=(0, 1))
    yield from ("", "cheapest that fits")
    yield from _aligned([[f"  {card} GB", _cheapest_in_words(found["cheapest"][card], found["smallest"])]
                         for card in cards], left=(1,))
    if any(not row["supported"] for row in found["rows"]):
        yield "offloading is planned only: training refuses it in this version"


CARDS_HEAD = ["  zero", "offload"]
MEMORY_HEAD = [*CARDS_HEAD, "weights", "grads", "optim", "sum", "activ", "buffers", "fullest", "moment", "host", "nvme",
               "sent"]


def _run_in_words(asked: Run, machine: Machine, found: dict[str, Any]) -> Iterator[str]:
    config, steps = asked.config, asked.accumulation
    ranks = f"{asked.ranks} rank{'s' * (asked.ranks > 1)}, {machine.ranks_per_node} a node"
    yield (f"{found['parameters']:,} parameters in {config.precision.name} on {ranks}: tensor parallel {asked.tp}, "
           f"data parallel {asked.dp}")
    yield (f"{steps} micro-batch{'es' * (steps > 1)} of {config.train.batch_size} x {config.seq_length} tokens a step; "
           + _recomputation_in_words(asked))
    time = found["time"]
    if "days" in time:
        yield (f"at {machine.tflops:g} TFLOP/s a rank: {time['seconds_per_step']:.3g} s a step, "
               f"{time['tokens_per_second']:,.0f} tokens/s, {time['days']:.3g} days for "
               f"{config.train.train_iters} steps")


def _recomputation_in_words(run: Run) -> str:
    if run.chunk is None:
        return "nothing recomputed"
    acts = run.activations
    blocks = "every block" if run.chunk == 1 else f"every {run.chunk} blocks"
    split = f"split over {run.tp} ranks" if run.config.recompute.partition_activations and run.tp > 1 else "kept whole"
    return f"{blocks} recomputed from an input {split} on the {'host' if acts.waits_on_host else 'device'}"


def _memory_cells(row: dict[str, Any], unit: int) -> list[str]:
    lasts, fullest = row["lasting"], row["fullest"]
    counts = [*lasts.values(), fullest["activations"], fullest["buffers"], fullest["total"]]
    ends = [row["node_host"], row["node_nvme"], row["sent_gradients"] + row["sent_parameters"]]
    return [*_label(row), *(_number(count / unit) for count in counts), fullest["moment"],
            *(_number(count / unit) for count in ends)]


def _card_cells(row: dict[str, Any], asked: Run) -> list[str]:
    counts = [entry["largest_micro_batch"] for entry in row["cards"].values()]
    return [*_label(row), *("-" if count == 0 else f"{'<' * (count < asked.config.train.batch_size)}{count}"
                            for count in counts)]


def _label(row: dict[str, Any]) -> list[str]:
    return [f"{'*' if row['chosen'] else ' '} {row['stage']}", row["offload"]]


def _cheapest_in_words(choice: dict[str, Any] | None, smallest: dict[str, Any]) -> str:
    if choice is None:
        return f"nothing at this --batch-size and --model-parallel-size: the least is {size(smallest['device'])}"
    flags: str = choice["flags"]
    return flags + ("" if choice["supported"] else "   (not available yet)")


def _number(value: float) -> str:
    """Enough digits to tell rows apart, in at most six places up to a million."""
    return f"{value:.2f}" if value < 999.995 else f"{value:.0f}"


def _aligned(lines: Sequence[Sequence[str]], left: Container[int]) -> Iterator[str]:
    """Columns as wide as their widest cell, two blanks apart; numbers to the right, `left` columns of words not."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) if number in left else cell.rjust(width)
                        for number, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
