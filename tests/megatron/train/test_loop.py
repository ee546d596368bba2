"""What a run changes in its process and puts back (garbage collection, --deterministic); how long a rank waits for its
peers: long while a run starts, and as long as a step may take afterwards; and that steps at a learning rate of 0 are
announced at the start."""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.tree import build_config
from megatron.errors import ConfigError
from megatron.optim.schedulers import LR_STYLES, LRSchedule
from megatron.train import build
from megatron.train.loop import Trainer, zero_lr_warning
from megatron.train.processor import cpu_flags, has_native_products, precision_notes
from tests.distributed import run_ranks
from tests.megatron.helpers import ROOT, TINY, steps, train
from tests.megatron.launch.processes import python
from tests.wires import accelerator_side


def test_garbage_is_looked_for_at_the_interval_and_at_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, frozen_before = list[tuple[bool, bool]](), gc.get_freeze_count()
    monkeypatch.setattr(gc, "collect", lambda: seen.append((gc.isenabled(), gc.get_freeze_count() > frozen_before)))
    train([*TINY, "--mock-data", "--train-iters", 7, "--gc-interval", 2])
    assert seen == [(True, False), *[(False, True)] * 3], "before the loop, whose objects are frozen; steps 2, 4 and 6"
    assert gc.isenabled() and gc.get_freeze_count() <= frozen_before


def in_force() -> tuple[int, bool, str | None]:
    return (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_a_later_run_of_the_process_has_what_its_own_flags_say(workspace, monkeypatch):
    during: list[tuple[int, bool, str | None]] = []

    def fails(trainer: Trainer, batches: list[Any]) -> Any:
        during.append(in_force())
        raise ZeroDivisionError

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(Trainer, "train_step", fails)
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = in_force()
    try:
        with pytest.raises(ZeroDivisionError):
            train([*TINY, "--mock-data", "--train-iters", 1, "--deterministic"])
        assert in_force() == before and during == [(2, False, workspace or ":4096:8")]
    finally:
        torch.use_deterministic_algorithms(False)


LIMIT, LATE = 3.0, 4.0
"""Seconds. A machine with much to do pauses a rank for one now and then."""


def late(action: Callable[..., Any], rank: int, is_late: Callable[..., bool], wait: Callable[[], object]) -> Callable[
        ..., Any]:
    """Rank 1 comes late to it."""
    def wrapped(*arguments: Any) -> Any:
        if rank == 1 and is_late(*arguments):
            wait()
        return action(*arguments)
    return wrapped


def until_there(path: Path, at_most: float = 20) -> None:
    end = time.monotonic() + at_most
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def gives_up(rank: int, world: int, folder: Path, late_at: int, waits_for: str) -> bool:
    """Whether the rank ends by itself. Rank 1 is late to the step after `late_at`; where that is the first one, at the
    start as well."""
    gave_up = folder / "rank 0 gave up"
    waits = {"a while": lambda: time.sleep(LATE), "the other to give up": lambda: until_there(gave_up)}
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(build, "model", late(build.model, rank, lambda *arguments: late_at == 0, waits["a while"]))
        patching.setattr(Trainer, "train_step", late(Trainer.train_step, rank, lambda trainer, batches:
                                                     trainer.engine.global_steps == late_at, waits[waits_for]))
        try:
            train([*TINY, "--mock-data", "--train-iters", 4, "--log-interval", 1, "--metrics-file", folder / "metrics",
                   "--distributed-timeout-seconds", LIMIT, "--startup-timeout-seconds", 60])
        except RuntimeError:
            if rank == 0:
                gave_up.touch()
            return True
    return False


def test_a_rank_that_is_late_at_the_start_and_to_the_first_step_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(gives_up, 2, tmp_path, 0, "a while") == [False, False]
    assert len(steps(tmp_path / "metrics")) == 4


def test_a_rank_that_is_late_to_a_later_step_is_not(tmp_path: Path) -> None:
    assert run_ranks(gives_up, 2, tmp_path, 2, "the other to give up") == [True, True]
    assert len(steps(tmp_path / "metrics")) == 2


@pytest.mark.parametrize("save_interval", [0, 1, 2, 3])
def test_the_start_up_timeout_ends_after_the_first_step(tmp_path: Path, save_interval: int) -> None:
    """On an accelerator too, where two steps may be processed at once."""
    with accelerator_side(True), patch("megatron.train.loop.set_timeout") as ends:
        train([*TINY, "--mock-data", "--train-iters", 4, "--save", tmp_path, "--save-interval", save_interval])
    assert ends.call_count == 1


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if "learning rate" in line and "warning" in line]


