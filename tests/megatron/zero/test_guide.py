"""docs/engine.md runs as printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from tests.distributed import run_ranks

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "engine.md"


def follow_the_guide(rank: int, world: int, folder: str) -> list[int]:
    os.chdir(folder)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "guide"}
    steps = []
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S):
        exec(compile(block, str(GUIDE), "exec"), names)
        steps.append(names["engine"].global_steps)  # type: ignore[attr-defined]
    assert names["engine"].load_checkpoint("checkpoints")[1] == {"epoch": 1}  # type: ignore[attr-defined]
    return steps


def test_the_guide_runs_as_it_stands(tmp_path: Path) -> None:
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        # 256 examples in micro-batches of 8, two to a step; one step more; then an engine that has not stepped. Two
        # examples in between have engines of other names.
        first = 16 // world
        assert run_ranks(follow_the_guide, world, str(folder)) == [[first, first, first + 1, first + 1, 0]] * world
