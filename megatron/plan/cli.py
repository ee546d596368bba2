"""`python -m megatron.plan FLAGS...` and `pretrain_gpt2.py --dry-run`: memory, traffic and time of a run before it
starts, as a table, as JSON, and as a summary of what the run needs and what prevents it.

Nothing is built; torch is imported when the flags are right, for the shapes of the model's parameters. The summary
compares with this machine (memory, free space of the NVMe folders); it only warns, because a plan may be for another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from data.cli import StrictArgumentParser, normalize_flag_names
from megatron import host_memory
from megatron.config.cli import parse_args
from megatron.config.cli_help import command_parser, require_positive
from megatron.config.tree import Config, OffloadConfig, flag_name, require, unused_settings
from megatron.errors import ConfigError
from megatron.plan.alternatives import (PlanChoice, all_choices, cheapest_fit, describe_suggestions, format_bytes,
                                        largest_micro_batches, plan_rows)
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import USABLE_FRACTION, peak_memory, persistent_memory
from megatron.plan.roofline import (EXCHANGE_SHARE, KNOWN_GPUS, NETWORK_GBS, PARTS, MachineRates, known_rates,
                                    measured_rates, step_time)
from megatron.train.flops import flops_per_token

# GB of well-known cards: V100 and T4, RTX 4090 and L4, V100 and RTX 5090, A100, A100 and H100, H200.
CARD_SIZES_GB = (16.0, 24.0, 32.0, 40.0, 80.0, 141.0)

RANKS_PER_NODE = 8

# Tokenizers whose size is known without their files.
VOCABULARIES = {"GPT2BPETokenizer": 50257, "ByteLevelTokenizer": 257}

EXAMPLES = """examples:
  python -m megatron.plan --preset 1.5B --bf16 --batch-size 8 --ranks 8 --zero-stage 2
  python -m megatron.plan --preset 100B --fp16 --ranks 400 --model-parallel-size 16 --batch-size 32 --zero-stage 2 \\
      --checkpoint-activations --partition-activations --ranks-per-node 16 --tflops 38
  python -m megatron.plan --deepspeed_config ds_config.json --preset 10B --ranks 1 --card-gb 32 --json
  python -m megatron.plan --preset small --device cpu --ranks 2 --vocab-size 8192 --time
  python -m megatron.plan --preset 1.5B --bf16 --ranks 8 --zero-stage 2 --time H100

