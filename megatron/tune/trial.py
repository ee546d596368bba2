"""One trial: a few real training steps in a process group of its own, started by the launcher, with a timeout.

    done      the median time of the measured steps is the result
    memory    out of memory, or killed by the system for it
    hang      no first step, or no end, within the timeout; all its processes are killed
    crash     any other end, also exit code 0 without the times of all steps

Each attempt has its own folder. Killing the tuner also kills its running trial.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from pathlib import Path
from statistics import median

from data.storage import prefix_storage_errors, write_errors_for
from megatron.config.tree import AutotuningConfig, Config, LogConfig, ProfileConfig, SaveConfig, config_to_flags
from megatron.distributed.exit_codes import MEMORY_CLASSES, MEMORY_TEXTS
from megatron.launch.supervisor import die_with_parent
from megatron.metrics.sinks import MetricsFileReader
from megatron.plan.footprint import PlannedRun
from megatron.tune.search import TrialResult


# After the first step a trial may take SLOWDOWN_LIMIT times the predicted seconds of its steps, and EXTRA_SECONDS.
EXTRA_SECONDS, SLOWDOWN_LIMIT = 180.0, 10.0

RESULTS_FLAG = "--autotuning-results-dir"
TRAINER = ("-m", "pretrain_gpt2")
SCALE = 2.0**8  # maximum loss scale in fp16
POLL_SECONDS = 0.5
TERMINATE_SECONDS = 5.0  # seconds between SIGTERM and SIGKILL
# In error lines of this program, torch, the system, NVIDIA's libraries and the launcher.
OOM_PATTERN = re.compile("|".join(map(re.escape, (
    *MEMORY_CLASSES, *MEMORY_TEXTS, "out of memory", "Cannot allocate memory", "_STATUS_ALLOC_FAILED", "(SIGKILL)"))))
ERROR, POINTER = re.compile(r"error:|(\[rank\d+\]: )?[\w.]*(Error|Exception)\b"), "its own output above says why"
MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class TrialRunner:
    """Runs trials."""

    folder: Path  # for the output of trials
    first_step: int  # the first measured step
    last_step: int
    time_limit: float | None = None  # seconds of a trial, in place of our limits

    def run(self, number: int, run: PlannedRun, predicted: float) -> TrialResult:
        with prefix_storage_errors(RESULTS_FLAG), write_errors_for(self.folder):
            for attempt in count(1):
                place = self.folder / (f"{number:03}" if attempt == 1 else f"{number:03}-{attempt}")
                with suppress(FileExistsError):
                    place.mkdir(parents=True)
                    break
        metrics = place / "metrics.jsonl"
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []),
                   "-m", "megatron.launch", "--nproc-per-node",
                   str(run.ranks), *TRAINER, *config_to_flags(trial_config(run, metrics, self.last_step).settings())]
        # until a first step is logged: imports, rendezvous, the index, building, compiling
        first_step, total = run.config.parallel.startup_limit, inf
        steps = EXTRA_SECONDS + SLOWDOWN_LIMIT * predicted * self.last_step
        if self.time_limit is not None:
            first_step, steps, total = inf, inf, self.time_limit
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if run.device == "cpu" else {}
        with open(place / "output.txt", "w+", encoding="utf-8", errors="replace") as output:
            end = _run_process(command, {**os.environ, **hidden}, output.fileno(), metrics, first_step=first_step,
                               steps=steps, total=total)
            output.seek(0)
            text = output.read()
        if isinstance(end, str):
            return TrialResult("hang", words=end)
        if end == 0:
            steps_seconds = [seconds for number, seconds in _recorded_steps(metrics)
                             if self.first_step <= number <= self.last_step]
            if len(steps_seconds) == self.last_step - self.first_step + 1:
                return TrialResult("done", median(steps_seconds))
            return TrialResult("crash", words="ended well without the times of steps "
                                              f"{self.first_step} to {self.last_step}")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if ERROR.match(line) and not line.endswith(POINTER)]
        is_out_of_memory = end in (-signal.SIGKILL, 128 + signal.SIGKILL) or any(map(OOM_PATTERN.search, errors))
        return TrialResult("memory" if is_out_of_memory else "crash",
                           words=(errors or lines or [f"exit code {end}"])[-1][:MAX_ERROR_CHARACTERS])


def trial_config(run: PlannedRun, metrics: Path, steps: int) -> Config:
    """The run without loading, saving and evaluation, which logs to `metrics` and exits after `steps` steps;
    --train-iters, and so the schedules, stay as they are. The loss scale is low, because an overflow skips the update.
    """
    config = run.config
    scale = min(config.precision.initial_loss_scale, max(SCALE, config.precision.min_scale))
    return replace(config, precision=replace(config.precision, initial_loss_scale=scale),
                   train=replace(config.train, train_iters=max(config.train.train_iters, steps), eval_interval=0,
                                 exit_interval=steps, exit_duration_in_mins=0.0), save=SaveConfig(),
                   log=LogConfig(metrics_file=str(metrics), log_interval=0, sample_tokens=0), profile=ProfileConfig(),
                   autotuning=AutotuningConfig())


def _run_process(command: Sequence[str], environment: dict[str, str], output: int, metrics: Path, *,
                 first_step: float, steps: float, total: float) -> int | str:
    """The exit code, or why it was killed: seconds until the first step, after it, and in all. Its process group ends
    before this returns or raises, and with the tuner."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                               start_new_session=True, preexec_fn=die_with_parent())
    began, stepped = time.monotonic(), None
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS)
            waited = time.monotonic() - began
            if stepped is None and _recorded_steps(metrics):
                stepped = waited
            if waited >= total:
                return f"not over after {total:g} s"
            if stepped is None and waited >= first_step:
                return f"no step in {first_step:.0f} s"
            if stepped is not None and waited - stepped >= steps:
                return f"not over {steps:.0f} s after its first step"
    finally:
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:  # else another process may have its id by now
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, ending)
                    process.wait(TERMINATE_SECONDS)


def _recorded_steps(metrics: Path) -> list[tuple[int, float]]:
    """(number, seconds) of the steps logged so far, without skipped ones, which have no update."""
    records = MetricsFileReader(metrics) if metrics.exists() else ()
    return [(record["iteration"], record["step_ms"] / 1e3) for record in records
            if "step_ms" in record and not record.get("skipped")]
