"""Will it fit? `python -m megatron.plan FLAGS...` takes the flags of a training run and prints what it would hold.

    --ranks N       so many ranks (default 1); none is started
    --card-gb X...  memory of the cards to compare with (default: 16 24 40 80 141)
    --device D      cuda (default) or cpu: which kernels, and so which activations
    --json          the same as JSON

One row for every ZeRO stage and home of the state, `*` before the one that is asked for. Nothing is built: no weights,
no GPU, no corpus; torch is imported only where a tokenizer file has to be read for the size of its vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from megatron.config.flags import parse_args
from megatron.config.tree import OFFLOAD_DEVICES, Config, require
from megatron.errors import ConfigError
from megatron.plan.footprint import OFFLOADS, Offload, Run
from megatron.plan.memory import peak
from megatron.plan.remedies import largest_micro_batch, with_stage

CARDS = (16.0, 24.0, 40.0, 80.0, 141.0)
"""GB of well-known cards: V100 and T4, RTX 4090 and L4, A100, A100 and H100, H200."""

USABLE = 0.92
"""Share of a card that tensors may take; the rest is for the CUDA context, NCCL, work space and fragmentation."""

VOCABULARIES = {"GPT2BPETokenizer": 50257, "ByteLevelTokenizer": 257}
"""Tokenizers whose size is known without their files."""


HEADS = {"parameters": "weights", "gradients": "grads", "optimizer": "optim", "activations": "activ",
         "buffers": "buffers", "device": "device", "host": "host"}
SHORT: dict[Offload, str] = {"none": "none", "optimizer": "optimizer", "optimizer+params": "+params"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m megatron.plan --help")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Run]:
    parser = _Parser(prog="python -m megatron.plan", allow_abbrev=False, usage="%(prog)s [options] TRAINING FLAGS...",
                     description="The memory and the traffic of a training run, before it starts.",
                     epilog="Every flag of pretrain_gpt2.py is a training flag; its --help lists them.")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the run (1); none is started")
    parser.add_argument("--card-gb", type=float, nargs="+", default=CARDS, metavar="X", help="memory of cards in GB")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the run is to be (cuda)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, flags = parser.parse_known_args(list(argv))
    require(options.ranks >= 1, f"--ranks is {options.ranks}: expected 1 or more")
    require(min(options.card_gb) > 0, f"--card-gb is {min(options.card_gb):g}: expected more than 0")
    config = parse_args(flags, options.ranks)
    config.check_world(options.ranks)
    return options, Run(with_vocabulary(config), options.ranks, options.device, _offload(config))


def with_vocabulary(config: Config) -> Config:
    """The size of the vocabulary is the tokenizer's; one that is known needs no file."""
    kind = config.data.tokenizer_type or "GPT2BPETokenizer"
    if config.model.vocab_size is None and config.data.vocab_file is None and kind in VOCABULARIES:
        return replace(config, model=replace(config.model, vocab_size=VOCABULARIES[kind]))
    if config.model.vocab_size is not None:
        return config
    from megatron.train import build

    return build.with_vocabulary(config, build.tokenizer(config))


def _offload(config: Config) -> Offload:
    if config.offload.offload_param_device != "none":
        return "optimizer+params"
    return "none" if config.offload.offload_optimizer_device == "none" else "optimizer"


def choices(asked: Run) -> Iterator[Run]:
    """The run at every stage, with its state in every home that the stage allows."""
    for stage in range(4):
        for offload in OFFLOADS:
            if stage >= {"none": 0, "optimizer": 1, "optimizer+params": 3}[offload]:
                yield replace(with_stage(asked, stage), offload=offload)


def report(asked: Run, cards: Sequence[float]) -> list[dict[str, Any]]:
    """One record a row, in bytes."""
    rows = []
    for run in choices(asked):
        fullest, traffic = peak(run), run.traffic()
        stage = run.config.zero.zero_stage
        rows.append({
            "stage": stage, "offload": run.offload, "supported": run.offload == "none" or "cpu" in OFFLOAD_DEVICES,
            "chosen": (stage, run.offload) == (asked.config.zero.zero_stage, asked.offload),
            "moment": fullest.name, **{key: value for key, value in asdict(fullest).items() if key != "name"},
            "device": fullest.total, "host": run.host, "sent_gradients": traffic.gradients,
            "sent_parameters": traffic.parameters,
            "cards": {f"{card:g}": {"fits": fullest.total <= card * 2**30 * USABLE,
                                    "largest_micro_batch": largest_micro_batch(run, card * 2**30 * USABLE)}
                      for card in cards}})
    return rows


def table(asked: Run, cards: Sequence[float]) -> Iterator[str]:
    """The report for people."""
    rows = report(asked, cards)
    unit, name = (2**30, "GiB") if max(row["device"] for row in rows) >= 2**30 else (2**20, "MiB")
    config, batch = asked.config, asked.config.train.batch_size
    yield (f"{config.model.parameters():,} parameters in {config.precision.name} on {asked.ranks} ranks: "
           f"tensor parallel {asked.tp}, data parallel {asked.dp}")
    yield (f"{asked.accumulation} micro-batch(es) of {batch} x {config.seq_length} tokens a step; "
           + (f"recomputed in chunks of {asked.chunk}" if asked.chunk else "nothing recomputed"))
    yield f"{name} of one rank at its fullest moment; sent by a rank in a step; the largest micro-batch on each card"
    yield ("  zero offload   " + "".join(f"{head:>8}" for head in HEADS.values()) + "    sent  fullest  "
           + "".join(f"{card:>5g}" for card in cards) + " GB")
    for row in rows:
        sent = (row["sent_gradients"] + row["sent_parameters"]) / unit
        most = (entry["largest_micro_batch"] for entry in row["cards"].values())
        yield (f"{'*' if row['chosen'] else ' '} {row['stage']}    {SHORT[row['offload']]:<10}"
               + "".join(f"{row[part] / unit:8.2f}" for part in HEADS) + f"{sent:8.2f}  {row['moment']:<9}"
               + "".join(f"{_cell(count, batch):>5}" for count in most))
    yield f"(n): less than the {batch} asked for; -: not even 1; {1 - USABLE:.0%} of a card are left to libraries"
    if "cpu" not in OFFLOAD_DEVICES:
        yield "rows with offloading are estimates: this version refuses to offload"


def _cell(count: int, asked: int) -> str:
    return "-" if count == 0 else str(count) if count >= asked else f"({count})"


def main() -> int:
    options, asked = parse(sys.argv[1:])
    if options.json:
        print(json.dumps({"ranks": asked.ranks, "config": asked.config.as_dict(),
                          "rows": report(asked, options.card_gb)}, indent=1))
    else:
        print("\n".join(table(asked, options.card_gb)))
    return 0
