"""What one rank of 64, 512 and 4,096 does to start, save, open and resume: `python benchmarks/scale.py`.

One process plays rank 0 and the rank in the middle of a run with tensor parallel size 8 (tests/megatron/checkpoint/
scale.py); groups are made on torch's fake backend. Counts are exact and the same on any machine; seconds are this
machine's. Takes some minutes and 1 GB below --folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from mpu import groups  # noqa: E402
from tests.megatron.checkpoint import scale  # noqa: E402


def make_groups(size: int) -> tuple[float, int]:
    """Seconds and calls of torch.distributed to make the groups of the last rank, on the fake backend."""
    dist.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
    made: list[object] = []
    real = dist.new_group
    try:
        begin = time.perf_counter()
        with mock.patch.object(dist, "new_group", lambda *given, **named: made.append(0) or real(*given, **named)):
            groups.build(scale.TP)
        return time.perf_counter() - begin, len(made)
    finally:
        dist.destroy_process_group()


def rows(folder: Path, size: int) -> list[str]:
    seconds, calls = make_groups(size)
    found = [f"| {size:,} | groups | {calls} new_group | | | {seconds:.2f} |"]
    cost = scale.start(size)
    found.append(f"| {size:,} | weights | | | {cost.drawn:,} drawn of {cost.kept:,} kept | {cost.seconds:.2f} |")
    calls, seconds = scale.schedule(size)
    found.append(f"| {size:,} | schedule | {calls} calls a micro-batch | | | {seconds:.2f} |")
    for what, costs in zip(("save", "open", "resume"), (scale.save(folder, size), *scale.open_and_read(folder, size))):
        for rank, cost in costs.items():
            found.append(f"| {size:,} | {what}, rank {rank:,} | {cost.calls.total()} | {cost.told} | | "
                         f"{cost.seconds:.2f} |")
    return [*found, f"| {size:,} | the tag | {len(os.listdir(folder / 'global_step1')):,} files | | | |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096], help="multiples of 16")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="an existing one")
    chosen = parser.parse_args()
    print("| ranks | phase | file operations | bytes told | | seconds |\n|---|---|---|---|---|---|")
    for size in chosen.ranks:
        folder = Path(tempfile.mkdtemp(dir=chosen.folder))
        try:
            print("\n".join(rows(folder, size)), flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