Every flag of pretrain_gpt2.py is a training flag; its --help lists them. docs/plan.md explains the columns."""

MODULE = "python -m megatron.plan"
THIS_MACHINE = "here"


def num_visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def parse(argv: Sequence[str], ranks: int = 1) -> tuple[argparse.Namespace, PlannedRun]:
    parser = _parser(ranks)
    options, flags = parser.parse_known_args(normalize_flag_names(argv))
    require_positive(options, "ranks", "ranks_per_node", "tflops", "network_gbs")
    require(min(options.card_gb) > 0, f"--card-gb is {min(options.card_gb):g}: expected more than 0")
    config = parse_args(flags, options.ranks, other_options=parser.flag_names())
    config.check_world(options.ranks)
    if options.device is None:
        options.device = "cpu" if options.time == THIS_MACHINE and not num_visible_gpus() else "cuda"
    require(options.time in (None, THIS_MACHINE) or options.device == "cuda",
            f"--time {options.time} is a GPU, and --device is cpu: give --time alone, which measures this machine")
    return options, PlannedRun(with_vocabulary(config), options.ranks, options.device)


def _parser(ranks: int) -> StrictArgumentParser:
    parser = command_parser(MODULE, "The memory, the traffic and the time of a training run, before it starts.",
                            EXAMPLES, usage="%(prog)s [options] TRAINING FLAGS...")
    parser.add_argument("--ranks", type=int, default=ranks, metavar="N",
                        help=f"ranks of the run ({ranks}); none is started")
    parser.add_argument("--ranks-per-node", type=int, metavar="N",
                        help=f"ranks that share a host ({RANKS_PER_NODE}, or all of them)")
    parser.add_argument("--card-gb", type=float, nargs="+", default=CARD_SIZES_GB, metavar="X",
                        help=f"memory of the cards to compare with ({' '.join(f'{card:g}' for card in CARD_SIZES_GB)})")
    parser.add_argument("--device", choices=("cuda", "cpu"),
                        help="where the run is to be (cuda; where it is timed, cpu if there is no GPU here)")
    parser.add_argument("--tflops", type=float, metavar="X",
                        help="TFLOP/s of a rank, as training reports them: adds the time of a step and of the run")
    parser.add_argument("--time", nargs="?", const=THIS_MACHINE, metavar="GPU",
                        help="predict the time of a step, from rates of this machine, which are measured in about 10 "
                             f"s, or of a known GPU: {', '.join(KNOWN_GPUS)}")
    parser.add_argument("--network-gbs", type=float, default=NETWORK_GBS, metavar="X",
                        help=f"with --time: GB/s of the network card of each rank, between nodes ({NETWORK_GBS:g}: "
                             "InfiniBand of 400 Gb/s); within a node NVLink or PCIe of the GPU, or what is measured")
    parser.add_argument("--json", action="store_true", help="print the same numbers and more as JSON, in bytes")
    return parser


def with_vocabulary(config: Config) -> Config:
    """The config with vocab_size set, from the tokenizer if it is not given."""
    if config.model.vocab_size is not None:
        return config
    kind = config.data.tokenizer_type or "GPT2BPETokenizer"
    if config.data.vocab_file is None and kind in VOCABULARIES:
        return replace(config, model=replace(config.model, vocab_size=VOCABULARIES[kind]))
    from megatron.train import build  # imports torch

    return build.with_vocab_size(config, build.tokenizer(config))


def print_plan(argv: Sequence[str], ranks: int = 1, ranks_per_node: int = RANKS_PER_NODE, *,
               summary: bool = False) -> int:
    """Print the plan of these flags; options among them take precedence over the other arguments. `summary` starts with
    the needs of the requested run."""
    options, requested = parse(argv, ranks)
    on_node = min(options.ranks_per_node or ranks_per_node, options.ranks)
    rates = None
    if options.time == THIS_MACHINE:
        rates = measured_rates(requested, on_node)
    elif options.time:
        rates = known_rates(options.time, requested.config)
    if rates:
        rates = replace(rates, network=EXCHANGE_SHARE * options.network_gbs * 1e9, ranks_per_node=on_node)
    cards = {f"{card:g}": card * 2**30 * USABLE_FRACTION for card in options.card_gb}
    machine = TargetMachine(cards, on_node, options.tflops, rates)
    report = build_report(requested, machine)
    if options.json:
        print(json.dumps(report, indent=1))
        return 0
    lines = [*(describe_requirements(requested, machine) if summary else ()), *format_table(requested, machine, report)]
    if requested.config.precision.fp8:
        lines.append("note: the temporary copies of --fp8 are not planned (5 to 26 % of the peak, with --fp8-head "
                     "most)")
    if rates:
        lines += [*format_forecast(requested, rates, report["rows"]), *format_exchange(requested, rates)]
    print("\n".join(lines))
    return 0


def main() -> int:
    return print_plan(sys.argv[1:])


# ---- the report ------------------------------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class TargetMachine:
    cards: Mapping[str, float]  # GB of a card -> bytes of it that tensors may take
    ranks_per_node: int
    tflops: float | None = None  # TFLOP/s of a rank, as training reports it; None: unknown
    rates: MachineRates | None = None  # every row then has the time of a step


def build_report(requested: PlannedRun, machine: TargetMachine) -> dict[str, Any]:
    """Everything the table says, in bytes."""
    from megatron.model import count_parameters  # imports torch

    choices, (rows, left_out) = all_choices(requested), plan_rows(requested)
    return {"ranks": requested.ranks, "ranks_per_node": machine.ranks_per_node,
            "tensor_parallel": requested.tp, "data_parallel": requested.dp,
            "accumulation": requested.accumulation, "parameters": count_parameters(requested.config.model)[0],
            "rows": [_row_record(run, requested, machine) for run in rows],
            "left_out": [{"stage": stage, "offload": str(placement), "why": why}
                         for stage, placement, why in left_out],
            "cheapest": {card: _choice_record(cheapest_fit(choices, capacity))
                         for card, capacity in machine.cards.items()},
            "smallest": _choice_record(min(choices, key=lambda choice: choice.device_bytes)),
            "time": _time_record(requested, machine.tflops), "config": requested.config.as_dict()}


def _row_record(run: PlannedRun, requested: PlannedRun, machine: TargetMachine) -> dict[str, Any]:
    lasting, peak, traffic = persistent_memory(run), peak_memory(run), run.traffic()
    largest = largest_micro_batches(run, machine.cards.values())
    # no rate of a drive is known
    step = None if machine.rates is None or run.nvme_bytes else step_time(run, machine.rates)
    on_node = peak.total if run.device == "cpu" else run.offloaded_host_bytes
    return {"stage": run.config.zero.zero_stage, "offload": str(run.placement), "chosen": run == requested,
            "lasting": {"parameters": lasting.parameters, "gradients": lasting.gradients,
                        "optimizer": lasting.optimizer, "total": lasting.total},
            "peak": {"moment": peak.name, "total": peak.total, **{kind: getattr(peak, kind) for kind in KINDS}},
            "device": peak.total, "host": run.offloaded_host_bytes, "nvme": run.nvme_bytes,
            "node_host": on_node * machine.ranks_per_node, "node_nvme": run.nvme_bytes * machine.ranks_per_node,
            **({} if step is None else {"step": step.as_dict(), "collectives": [
                {**asdict(one), "sent": one.of.sent} for one in step.collectives]}),
            **{f"sent_{purpose}": traffic[purpose] for purpose in ("gradients", "parameters", "matrices")},
            "cards": {card: {"fits": peak.total <= capacity, "largest_micro_batch": count}
                      for (card, capacity), count in zip(machine.cards.items(), largest, strict=True)}}


def _choice_record(choice: PlanChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {"flags": choice.flags, "device": choice.device_bytes, "slower_percent": choice.slowdown_percent}


def _time_record(run: PlannedRun, tflops: float | None) -> dict[str, float]:
    """Work of a step, and its time at that many TFLOP/s per rank: means over the run."""
    tokens = run.config.global_batch_size(run.dp) * run.config.seq_length
    flops = tokens * flops_per_token(run.config.model, run.config.seq_length, run.mean_active_blocks)
    record = {"tokens_per_step": float(tokens), "flops_per_step": flops}
    if tflops is not None:
        seconds = flops / (tflops * 1e12 * run.ranks)
        record |= {"seconds_per_step": seconds, "tokens_per_second": tokens / seconds,
                   "days": seconds * run.config.train.train_iters / SECONDS_PER_DAY}
    return record


def format_table(requested: PlannedRun, machine: TargetMachine, report: dict[str, Any]) -> Iterator[str]:
    """`report` is that of build_report."""
    yield _recommend(machine, report)
    yield from _describe_run(requested, machine, report)
    unit, name = unit_for(max(row["peak"]["total"] for row in report["rows"]))
    yield from ("", f"{name}: lasting state and peak of a rank; host memory and NVMe of a node; sent by a rank a step")
    cells = [_memory_cells(row, unit) for row in report["rows"]]
    yield from align_columns([MEMORY_HEAD, *_fold_equal_rows(cells)], left=(0, 1, 9))
    places: dict[tuple[int, str], list[str]] = {}
    for row in report["left_out"]:
        places.setdefault((row["stage"], row["why"]), []).append(row["offload"])
    yield from (f"left out: {stage} {', '.join(offload)}: {why}" for (stage, why), offload in places.items())
    batch_size = requested.config.train.batch_size
    yield from ("", "largest --batch-size by GB of the card ("
                f"{1 - USABLE_FRACTION:.0%} left for libraries; -: none; <: below {batch_size})")
    cells = [[*row_label(row), *(f"{'<' * (count < batch_size)}{count}" if count else "-" for count in
                                 (entry["largest_micro_batch"] for entry in row["cards"].values()))]
             for row in report["rows"]]
    yield from align_columns([[*CARDS_HEAD, *machine.cards], *_fold_equal_rows(cells)], left=(0, 1))


def _recommend(machine: TargetMachine, report: dict[str, Any]) -> str:
    """The cheapest flags that fit, for each size of card."""
    cards, choices, parts = sorted(machine.cards, key=float), report["cheapest"], []
    for choice, group in groupby(cards, key=choices.get):
        first, *others = group
        size = f"{first} GB" if not others else (
            f"{first} GB or more" if others[-1] == cards[-1] else f"{first} to {others[-1]} GB")
        parts.append(f"{choice['flags']} on {size}" if choice else
                     f"nothing on {size} at this --batch-size and --model-parallel-size, the least is "
                     f"{format_bytes(report['smallest']['device'])}")
    return f"recommended: {'; '.join(parts)}"


def _fold_equal_rows(rows: Sequence[list[str]]) -> list[list[str]]:
    """Neighbours of one offload and the same numbers are one row, of both stages."""
    folded: list[list[str]] = []
    for row in rows:
        if folded and folded[-1][1:] == row[1:]:
            mark = "*" if "*" in folded[-1][0] + row[0] else " "
            folded[-1][0] = f"{mark} {folded[-1][0][2:]},{row[0][2:]}"
        else:
            folded.append(list(row))
    return folded


def unit_for(largest: int) -> tuple[int, str]:
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


CARDS_HEAD = ["  zero", "offload"]
MEMORY_HEAD = [*CARDS_HEAD, "weights", "grads", "optim", "sum", "activ", "buffers", "peak", "moment", "host", "nvme",
               "sent"]


def _describe_run(requested: PlannedRun, machine: TargetMachine, report: dict[str, Any]) -> Iterator[str]:
    config, steps = requested.config, requested.accumulation
    ranks = f"{requested.ranks} rank{'s' * (requested.ranks > 1)}, {machine.ranks_per_node} per node"
    yield (f"{report['parameters']:,} parameters in {config.precision.name} on {ranks}: tensor parallel "
           f"{requested.tp}, data parallel {requested.dp}")
    recomputed, chunk = "nothing recomputed", requested.activations.chunk
    if config.recompute.is_selective:
        recomputed = "what is cheap in a block recomputed"
    if chunk is not None:
        parts = requested.tp if config.recompute.partition_activations else requested.sequence_shards
        split = f"split over {parts} ranks" if parts > 1 else "kept whole"
        recomputed = (f"{'every block' if chunk == 1 else f'every {chunk} blocks'} recomputed from an input {split} on "
                      f"the {'host' if requested.activations.inputs_are_on_host else 'device'}")
    yield (f"{steps} micro-batch{'es' * (steps > 1)} of {config.train.batch_size} x {config.seq_length} tokens per "
           f"step; {recomputed}")
    if requested.config.layer_drop.progressive_layer_drop:
        yield (f"{requested.mean_active_blocks:.1f} of {requested.num_layers} blocks run in a step, on average over "
               f"{config.train.train_iters} steps; memory is that of the first step, which runs all")
    time = report["time"]
    if "days" in time:
        yield (f"at {machine.tflops:g} TFLOP/s per rank: {time['seconds_per_step']:.3g} s per step, "
               f"{time['tokens_per_second']:,.0f} tokens/s, {time['days']:.3g} days for "
               f"{config.train.train_iters} steps")


def format_forecast(requested: PlannedRun, rates: MachineRates, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """`rows`: of build_report."""
    yield from ("", f"predicted ms of a step, by the rates of {rates.machine}"
                + (f", measured with {rates.ranks} rank{'s' * (rates.ranks > 1)}" if rates.ranks else ""))
    tokens = requested.config.global_batch_size(requested.dp) * requested.config.seq_length
    cells = [[*row_label(row), *(f"{1e3 * row['step'][part]:.4g}" for part in PARTS),
              f"{tokens / row['step']['total']:,.0f}"] for row in rows if "step" in row]
    yield from align_columns([[*CARDS_HEAD, *PARTS, "tokens/s"], *cells], left=(0, 1))
    config = requested.config
    not_predicted = [what for what, is_used in (
        (f"what --optimizer {config.optim.optimizer} does otherwise than Adam",
         config.optim.optimizer not in ("adam", "adamw")),
        ("rows with state on a drive", any("step" not in row for row in rows)),
        ("--compile", config.train.compile), ("--fp8", config.precision.fp8),
        ("--quantize-training", config.quantize.quantize_training),
        ("--memory-centric-tiled-linear", config.model.memory_centric_tiled_linear)) if is_used]
    if not_predicted:
        yield f"note: not in the predicted time: {', '.join(not_predicted)}"
    if 0 < rates.ranks < requested.ranks:
        yield (f"note: {requested.ranks} ranks are predicted to work and to exchange as fast as the {rates.ranks} that "
               "were measured on one machine")


EXCHANGE_HEAD = ["  of", "units", "collective", "ranks", "nodes", "calls", "MB", "latency", "transfer", "hidden"]


def format_exchange(requested: PlannedRun, rates: MachineRates) -> Iterator[str]:
    """The collectives of the requested run."""
    step = step_time(requested, rates)
    if not step.collectives:
        return
    yield from ("", f"predicted ms of its collectives: {rates.exchange / 1e9:.3g} GB/s of a rank within a node"
                + (f", {rates.network / 1e9:.3g} between nodes" if requested.ranks > rates.ranks_per_node else ""))
    rows = [[f"  {one.of.purpose}", one.of.units, one.of.kind, f"{one.of.size}", f"{one.nodes}", f"{one.of.calls:.0f}",
             f"{one.of.sent / 1e6:.1f}", *(f"{1e3 * part:.4g}" for part in (one.latency, one.transfer, one.hidden))]
            for one in step.collectives]
    yield from align_columns([EXCHANGE_HEAD, *rows], left=(0, 1, 2))
    exposed, size = f"not hidden: {1e3 * (step.exchange - step.hidden):.4g}", rates.ranks_per_node // requested.tp
    if 1 < size < requested.dp == requested.num_shards:
        with suppress(ConfigError):  # another flag excludes it
            zero = replace(requested.config.zero, zero_shard_group_size=size)
            step = step_time(replace(requested, config=replace(requested.config, zero=zero)), rates)
            exposed += f"; with --zero-shard-group-size {size}: {1e3 * (step.exchange - step.hidden):.4g}"
    yield exposed


def _memory_cells(row: dict[str, Any], unit: int) -> list[str]:
    peak = row["peak"]
    counts = [*row["lasting"].values(), peak["activations"], peak["buffers"], peak["total"]]
    ends = [row["node_host"], row["node_nvme"], row["sent_gradients"] + row["sent_parameters"] + row["sent_matrices"]]
    return [*row_label(row), *(format_number(count / unit) for count in counts), peak["moment"],
            *(format_number(count / unit) for count in ends)]


def row_label(row: dict[str, Any]) -> list[str]:
    return [f"{'*' if row['chosen'] else ' '} {row['stage']}", row["offload"]]


def format_number(value: float) -> str:
    """Enough digits to tell rows apart, in at most six places up to a million."""
    return f"{value:.2f}" if value < 999.995 else f"{value:.0f}"


def align_columns(lines: Sequence[Sequence[str]], left: Container[int]) -> Iterator[str]:
    """Columns two spaces apart, aligned to the right, or to the left for the indices in `left`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) if number in left else cell.rjust(width)
                        for number, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()


