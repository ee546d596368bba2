"""What a person types for a run -> its metrics file: that file itself, or a folder that holds it.

A folder holds it as `metrics.jsonl`, as the scripts have it, or as its only file of metrics under another name. A
--save folder without one knows it by its newest checkpoint, whose configuration names --metrics-file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.storage import DataError, check_is_rereadable
from megatron.checkpoint.choice import latest_tag
from megatron.checkpoint.tags import read_tag_manifest
from megatron.config.tree import require
from megatron.errors import CheckpointError
from megatron.report.read import looks_like_metrics

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
