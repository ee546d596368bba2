"""`python -m megatron.evaluate`: scores a trained model on a task. Results go to standard output, messages to standard
error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from megatron.evaluate.eval_args import (PARTS, PROTOCOLS, EvalModelArgs, EvalRequest, build_model_parser,
                                         model_args_from_flags)
from megatron.inference.model_args import ModelArgumentParser

MODULE = "python -m megatron.evaluate"

EXAMPLES = """examples:
  python -m megatron.evaluate --load runs/gpt2 --task perplexity --data held_out.jsonl
  python -m megatron.evaluate --load-hf gpt2 --task wikitext --protocol lm-eval --data wiki.test.raw
  python -m megatron.launch --nproc-per-node 4 -m megatron.evaluate --load runs/gpt2 --task lambada --data lambada.jsonl

docs/evaluate.md says what the protocols are, and where the data comes from."""

TASK_ALIASES = {"wikitext103": "wikitext"}
"""Megatron-LM's name -> ours."""


def build_parser() -> ModelArgumentParser:
    parser = build_model_parser(MODULE, "What a trained GPT-2 scores.", EXAMPLES)
    add = parser.add_argument
    add("--task", type=lambda word: TASK_ALIASES.get(word.lower(), word.lower()), choices=tuple(PROTOCOLS),
        required=True)
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


def parse(argv: Sequence[str]) -> tuple[EvalModelArgs, EvalRequest, bool]:
    """The model, the task, and whether to print JSON."""
    flags = build_parser().parse_args(argv)
    model = model_args_from_flags(flags)
    request = EvalRequest(task=flags.task, protocol=flags.protocol or PROTOCOLS[flags.task][0], data=flags.data,
                          strict=flags.strict, stride=flags.stride, part=flags.part)
    request.check_data_exists()
    return model, request, flags.json


def main(argv: Sequence[str] | None = None) -> int:
    model_args, request, as_json = parse(sys.argv[1:] if argv is None else argv)
    from megatron.distributed import process_group
    from megatron.distributed.consistency import all_succeed_or_raise
    from megatron.evaluate.eval_context import EvalContext, prepare_task
    from megatron.evaluate.eval_report import EvalReport, published_results
    from megatron.inference import load

    start = time.monotonic()
    context = EvalContext.open(model_args.source, model_args.batch_size, model_args.compared_flags)
    log = process_group.rank_0_printer(context.rank)
    for note in model_args.notes:
        log(note)
    # before the weights are read, because the data may be unusable
    task = all_succeed_or_raise(lambda: prepare_task(request, context.model_info), context.groups.world)
    description = load.describe(context.opened, context.dtype, context.model_info.tokenizer)
    log(f"{request.task}, protocol {request.protocol}: {len(task.requests):,} pieces of up to "
        f"{context.model_info.max_positions} tokens; {description}")
    if task.num_truncated:
        log(f"warning: {task.num_truncated:,} examples are longer than the window of "
            f"{context.model_info.max_positions} tokens: their beginning is not read (truncated)")
    scores = context.build_scorer(context.load_model())(task.requests, context.new_progress())
    report = EvalReport(request=request, result=task.result(scores), model=context.opened.name, dtype=context.dtype,
                        tokenizer=context.model_info.tokenizer.facts, ranks=context.groups.world.size,
                        model_parallel_size=context.groups.tp.size, window=context.model_info.max_positions,
                        stride=task.stride, truncated=task.num_truncated, seconds=time.monotonic() - start,
                        published=published_results(context.opened.shape, request.task, request.protocol,
                                                    request.strict))
    if context.rank == 0:
        print(report.as_json() if as_json else report.as_text(), flush=True)
    process_group.shutdown()
    return 0
