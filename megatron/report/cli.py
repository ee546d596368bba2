"""`python -m megatron.report RUN...`: one HTML page of curves of one or several runs.

A RUN is a metrics file, a folder that holds one, or a --save folder whose newest checkpoint names --metrics-file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from data.cli import StrictArgumentParser, format_count
from data.storage import (DataError, check_is_rereadable, check_outputs_are_not_inputs, escape_to_one_line,
                          prefix_storage_errors, staged_file)
from megatron.checkpoint.tags import latest_tag, read_tag_manifest
from megatron.config.cli_help import command_parser
from megatron.config.tree import require
from megatron.errors import CheckpointError, ConfigError
from megatron.report.history import MetricsFileReader, RunHistory, looks_like_metrics
from megatron.report.page import history_notes, is_report_page, report_page

USUAL_NAME = "metrics.jsonl"


def find_metrics_file(path: Path) -> Path:
    """The metrics file of a RUN argument."""
    check_is_rereadable(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: there is no such run; name a metrics file, or the folder that holds one")
    if (path / USUAL_NAME).is_file():
        return path / USUAL_NAME
    candidates = sorted(file for file in path.glob("*.jsonl") if file.is_file() and looks_like_metrics(file))
    if len(candidates) > 1:
        raise DataError(f"{path} holds {len(candidates)} metrics files: "
                        f"{', '.join(file.name for file in candidates)}; name the ones that are meant")
    if candidates:
        return candidates[0]
    with suppress(CheckpointError, OSError, KeyError, TypeError):
        # the newest checkpoint names the file, relative to the folder that the run was started in
        tag = latest_tag(path)
        named = read_tag_manifest(path, tag).config["log"]["metrics_file"] if tag is not None else None
        if isinstance(named, str) and Path(named).is_file():
            return Path(named)
    raise DataError(f"{path} holds no metrics file: name the one that --metrics-file gave, or train with "
                    f"--metrics-file {path / USUAL_NAME}")


MODULE = "python -m megatron.report"

EXAMPLES = """examples:
  python -m megatron.report runs/gpt2
  python -m megatron.report runs/small runs/large/metrics.jsonl --output compared.html

docs/report.md says what the page shows."""


def _parser() -> StrictArgumentParser:
    parser = command_parser(MODULE, "One page of curves from what training runs have written.", EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a metrics file, or the folder of a run that holds it")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="the page to write (report.html)")
    return parser


def _check_overwrites_only_reports(output: Path) -> None:
    try:
        is_other_file = output.is_file() and output.stat().st_size and not is_report_page(output)
    except OSError as error:
        raise ConfigError(f"--output {output}: there is such a file, which cannot be read ({error.strerror}); give "
                          "--output another name") from error
    if is_other_file:
        raise ConfigError(f"--output {output}: there is such a file, which is no page of this command and would be "
                          "lost; give --output another name, or remove it")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    runs = [(name, find_metrics_file(Path(name))) for name in args.runs]
    for index, (name, path) in enumerate(runs):
        twin = next((other for other, other_path in runs[:index] if other_path.resolve() == path.resolve()), None)
        require(twin is None, f"{name} is given twice" + (f", the other time as {twin}" if twin != name else ""))
    with prefix_storage_errors("--output"):
        check_outputs_are_not_inputs((path for _, path in runs), (args.output,), "give --output another name")
    _check_overwrites_only_reports(Path(args.output))
    histories, all_notes = list[RunHistory](), list[str]()
    for name, path in runs:
        lines = MetricsFileReader(path)
        histories.append(RunHistory(escape_to_one_line(name), lines))
        all_notes += history_notes(histories[-1], lines)
    text = report_page(histories, all_notes).encode(errors="backslashreplace")  # a setting need not be text
    with prefix_storage_errors("--output"), staged_file(args.output) as file:
        file.write(text)
    for note in all_notes:
        print(f"note: {note}", file=sys.stderr)
    steps = format_count(sum(len(history.steps) for history in histories), "step")
    print(f"{escape_to_one_line(args.output)}: {format_count(len(histories), 'run')}, {steps}, {len(text):,} bytes")
    return 0
