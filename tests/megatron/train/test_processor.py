"""Whoever trains in a precision that the CPU only emulates reads a warning, and nobody else does."""

from __future__ import annotations

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
