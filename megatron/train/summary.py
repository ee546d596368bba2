"""The last lines of a run: its samples of text; with --summary, a chart of the losses and what to do next as well."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from shlex import quote

from megatron.config.tree import Config
from megatron.metrics.metrics_file import MetricsFileReader, Record
from megatron.train.evaluation import printable

CHART_COLUMNS, CHART_ROWS, TEXT_COLUMNS = 64, 10, 88
_SCRIPTS = next(folder for parent in Path(__file__).parents if (folder := parent / "scripts").is_dir())


def closing_lines(config: Config, samples: Sequence[str]) -> list[str]:
    if not config.log.summary:
        return [f" sample: {printable(sample)}" for sample in samples]
    lines = loss_chart(MetricsFileReader(Path(config.log.metrics_file))) if config.log.metrics_file else []
    for sample in samples:
        lines += ["", *(f"  {line}" for text in sample.splitlines() for line in textwrap.wrap(text, TEXT_COLUMNS))]
    if config.save.save is not None:
        scripts, folder = (quote(_short_path(path)) for path in (str(_SCRIPTS), config.save.save))
        lines += ["", f" The checkpoint is in {folder}. Next:",
                  f'   bash {scripts}/generate_text.sh --load {folder} "It was"', "     continues your own words",
                  f"   bash {scripts}/evaluate_gpt2.sh --load {folder}", "     scores it on text that it has not seen",
                  f"   RUNS=runs/mine bash {scripts}/pretrain_gpt2.sh --train-data my_texts",
                  "     trains on your own text"]
    return lines


def _short_path(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def loss_chart(records: Iterable[Record]) -> list[str]:
    """Training loss (the mean of each column's steps) and validation losses by step. The vertical axis leaves out the
    steep beginning: higher losses are drawn at its top."""
    training, validation = dict[int, float](), dict[int, float]()
    for record in records:
        step, loss = record.get("iteration"), record.get("lm_loss")
        if isinstance(step, int) and isinstance(loss, float) and isfinite(loss):
            if not record.get("eval"):
                training[step] = loss
            elif record.get("split") == "validation":
                validation[step] = loss
    if len(training) < 2:
        return []
    last = max(training)
    columns: list[list[float]] = [[] for _ in range(CHART_COLUMNS)]
    for step, loss in training.items():
        columns[(step - 1) * CHART_COLUMNS // last].append(loss)
    marks = [(column, sum(losses) / len(losses), "*") for column, losses in enumerate(columns) if losses]
    marks += [((step - 1) * CHART_COLUMNS // last, loss, "o") for step, loss in validation.items() if 0 < step <= last]
    low = min(loss for _, loss, _ in marks)
    high = max(loss for column, loss, _ in marks if column >= CHART_COLUMNS // 16 or loss == low)
    grid = [[" "] * CHART_COLUMNS for _ in range(CHART_ROWS)]
    for column, loss, mark in marks:
        row = round((high - min(loss, high)) / ((high - low) or 1) * (CHART_ROWS - 1))
        grid[row][column] = mark
    labels = {0: f"{high:.2f}", CHART_ROWS - 1: f"{low:.2f}"}
    return [*(f" {labels.get(row, ''):>6} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)),
            f"        +{'-' * CHART_COLUMNS}",
            f"         1{last:>{CHART_COLUMNS - 1},}",
            "         loss of training (*) and validation (o) in nats a token, by step"]
