"""A model whose state is larger than the memory it may have trains from a drive, with the losses of a run that has it.

The limit is the kernel's on a process's private memory (RLIMIT_DATA), above what a run of the smallest model takes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron.config.cli import parse_args
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import peak_memory

ROOT = Path(__file__).resolve().parents[4]

SHAPE = ["--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", "4096", "--num-attention-heads", "8",
         "--max-position-embeddings", "64", "--batch-size", "1", "--zero-stage", "3", "--checkpoint-activations",
         "--bf16"]
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}
"""As scripts/lib.sh; and no thread reserves memory of its own, which would count."""
SMALL, LARGE = ["--num-layers", "1", "--hidden-size", "64"], ["--num-layers", "24", "--hidden-size", "512"]


def drive(folder: Path) -> list[str]:
    return ["--offload-optimizer-device", "nvme", "--offload-optimizer-nvme-path", str(folder),
            "--offload-param-device", "nvme", "--offload-param-nvme-path", str(folder), "--offload-param-max-in-cpu",
            "0", "--sub-group-size", str(1 << 20), "--offload-param-buffer-size", str(1 << 18),
            "--offload-param-buffer-count", "4", "--stage3-max-reuse-distance", "0"]


def run(flags: list[str], metrics: Path, limit: int | None = None) -> tuple[int, str]:
    """(exit code, what it said)"""
    command = [sys.executable, "-c", WATCHED, "--mock-data", "--train-iters", "20", "--eval-interval", "0",
               "--eval-iters", "1", "--log-interval", "10", "--metrics-file", str(metrics), *SHAPE, *flags]
    within = None if limit is None else partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit))
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=within, timeout=600,
                           env={**os.environ, **MALLOC})
    return ended.returncode, ended.stdout + ended.stderr


WATCHED = """
import runpy, sys, threading, time
most = 0
def look():
    global most
    while True:
        lines = open("/proc/self/status").read().splitlines()
        most = max(most, next(int(line.split()[1]) for line in lines if line.startswith("VmData")))
        time.sleep(0.005)
threading.Thread(target=look, daemon=True).start()
sys.argv[0] = "pretrain_gpt2.py"
try:
    runpy.run_path("pretrain_gpt2.py", run_name="__main__")
finally:
    print("VmData", most, flush=True)
"""


def losses(metrics: Path) -> list[str]:
    return [repr(line["lm_loss"]) for line in map(json.loads, metrics.read_text().splitlines()) if "lm_loss" in line]


@pytest.mark.slow
def test_a_third_of_the_memory_is_enough(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    code, said = run(SMALL, tmp_path / "small.jsonl")
    assert code == 0, said
    base = int(said.rsplit("VmData", 1)[1]) << 10
    plain = peak_memory(PlannedRun(parse_args([*SHAPE, *LARGE]), 1, "cpu")).total
    limit = base + plain // 3

    assert run(LARGE, tmp_path / "plain.jsonl")[0] == 0
    code, said = run(LARGE, tmp_path / "capped.jsonl", limit)
    assert code != 0, "the limit is none"
    code, said = run([*LARGE, *drive(tmp_path / "drive")], tmp_path / "drive.jsonl", limit)
    assert code == 0, said
    expected = losses(tmp_path / "plain.jsonl")
    assert len(expected) >= 20 and losses(tmp_path / "drive.jsonl") == expected
    assert not list((tmp_path / "drive").iterdir())
