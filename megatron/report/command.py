"""`python -m megatron.report RUN...`: one page of curves of one run or several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data.cli import format_count
from data.storage import check_outputs_are_not_inputs, escape_to_one_line, prefix_storage_errors, staged_file
from megatron.config.help import CommandArgumentParser
from megatron.errors import ConfigError
from megatron.report.history import History
from megatron.report.page import is_page, page
from megatron.report.read import MetricsLines
from megatron.report.source import sources
from megatron.report.tables import notes

MODULE = "python -m megatron.report"

EXAMPLES = """examples:
  python -m megatron.report runs/gpt2
  python -m megatron.report runs/small runs/large/metrics.jsonl --output compared.html

docs/report.md says what the page shows."""


def _parser() -> CommandArgumentParser:
    parser = CommandArgumentParser(MODULE, "One page of curves from what training runs have written.", EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a metrics file, or the folder of a run that holds it")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="the page to write (report.html)")
    return parser


def _check_replaces_a_page(output: Path) -> None:
    """Or nothing: what else has that name is somebody's."""
    try:
        stays = output.is_file() and output.stat().st_size and not is_page(output)
    except OSError as error:
        raise ConfigError(f"--output {output}: there is such a file, which cannot be read ({error.strerror}); give "
                          "--output another name") from error
    if stays:
        raise ConfigError(f"--output {output}: there is such a file, which is no page of this command and would be "
                          "lost; give --output another name, or remove it")


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(argv)
    found = sources(asked.runs)
    with prefix_storage_errors("--output"):
        check_outputs_are_not_inputs((source.path for source in found), (asked.output,), "give --output another name")
    _check_replaces_a_page(Path(asked.output))
    histories, told = list[History](), list[str]()
    for source in found:
        lines = MetricsLines(source.path)
        history = History(escape_to_one_line(source.name)).read(lines)
        histories.append(history)
        told += notes(history, lines)
    text = page(histories, told).encode(errors="backslashreplace")  # a setting need not be text
    with prefix_storage_errors("--output"), staged_file(asked.output) as file:
        file.write(text)
    for note in told:
        print(f"note: {note}", file=sys.stderr)
    steps = format_count(sum(len(history.steps) for history in histories), "step")
    print(f"{escape_to_one_line(asked.output)}: {format_count(len(histories), 'run')}, {steps}, {len(text):,} bytes")
    return 0