# The device of a plan is the flag's, never the one of this machine.
_DEVICE_NOTE = {"cuda": "planned for GPUs, whether or not there are any here; --device cpu plans for the CPU",
                "cpu": "planned for the CPU; without --device cpu: for GPUs"}


def describe_requirements(requested: PlannedRun, machine: TargetMachine) -> Iterator[str]:
    """The last line is empty."""
    yield _DEVICE_NOTE[requested.device]
    peak, on_host, on_drive = peak_memory(requested), requested.offloaded_host_bytes, requested.nvme_bytes
    unit, name = unit_for(max(peak.total, on_host, on_drive))
    rows = [[f"  {place}", *(format_number(by_kind.get(kind, 0) / unit) for kind in KINDS), format_number(total / unit)]
            for place, by_kind, total in (("device", asdict(peak), peak.total),
                                          ("host", requested.host_by_kind, on_host),
                                          ("nvme", requested.nvme_by_kind, on_drive)) if total]
    yield f"{name} that a rank needs, on the device at its fullest moment ({peak.name})"
    yield from align_columns([["", *KINDS, "sum"], *rows], left=(0,))
    on_node = machine.ranks_per_node
    host, nvme = (peak.total if requested.device == "cpu" else on_host) * on_node, on_drive * on_node
    both = " and ".join(f"{format_bytes(count)} of {what}"
                        for count, what in ((host, "host memory"), (nvme, "NVMe")) if count)
    if both:
        yield f"a node of {on_node} rank{'s' * (on_node > 1)} needs {both}"
    if not machine.tflops:
        yield "with --tflops X: the time of a step and of the run"
    yield from (f"problem: {sentence}" for sentence in find_problems(requested, machine, host, nvme))
    yield from (requested.config.key_names.translate(f"note: {line}") for line in
                unused_settings(requested.config, [item.name for item in fields(OffloadConfig)], ()))
    yield ""


