"""`python -m megatron.report RUN...`: one HTML page of curves of one or several runs.

A RUN is a metrics file, a folder that holds one, or a --save folder whose newest checkpoint names --metrics-file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.cli import format_count
from data.storage import (DataError, check_is_rereadable, check_outputs_are_not_inputs, escape_to_one_line,
                          prefix_storage_errors, staged_file)
from megatron.checkpoint.resolve_tag import latest_tag
from megatron.checkpoint.tags import read_tag_manifest
from megatron.config.cli_help import CommandArgumentParser
from megatron.config.tree import require
from megatron.errors import CheckpointError, ConfigError
from megatron.report.history import MetricsFileReader, RunHistory, looks_like_metrics
from megatron.report.page import history_notes, is_report_page, report_page

USUAL_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class MetricsSource:
    name: str
    """Of the run, as it was typed."""
    path: Path
    """Of its metrics."""


def find_metrics_sources(words: Sequence[str]) -> list[MetricsSource]:
    found = [MetricsSource(word, find_metrics_file(Path(word))) for word in words]
    for index, source in enumerate(found):
        twin = next((other for other in found[:index] if other.path.resolve() == source.path.resolve()), None)
        require(twin is None, f"{source.name} is given twice" + (
            f", the other time as {twin.name}" if twin is not None and twin.name != source.name else ""))
    return found


def find_metrics_file(path: Path) -> Path:
    check_is_rereadable(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: there is no such run; name a metrics file, or the folder that holds one")
    if (path / USUAL_NAME).is_file():
        return path / USUAL_NAME
    held = sorted(file for file in path.glob("*.jsonl") if file.is_file() and looks_like_metrics(file))
    if len(held) > 1:
        raise DataError(f"{path} holds {len(held)} metrics files: {', '.join(file.name for file in held)}; name the "
                        "ones that are meant")
    found = held[0] if held else _named_by_checkpoint(path)
    if found is None:
        raise DataError(f"{path} holds no metrics file: name the one that --metrics-file gave, or train with "
                        f"--metrics-file {path / USUAL_NAME}")
    return found


def _named_by_checkpoint(root: Path) -> Path | None:
    """From where the run was started, if that is where we are."""
    try:
        tag = latest_tag(root)
        named = read_tag_manifest(root, tag).config["log"]["metrics_file"] if tag is not None else None
    except (CheckpointError, OSError, KeyError, TypeError):
        return None
    return Path(named) if isinstance(named, str) and Path(named).is_file() else None


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
        check_outputs_are_not_inputs((source.path for source in metrics_sources), (args.output,),
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
