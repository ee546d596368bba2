"""Triton's kernels without a GPU: tests of them in Triton's interpreter, and their compilation for an H100 or H200."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def interpreted(*arguments: str) -> str:
    """pytest in a process where Triton interprets: that is decided when a kernel is imported."""
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=ROOT, capture_output=True,
                            text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    return result.stdout


def compiled(kernel: Any, kinds: Mapping[str, str], constants: Mapping[str, Any], by_16: set[str], warps: int) -> Any:
    """A kernel for Hopper. `kinds`: the type of each argument that is no constant; `by_16`: those of which Triton may
    assume that they are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    names = kernel.arg_names
    source = ASTSource(kernel, {name: "constexpr" if name in constants else kinds[name] for name in names},
                       {(names.index(name),): value for name, value in constants.items()},
                       {(names.index(name),): [["tt.divisibility", 16]] for name in by_16})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
