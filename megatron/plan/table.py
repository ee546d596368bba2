"""A plan for people: the records of report.py as aligned columns and one line for each card."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

from megatron.plan.footprint import PlannedRun
from megatron.plan.remedies import format_bytes
from megatron.plan.report import USABLE_FRACTION, TargetMachine


def format_table(requested: PlannedRun, machine: TargetMachine, found: dict[str, Any]) -> Iterator[str]:
    """`found`: the report."""
    yield from _describe_run(requested, machine, found)
    unit, name = unit_for(max(row["peak"]["total"] for row in found["rows"]))
    yield from ("", f"{name}: lasting state and peak of a rank; host memory and NVMe of a node; sent by a rank a step")
    yield from align_columns([MEMORY_HEAD, *(_memory_cells(row, unit) for row in found["rows"])], left=(0, 1, 9))
    yield from _describe_forbidden(found["left_out"])
    yield from ("", "largest --batch-size by GB of the card ("
                f"{1 - USABLE_FRACTION:.0%} left for libraries; -: none; <: below {requested.config.train.batch_size})")
    cards = [f"{card:g}" for card in machine.cards]
    yield from align_columns([CARDS_HEAD + cards, *(_card_cells(row, requested) for row in found["rows"])], left=(0, 1))
    yield from ("", "cheapest way to fit each card")
    yield from align_columns([[f"  {card} GB", _describe_choice(found["cheapest"][card], found["smallest"])]
                              for card in cards], left=(1,))


def unit_for(largest: int) -> tuple[int, str]:
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


CARDS_HEAD = ["  zero", "offload"]
MEMORY_HEAD = [*CARDS_HEAD, "weights", "grads", "optim", "sum", "activ", "buffers", "peak", "moment", "host", "nvme",
               "sent"]


def _describe_run(requested: PlannedRun, machine: TargetMachine, found: dict[str, Any]) -> Iterator[str]:
    config, steps = requested.config, requested.accumulation
    ranks = f"{requested.ranks} rank{'s' * (requested.ranks > 1)}, {machine.ranks_per_node} per node"
    yield (f"{found['parameters']:,} parameters in {config.precision.name} on {ranks}: tensor parallel {requested.tp}, "
           f"data parallel {requested.dp}")
    yield (f"{steps} micro-batch{'es' * (steps > 1)} of {config.train.batch_size} x {config.seq_length} tokens per "
           f"step; {_describe_recomputation(requested)}")
    if requested.config.layer_drop.progressive_layer_drop:
        yield (f"{requested.mean_active_blocks:.1f} of {requested.num_layers} blocks run in a step, on average over "
               f"{config.train.train_iters} steps; memory is that of the first step, which runs all")
    time = found["time"]
    if "days" in time:
        yield (f"at {machine.tflops:g} TFLOP/s per rank: {time['seconds_per_step']:.3g} s per step, "
               f"{time['tokens_per_second']:,.0f} tokens/s, {time['days']:.3g} days for "
               f"{config.train.train_iters} steps")


def _describe_recomputation(run: PlannedRun) -> str:
    if run.chunk is None:
        return "nothing recomputed"
    acts = run.activations
    blocks = "every block" if run.chunk == 1 else f"every {run.chunk} blocks"
    split = f"split over {run.tp} ranks" if run.config.recompute.partition_activations and run.tp > 1 else "kept whole"
    return f"{blocks} recomputed from an input {split} on the {'host' if acts.inputs_are_on_host else 'device'}"


def _describe_forbidden(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows that these settings forbid, by stage and reason."""
    for stage, why in dict.fromkeys((row["stage"], row["why"]) for row in rows):
        places = ", ".join(row["offload"] for row in rows if (row["stage"], row["why"]) == (stage, why))
        yield f"left out: {stage} {places}: {why}"


def _memory_cells(row: dict[str, Any], unit: int) -> list[str]:
    lasts, fullest = row["lasting"], row["peak"]
    counts = [*lasts.values(), fullest["activations"], fullest["buffers"], fullest["total"]]
    ends = [row["node_host"], row["node_nvme"], row["sent_gradients"] + row["sent_parameters"] + row["sent_matrices"]]
    return [*row_label(row), *(format_number(count / unit) for count in counts), fullest["moment"],
            *(format_number(count / unit) for count in ends)]


def _card_cells(row: dict[str, Any], requested: PlannedRun) -> list[str]:
    counts = [entry["largest_micro_batch"] for entry in row["cards"].values()]
    return [*row_label(row), *("-" if count == 0 else f"{'<' * (count < requested.config.train.batch_size)}{count}"
                               for count in counts)]


def row_label(row: dict[str, Any]) -> list[str]:
    return [f"{'*' if row['chosen'] else ' '} {row['stage']}", row["offload"]]


def _describe_choice(choice: dict[str, Any] | None, smallest: dict[str, Any]) -> str:
    if choice is None:
        return f"nothing at this --batch-size and --model-parallel-size: the least is {format_bytes(smallest['device'])}"
    flags: str = choice["flags"]
    return flags


def format_number(value: float) -> str:
    """Enough digits to tell rows apart, in at most six places up to a million."""
    return f"{value:.2f}" if value < 999.995 else f"{value:.0f}"


def align_columns(lines: Sequence[Sequence[str]], left: Container[int]) -> Iterator[str]:
    """Columns as wide as their widest cell, two blanks apart; numbers to the right, `left` columns of words not."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) if number in left else cell.rjust(width)
                        for number, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
