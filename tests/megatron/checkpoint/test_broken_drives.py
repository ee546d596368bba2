"""Real jobs of two ranks, one of which has a drive that fails: one line with flag and file, the exit code of its kind,
no rank left after five seconds, and the checkpoint before as it was."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from tests.megatron.checkpoint import broken_drive
from tests.megatron.checkpoint.broken_drive import Fault
from tests.megatron.helpers import ROOT, TINY, write_corpus
from tests.megatron.launch.test_launch import alive

LIMIT = 5.0
STEP = 4
"""At which the second save is due; the first one is at step 2."""
STAGED = rf"\.staging-global_step{STEP}[^/]*"


@dataclass(frozen=True)
class Case:
    """A fault, and what is promised of it. {} stands for the folder of the test."""

    fault: Fault
    flag: str = "--save"
    names: str = ""
    """The file in the line."""
    code: int = 7
    flags: str = ""
    resumes: bool = False

    def __str__(self) -> str:
        return f"{self.fault} {self.flags.replace('{}/', '')}".strip()


def save(rank: int, call: str, name: str, number: int = 0, **more: str) -> Case:
    """Of the second save."""
    where = f"{STAGED}/{name}" if number and name else STAGED
    return Case(Fault(rank, call, f"{where}$", number, STEP), names=name or "global_step4", **more)


QUICK = [
    save(1, "write", "rank1.safetensors", errno.ENOSPC),
    Case(Fault(1, "preadv", r"corpus\.bin$", errno.EIO, STEP), "--train-data", "{}/corpus.bin", 3),
    Case(Fault(0, "open", r"/cache/[^/]*lock$", errno.ENOSPC), "--data-cache-path", "{}/cache/",
         flags="--train-data {}/text.jsonl --data-cache-path {}/cache"),
]
SAVES = [
    save(1, "fsync", "rank1.safetensors", errno.EIO), save(1, "open", "rank1.json", errno.EDQUOT),
    save(1, "close", "rank1.json", errno.EIO), save(1, "open", "rank1.safetensors", errno.EROFS),
    save(1, "write", "rank1.safetensors", errno.ENOSPC, flags="--async-save"),
    save(0, "write", "manifest.json", errno.ENOSPC), save(0, "fsync", "", errno.EIO),
    save(0, "mkdir", "", errno.EROFS), save(0, "rename", "", errno.EIO),
    save(0, "rename", "", errno.EIO, flags="--async-save"),
    Case(Fault(0, "replace", r"/\.latest\.\d[^/]*$", errno.EIO, STEP), names="{}/save/latest"),
    Case(Fault(0, "open", r"/\.latest\.\d[^/]*$", errno.EROFS, STEP), names="{}/save/latest"),
    Case(Fault(0, "fsync", r"\.latest-pending\.[^/]*$", errno.EDQUOT, STEP), names="{}/save/.latest-pending"),
    Case(Fault(0, "write", r"/\.zero_to_fp32\.py\.[^/]*$", errno.ENOSPC), names="{}/save/zero_to_fp32.py"),
    Case(Fault(0, "open", r"/save/\.lock$", errno.EROFS), names="{}/save/.lock"),
    Case(Fault(0, "stat", "/save/global_step2$", errno.EIO, STEP), names="{}/save/global_step4"),
    Case(Fault(0, "scandir", "/save$", errno.EIO, STEP), names="{}/save", flags="--keep-last 1"),
]
KERNEL = [
    Case(Fault(1, "limit", "", step=STEP), names="rank1.safetensors"),
    Case(Fault(0, "file", "{}/save", step=STEP), names="{}/save: "),
    Case(Fault(1, "read-only", "{}/save", step=STEP), names="rank1.safetensors"),
    Case(Fault(0, "read-only", "{}/save", step=STEP), names="{}/save: "),
    Case(Fault(0, "tiny", "{}/save", step=STEP), names="{}/save/.staging-global_step4"),
]
OTHERS = [
    Case(Fault(0, "write", "/metrics$", errno.EIO, STEP), "--metrics-file", "{}/metrics",
         flags="--metrics-file {}/metrics"),
    Case(Fault(0, "write", "/events[^/]*$", errno.ENOSPC, STEP), "--tensorboard-dir", "{}/board",
         flags="--tensorboard-dir {}/board"),
    Case(Fault(1, "open", "/cache/", errno.EROFS), "--data-cache-path", "{}/cache/",
         flags="--train-data {}/text.jsonl --data-cache-path {}/cache"),
    Case(Fault(1, "open", r"corpus\.idx$", errno.EIO), "--train-data", "{}/corpus.idx", 3),
    Case(Fault(1, "open", r"text\.jsonl$", errno.EIO), "--train-data", "{}/text.jsonl", 3,
         flags="--train-data {}/text.jsonl --data-cache-path {}/cache"),
]
RESUMES = [
    Case(Fault(1, call, f"/global_step2/{name}$", number), "--load {}/save", name, 4, resumes=True)
    for call, name, number in (("open", "rank1.safetensors", errno.EIO), ("preadv", "rank1.safetensors", errno.EIO),
                               ("open", "manifest.json", errno.EACCES), ("open", "rank1.json", errno.ESTALE),
                               ("open", "shared.json", errno.EIO))]
CASES = [*SAVES, *KERNEL, *OTHERS, *RESUMES]


@cache
def why_no_mounts() -> str:
    try:
        done = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def job(folder: Path, fault: Fault, flags: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment.update(PYTHONPATH=str(ROOT), MEGATRON_DRIVE=json.dumps(asdict(fault)), DRIVE_AT=str(folder / "at"),
                       OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", broken_drive.__file__, *TINY,
         "--train-iters", "6", "--lr-decay-iters", "6",
         "--split", "1,0,0", "--save", str(folder / "save"), "--load", str(folder / "save"),
         *flags],
        cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)


def run(case: Case, folder: Path) -> None:
    """The fault, and all that is promised of it."""
    def here(text: str) -> str:
        return text.replace("{}", str(folder))

    write_corpus(folder / "corpus")
    (folder / "text.jsonl").write_text('{"text": "some words of a text, and then some more"}\n' * 40)
    os.utime(folder / "text.jsonl", ns=(0, time.time_ns() + 10**12))  # so each rank reads it, and relies on no sums
    flags = ["--train-data", str(folder / "corpus"), "--save-interval", "2", *here(case.flags).split()]
    if case.resumes:
        made = job(folder, Fault(9, "open", ""), [*flags, "--train-iters", "2"])
        assert made.returncode == 0, made.stderr
    done = job(folder, replace(case.fault, where=here(case.fault.where)), flags)
    seconds = time.monotonic() - float((folder / "at").read_text())
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    print(f"{seconds:.1f} s: {errors}")
    assert len(errors) == 1 and done.returncode == case.code, (done.returncode, done.stderr)
    assert case.flag.replace("{}", str(folder)) in errors[0] and here(case.names) in errors[0], errors[0]
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr
    assert seconds < LIMIT, f"{seconds:.1f} s: {errors[0]}"
    assert not any(alive(int((folder / f"at.{rank}").read_text())) for rank in range(2))
    kept = next((path for path in (folder / "save.moved", folder / "save") if (path / "latest").exists()), None)
    if kept is not None:
        verified = subprocess.run([sys.executable, "-m", "megatron.checkpoint", "verify", f"{kept}:global_step2"],
                                  cwd=ROOT, capture_output=True, text=True)
        assert verified.returncode == 0, verified.stderr
    assert (kept is not None) == (case.fault.step > 0 or case.resumes)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_drive_that_fails_on_one_rank_ends_the_job_with_one_line(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_drive_that_fails_on_one_rank_ends_the_job_with_one_line(case: Case, tmp_path: Path) -> None:
    if case.fault.call in ("read-only", "tiny") and (why := why_no_mounts()):
        pytest.skip(f"no mounts of one's own here: {why}")
    run(case, tmp_path)