def find_problems(requested: PlannedRun, machine: TargetMachine, host: int, nvme: int) -> Iterator[str]:
    """`host`, `nvme`: what a node needs."""
    small = [card for card, capacity in machine.cards.items() if peak_memory(requested).total > capacity]
    if requested.device == "cuda" and small:
        suggestions = describe_suggestions(requested)
        yield f"a card of {', '.join(small)} GB is too small" + (f"; try {suggestions}" if suggestions else "")
    memory = host_memory.total_bytes()
    if memory is not None and host > memory:
        yield (f"a node needs {format_bytes(host)} of memory, and {host_memory.describe_owner('this machine')} has "
               f"{format_bytes(memory)}")
    flags_of_folder: dict[str, list[str]] = {}
    for place, name in ((requested.offload_placement.optimizer, "offload_optimizer_nvme_path"),
                        (requested.offload_placement.params, "offload_param_nvme_path")):
        path = getattr(requested.config.offload, name)
        if place == "nvme" and path:
            flags_of_folder.setdefault(path, []).append(flag_name(name))
    for folder, flags in flags_of_folder.items():
        if not Path(folder).is_dir():
            named = requested.config.key_names.translate(f"{' and '.join(flags)} {folder}")
            yield f"{named}: there is no such folder on this machine; the run needs it"
        path = Path(folder).absolute()
        free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
        if nvme > free:
            yield f"a node needs {format_bytes(nvme)} of NVMe, and {folder} has {format_bytes(free)} free"
