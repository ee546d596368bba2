"""Whoever trains in a precision that the CPU only emulates reads a warning, and nobody else does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.train.processor import cpu_flags, has_native_products, precision_notes
from tests.megatron.helpers import ROOT

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_warning_goes_by_the_processors_own_list_and_of_an_unknown_one_nothing_is_said(tmp_path: Path) -> None:
    for words, expected in (("fpu avx512f avx512_bf16 avx512_fp16 amx_bf16", set()), ("fpu amx_bf16", {"fp16"}),
                            ("fpu avx2 avx512f not_avx512_bf16", {"bf16", "fp16"}), ("asimd bf16", set())):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {words}\nbogomips: 1\n")
        flags = cpu_flags(tmp_path / "cpuinfo")
        for precision in ("fp32", "bf16", "fp16"):
            notes = precision_notes(precision, CPU, flags)
            assert len(notes) == (precision in expected) and not precision_notes(precision, GPU, flags)
            assert all(f"no {precision} instructions" in note and f"--no-{precision}" in note for note in notes)
    assert cpu_flags(tmp_path / "absent") == frozenset() and not has_native_products("bf16", ())


def test_the_scripts_ask_this_module_and_nobody_else() -> None:
    """So a script never starts a run that is then warned of its precision."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "megatron.train.processor"], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["--bf16"] if has_native_products("bf16", cpu_flags()) else [])
    assert "torch" not in done.stderr, "they ask before every run"
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").glob("*.sh"))
    assert "megatron.train.processor" in scripts and "cpuinfo" not in scripts


# ---- what is freed is kept, and found again: a block taken again and again costs no fresh pages --------------------

FRESH_PAGES = """
import ctypes, resource, torch
from megatron.train.processor import keep_freed_memory

assert keep_freed_memory()
libc = ctypes.CDLL(None)
activations = []
for layer in range(64):
    activations.append(torch.ones(3 << 20, dtype=torch.uint8))
    nodes = [libc.malloc(size) for size in (24, 40, 200, 400) * 8]
activations.clear()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
gradients = [torch.ones(14 << 20, dtype=torch.uint8) for _ in range(12)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

HELD = """
import sys, torch
from megatron.train.processor import keep_freed_memory

def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) >> 10

for kind in sys.argv[1].split(", then "):
    assert keep_freed_memory(return_large_blocks=kind == "but large ones")
before, last = held(), []
for size in (40, 30, 20):
    block = torch.ones(size << 20, dtype=torch.uint8)
    last.append(torch.ones(2 << 20, dtype=torch.uint8))
    del block
print(held() - before)
"""


def number_from(program: str, setting: str = "") -> int:
    """What a program prints that was started with the tunables of the scripts."""
    shipped = re.search(r"glibc\.malloc\.\w+=\d+", (ROOT / "scripts" / "lib.sh").read_text())
    assert shipped
    result = subprocess.run([sys.executable, "-c", program, setting], capture_output=True, text=True, check=True,
                            env={**os.environ, "GLIBC_TUNABLES": shipped.group()}, cwd=ROOT)
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_what_was_freed_is_taken_again_without_fresh_pages_but_for_large_blocks_where_memory_is_short() -> None:
    """12 blocks of 14 MB (3,584 pages each) after 64 of 3 MB, between nodes that stay (without a stock, some 12,000
    fresh pages). Megabytes held when blocks of 40, 30 and 20 have been freed, and three of 2 have not; also where a run
    of the other kind came before in the process."""
    assert number_from(FRESH_PAGES) < 3584
    assert number_from(HELD, "but large ones, then all") > 40
    assert number_from(HELD, "all, then but large ones") < 12