def test_idle_steps_are_those_a_count_finds() -> None:
    """Every end of the warm-up and of the decay, every length of the run, every step a resume may start at, with and
    without skipped steps."""
    for style, floor, peak, decay, warm, last, start, skipped in product(
            LR_STYLES, (0.0, 1e-5), (0.0, 1e-3), (1, 4, 6), (0, 1, 6), (0, 1, 4, 7), (0, 3, 4, 7), (0, 2)):
        if warm > decay or skipped > start:
            continue
        schedule = LRSchedule(style, peak, min(floor, peak), warm, decay)
        config = build_config({"train_iters": last, "lr": peak, "min_lr": min(floor, peak)})
        rates = [schedule(step) for step in range(start - skipped, start - skipped + max(0, last - start))]
        tail = next((k for k in range(len(rates) + 1) if not any(rates[k:])), 0)
        found = zero_lr_warning(config, schedule, start - skipped, start)
        idle = f"0 from iteration {start + tail + 1} on: the last {last - start - tail} of {last} iterations"
        assert found == "" if tail == len(rates) else idle in found


RUN = [*TINY, "--mock-data", "--lr", "1e-3", "--warmup", "0"]


def test_the_longer_run_that_used_to_be_documented_warns_and_what_the_warning_recommends_trains_to_the_end(tmp_path):
    saved = tmp_path / "s"
    assert not warnings(train([*RUN, "--train-iters", 4, "--save", saved])), "every step of it trains"
    longer = [*RUN, "--train-iters", 8, "--load", saved, "--metrics-file", tmp_path / "m"]
    note, = warnings(train([*longer, "--lr-decay-iters", 4]))
    assert "0 from iteration 5 on: the last 4 of 8" in note
    note, = warnings(train([*longer, "--use-checkpoint-lr-scheduler"]))
    assert "0 from iteration 5 on" in note and "--override-lr-scheduler" in note
    assert [step["learning_rate"] for step in steps(tmp_path / "m")] == [0.0] * 8
    for flags in ([], ["--lr-decay-iters", 8], ["--lr-decay-iters", 4, "--min-lr", 1e-4]):
        (tmp_path / "m").unlink()
        assert not warnings(train([*longer, "--override-lr-scheduler", *flags]))
        assert min(step["learning_rate"] for step in steps(tmp_path / "m")) > 0


def test_a_run_of_wsd_resumes_bit_for_bit_within_every_phase(tmp_path: Path) -> None:
    wsd = [*RUN[:-2], "--lr-decay-style", "WSD", "--lr-wsd-decay-style", "exponential", "--lr-wsd-decay-iters", 3,
           "--lr-warmup-iters", 2, "--train-iters", 8]
    train([*wsd, "--metrics-file", tmp_path / "whole"])
    part = [*wsd, "--save", tmp_path / "s", "--load", tmp_path / "s", "--metrics-file", tmp_path / "parts"]
    for _ in range(8):
        train([*part, "--exit-interval", 1])
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    rates = [step["learning_rate"] for step in steps(tmp_path / "whole")]
    assert rates[:6] == [5e-4, *[1e-3] * 5] and rates[6] > rates[7] > 0
    with pytest.raises(ConfigError, match="--lr-wsd-decay-iters 3 in the checkpoint, 4 here"):
        train([*part, "--train-iters", 9, "--lr-decay-iters", 8, "--lr-wsd-decay-iters", 4])


# ---- the processor -------------------------------------------------------------------------------------------------

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
    done = python("-X", "importtime", "-m", "megatron.train.processor")
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
    return int(python("-c", program, setting, GLIBC_TUNABLES=shipped.group()).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_what_was_freed_is_taken_again_without_fresh_pages_but_for_large_blocks_where_memory_is_short() -> None:
    """12 blocks of 14 MB (3,584 pages each) after 64 of 3 MB, between nodes that stay (without a stock, some 12,000
    fresh pages). Megabytes held when blocks of 40, 30 and 20 have been freed, and three of 2 have not; also where a run
    of the other kind came before in the process."""
    assert number_from(FRESH_PAGES) < 3584
    assert number_from(HELD, "but large ones, then all") > 40
    assert number_from(HELD, "all, then but large ones") < 12
