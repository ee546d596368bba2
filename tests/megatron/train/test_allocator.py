"""What is freed is kept, and found again: a block taken again and again costs no fresh pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FRESH_PAGES = """
import resource, sys, torch
from megatron.train.allocator import keep_freed_memory

assert sys.argv[1] == "as it comes" or keep_freed_memory()
for round in range(12):
    if round == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(32 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def fresh_pages(setting: str, tunables: str) -> int:
    """Pages that blocks of 32 MB (8,192 pages), freed and taken again 11 times, cost after the first one."""
    result = subprocess.run([sys.executable, "-c", FRESH_PAGES, setting], capture_output=True, text=True, check=True,
                            env={**os.environ, "GLIBC_TUNABLES": tunables})
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_a_block_that_was_freed_is_taken_again_without_fresh_pages():
    shipped = re.search(r"glibc\.malloc\.\w+=\d+", (ROOT / "scripts" / "lib.sh").read_text())
    assert shipped
    assert fresh_pages("as it comes", "") > 11 * 16, "11 blocks, at the least one fresh page for each 2 MB"
    assert fresh_pages("kept", shipped.group()) < 100
