"""`python -m megatron.evaluate.harness`: lm-eval's tasks on a checkpoint of ours, through bridge.py.

lm-eval is an extra: nothing else of the project needs it. Its tasks bring their data from the Hugging Face hub; without
a network, a task of one's own (`--include-path`) can name a local file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from data.cli import StrictArgumentParser
from megatron.commands import harness
from megatron.config.tree import require
from megatron.errors import ConfigError
from megatron.evaluate.cli import build_model_parser, source_from_flags
from megatron.inference.model_args import flags_to_compare

MODULE = "python -m megatron.evaluate.harness"

EXAMPLES = """examples:
  python -m megatron.evaluate.harness --load runs/gpt2 --tasks lambada_openai,hellaswag
  python -m megatron.evaluate.harness --load runs/gpt2 --tasks my_task --include-path my_tasks/ --limit 100 --json

docs/evaluate.md has a task whose data is a local file."""

# Keys of lm-eval's results that are printed; the others describe the machine.
REPORTED_KEYS = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better",
                 "lm_eval_version")


def build_parser() -> StrictArgumentParser:
    parser = build_model_parser(MODULE, "lm-eval's tasks on a trained GPT-2.", EXAMPLES)
    add = parser.add_argument
    add("--tasks", required=True, metavar="A,B", help="names of lm-eval's tasks")
    add("--include-path", metavar="DIR", help="folder with tasks of your own")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's own)")
    add("--limit", type=int, metavar="N", help="only the first N examples of each task")
    add("--json", action="store_true", help="lm-eval's results as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    require(flags.include_path is None or os.path.isdir(flags.include_path),
            f"--include-path {flags.include_path}: no such folder")
    require(flags.limit is None or flags.limit >= 1, f"--limit is {flags.limit}: expected 1 or more")
    require(find_spec("lm_eval") is not None, f"{MODULE} needs lm-eval: pip install lm_eval (the extra [eval])")
    source = source_from_flags(flags)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    from megatron.distributed import process_group
    from megatron.evaluate.bridge import MegatronLM
    from megatron.evaluate.scoring import EvalContext

    context = EvalContext(source, flags.batch_size, flags_to_compare(flags))
    is_first = context.groups.world.rank == 0
    with _stdout_to_stderr(is_first):
        manager, tasks = TaskManager(include_path=flags.include_path), list[Any]()
        for name in flags.tasks.split(","):
            try:
                loaded = manager.load([name])
            except Exception as error:
                raise ConfigError(f"--tasks {name}: lm-eval cannot load this ({type(error).__name__}: {error}); "
                                  "`lm-eval ls tasks` lists its tasks, whose data comes from the network; "
                                  "--include-path names a folder with your own, whose data may be a file "
                                  "(docs/evaluate.md)") from error
            tasks += [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
    lm = MegatronLM(context)
    with _stdout_to_stderr(is_first):
        results = simple_evaluate(model=lm, tasks=tasks, task_manager=manager, num_fewshot=flags.num_fewshot,
                                  limit=flags.limit, log_samples=False)
    if is_first:
        reported = {name: results[name] for name in REPORTED_KEYS if name in results}
        print(json.dumps(reported, default=handle_non_serializable) if flags.json else make_table(results),
              flush=True)
    process_group.shutdown()
    return 0


@contextlib.contextmanager
def _stdout_to_stderr(is_enabled: bool) -> Iterator[None]:
    """Sends the output of lm-eval to standard error, or discards it."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stderr if is_enabled else nowhere), \
            contextlib.redirect_stderr(sys.stderr if is_enabled else nowhere):
        yield


if __name__ == "__main__":
    sys.exit(harness())
