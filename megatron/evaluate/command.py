"""`python -m megatron.evaluate`: what a trained model scores, and by which protocol.

Figures go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from megatron.evaluate.parser import Chosen, chosen, parser_of
from megatron.evaluate.request import PARTS, PROTOCOLS, Asked
from megatron.inference.source import ModelParser

MODULE = "python -m megatron.evaluate"

EXAMPLES = """examples:
  python -m megatron.evaluate --load runs/gpt2 --task perplexity --data held_out.jsonl
  python -m megatron.evaluate --load-hf gpt2 --task wikitext --protocol lm-eval --data wiki.test.raw
  python -m megatron.launch --nproc-per-node 4 -m megatron.evaluate --load runs/gpt2 --task lambada --data lambada.jsonl

docs/evaluate.md says what the protocols are, and where the data comes from."""

OLD_NAMES = {"wikitext103": "wikitext"}


def task_name(word: str) -> str:
    """Megatron's names will do as well."""
    return OLD_NAMES.get(word.lower(), word.lower())


def build_parser() -> ModelParser:
    parser = parser_of(MODULE, "What a trained GPT-2 scores.", EXAMPLES)
    add = parser.add_argument
    add("--task", type=task_name, choices=tuple(PROTOCOLS), required=True)
    add("--data", "--valid-data", metavar="FILE", required=True, help="what to score; of perplexity also the prefix of "
        "a corpus, or a folder of text")
    add("--protocol", choices=("megatron", "openai", "lm-eval"), help="whose rules (default: megatron; of hellaswag "
        "lm-eval)")
    add("--strict", "--strict-lambada", action="store_true", help="lambada: the whole last word, not its last token")
    add("--stride", "--overlapping-eval", type=int, metavar="N", help="tokens from one window to the next (32 for "
        "wikitext in the megatron protocol, otherwise no overlap)")
    add("--part", choices=PARTS, help="perplexity: only the documents that the run's --split put there")
    add("--json", action="store_true", help="one JSON object on standard output")
    return parser


def parse(argv: Sequence[str]) -> tuple[Chosen, Asked, bool]:
    """The model, the task, and whether the answer is to be JSON."""
    flags = build_parser().parse_args(argv)
    model = chosen(flags)
    asked = Asked(task=flags.task, protocol=flags.protocol or PROTOCOLS[flags.task][0], data=flags.data,
                  strict=flags.strict, stride=flags.stride, part=flags.part)
    asked.check_data()
    return model, asked, flags.json


def main(argv: Sequence[str] | None = None) -> int:
    model, asked, as_json = parse(sys.argv[1:] if argv is None else argv)
    from megatron.checkpoint.agree import all_succeed_or_raise
    from megatron.evaluate.report import Report, published
    from megatron.evaluate.setting import Setting
    from megatron.evaluate.tasks import prepare
    from megatron.launch import distributed

    began = time.monotonic()
    setting = Setting.of(model.source, model.batch_size, model.told)
    say = distributed.rank_0_printer(setting.rank)
    for note in model.notes:
        say(note)
    # Before the weights are read: it may find that the data will not do.
    task = all_succeed_or_raise(lambda: prepare(asked, setting.subject), setting.groups.world)
    say(f"{asked.task}, protocol {asked.protocol}: {len(task.pieces):,} pieces of up to {setting.subject.length} "
        f"tokens; {setting.described}")
    if task.truncated:
        say(f"warning: {task.truncated:,} examples are longer than the window of {setting.subject.length} tokens: "
            "their beginning is not read (truncated)")
    scores = setting.scorer(setting.model())(task.pieces, setting.progress())
    report = Report(asked=asked, outcome=task.outcome(scores), model=setting.name, dtype=setting.dtype,
                    tokenizer=setting.subject.tokenizer.facts, ranks=setting.groups.world.size,
                    model_parallel_size=setting.groups.tp.size, window=setting.subject.length, stride=task.stride,
                    truncated=task.truncated, seconds=time.monotonic() - began,
                    published=published(setting.shape, asked.task, asked.protocol, asked.strict))
    if setting.rank == 0:
        print(report.as_json() if as_json else report.as_text(), flush=True)
    distributed.shutdown()
    return 0
