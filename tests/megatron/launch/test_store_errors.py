"""A message that could not be written to the ranks' store: the store is not asked again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.helpers import ROOT

LIMIT = 60.0
"""Seconds for a process that imports torch on a slow machine."""

CUT_OFF = """
import os, resource, sys
import torch.distributed as dist
from mpu.store import StoreKV
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
board = StoreKV("b")
board.write("one", 1)
size = os.path.getsize(sys.argv[1]) + 10
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
calls = dict(write=lambda: board.write("two", 100 * "x"), replace=lambda: board.compare_and_set("two", None, 100 * "x"),
             count=lambda: board.add(100 * "two"))
calls |= dict(read=lambda: board.read("one"), read_all=lambda: board.read_all(["one"]))
said = []
for name in [sys.argv[2], *calls]:
    try:
        calls[name]()
    except RuntimeError as error:
        said.append(f"{type(error).__name__}: {error}")
print(*said, sep="\\n", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("call", ["write", "replace", "count"])
def test_a_board_is_not_asked_again_after_a_note_that_was_cut_off(call: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CUT_OFF, str(tmp_path / "store"), call], cwd=ROOT, timeout=LIMIT,
                           capture_output=True, text=True)
    first, *others = ended.stdout.splitlines()
    assert first == "DistStoreError: File too large"
    assert others == 5 * ["RuntimeError: a message could not be written to the store"]
