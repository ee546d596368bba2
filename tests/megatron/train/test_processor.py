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


@pytest.mark.parametrize(("line", "bf16", "fp16"), [
    ("flags\t\t: fpu avx512f avx512_bf16 avx512_fp16 amx_bf16", True, True),
    ("flags\t\t: fpu amx_bf16 amx_tile", True, False),
    ("flags\t\t: fpu avx2 avx512f avx512_vnni not_avx512_bf16", False, False),
])
def test_the_warning_goes_by_the_processors_own_list(line: str, bf16: bool, fp16: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbogomips: 1\n")
    flags = cpu_flags(tmp_path / "cpuinfo")
    for precision, native in (("bf16", bf16), ("fp16", fp16)):
        assert has_native_products(precision, flags) == native
        notes = precision_notes(precision, CPU, flags)
        assert len(notes) == (not native)
        assert all(f"no {precision} instructions" in note and f"--no-{precision}" in note for note in notes)
        assert not precision_notes(precision, GPU, flags)
    assert not precision_notes("fp32", CPU, flags)


def test_of_an_unknown_processor_nothing_is_said(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "absent") == frozenset() and not has_native_products("bf16", ())
    assert not precision_notes("bf16", CPU, ()) and not precision_notes("bf16", CPU, {"asimd", "bf16"})


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
import resource, torch
from megatron.train.processor import keep_freed_memory

assert keep_freed_memory()
for round in range(12):
    if round == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(32 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LIKE_A_STEP = """
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


def fresh_pages(program: str, tunables: str, setting: str = "") -> int:
    """What blocks cost that are taken when others of the same size, or of the same size together, have been freed."""
    result = subprocess.run([sys.executable, "-c", program, setting], capture_output=True, text=True, check=True,
                            env={**os.environ, "GLIBC_TUNABLES": tunables}, cwd=ROOT)
    return int(result.stdout)


def shipped_tunables() -> str:
    shipped = re.search(r"glibc\.malloc\.\w+=\d+", (ROOT / "scripts" / "lib.sh").read_text())
    assert shipped
    return shipped.group()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_what_was_freed_is_taken_again_without_fresh_pages():
    """A block of 32 MB, 11 times (as it comes, that is a fresh page for each 2 MB at the least). And 12 blocks of 14 MB
    (3,584 pages each) after 64 of 3 MB, between nodes that stay (without a stock, some 12,000 fresh pages)."""
    assert fresh_pages(FRESH_PAGES, shipped_tunables()) < 100
    assert fresh_pages(LIKE_A_STEP, shipped_tunables()) < 3584


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_where_memory_is_short_large_blocks_go_back():
    """Megabytes held when blocks of 40, 30 and 20 have been freed, and three of 2 have not; also where a run of the
    other kind came before in the process."""
    assert fresh_pages(HELD, shipped_tunables(), "but large ones, then all") > 40
    assert fresh_pages(HELD, shipped_tunables(), "all, then but large ones") < 12
