"""`python -m megatron.report RUN...`: one page of curves of one run or several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data.cli import format_count
from data.storage import check_outputs_are_not_inputs, escape_to_one_line, prefix_storage_errors, staged_file
from megatron.config.help import CommandArgumentParser
from megatron.errors import ConfigError
from megatron.report.history import RunHistory
from megatron.report.page import is_report_page, report_page
from megatron.report.read import MetricsFileReader
from megatron.report.source import find_metrics_sources
from megatron.report.tables import history_notes

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


def _check_overwrites_only_reports(output: Path) -> None:
    """Or nothing: what else has that name is somebody's."""
    try:
        stays = output.is_file() and output.stat().st_size and not is_report_page(output)
    except OSError as error:
        raise ConfigError(f"--output {output}: there is such a file, which cannot be read ({error.strerror}); give "
                          "--output another name") from error
    if stays:
        raise ConfigError(f"--output {output}: there is such a file, which is no page of this command and would be "
                          "lost; give --output another name, or remove it")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    metrics_sources = find_metrics_sources(args.runs)
    with prefix_storage_errors("--output"):
        check_outputs_are_not_inputs((source.path for source in metrics_sources), (args.output, ),
                                     "give --output another name")
    _check_overwrites_only_reports(Path(args.output))
    histories, all_notes = list[RunHistory](), list[str]()
    for source in metrics_sources:
        lines = MetricsFileReader(source.path)
        history = RunHistory(escape_to_one_line(source.name)).add_records(lines)
        histories.append(history)
        all_notes += history_notes(history, lines)
    text = report_page(histories, all_notes).encode(errors="backslashreplace")  # a setting need not be text
    with prefix_storage_errors("--output"), staged_file(args.output) as file:
        file.write(text)
    for note in all_notes:
        print(f"note: {note}", file=sys.stderr)
    steps = format_count(sum(len(history.steps) for history in histories), "step")
    print(f"{escape_to_one_line(args.output)}: {format_count(len(histories), 'run')}, {steps}, {len(text):,} bytes")
    return 0
