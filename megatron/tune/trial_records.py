"""The trials of a search as JSON lines on disk, so that a killed search continues with the next trial.

The first line is the key (all untuned settings, the machine, its torch); trials under another key are refused.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.storage import hold_writer_lock, make_folder, prefix_storage_errors, write_errors_for
from megatron.config.schema import flag_name
from megatron.config.tree import AutotuningConfig, LogConfig, SaveConfig
from megatron.errors import ConfigError
from megatron.package import __version__
from megatron.plan.activations import Device
from megatron.plan.footprint import PlannedRun
from megatron.tune.search import TrialResult
from megatron.tune.space import TuningChoice, query_gpus, samples_per_step


def trial_key(requested: PlannedRun) -> dict[str, Any]:
    """What trials must have in common: the settings that are not tuned, and the machine."""
    config, zero, tuning = requested.config, requested.config.zero, requested.config.autotuning
    samples = samples_per_step(requested)
    gathered = 1 if zero.allgather_bucket_size == zero.reduce_bucket_size else zero.allgather_bucket_size
    untuned = replace(
        config, save=SaveConfig(), log=LogConfig(), autotuning=AutotuningConfig(),
        parallel=replace(config.parallel, model_parallel_size=1), zero=replace(
            zero, zero_stage=0, reduce_bucket_size=1, allgather_bucket_size=gathered),
        recompute=replace(config.recompute, checkpoint_activations=False),
        offload=replace(config.offload, offload_optimizer_device="none", offload_param_device="none"),
        train=replace(config.train, batch_size=1, global_batch_size=samples, train_iters=1))
    settings = {flag_name(name): value for section in untuned.as_dict().values() for name, value in section.items()}
    return {"settings": json.loads(json.dumps(settings)), "samples": samples,
            "steps": [tuning.autotuning_start_profile_step, tuning.autotuning_end_profile_step],
            "machine": f"{platform.node()}, {_processor(requested.device)}", "torch": version("torch"),
            "device": requested.device, "ranks": requested.ranks, "precision": config.precision.name,
            "cores": len(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS", ""),
            "version": __version__}


def _processor(device: Device) -> str:
    if device == "cuda":
        return " and ".join(sorted(set(query_gpus("name"))))
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


TRIALS_FILE = "trials.jsonl"
RESULTS_FLAG = "--autotuning-results-dir"
MAX_DIFFERENCES = 8
"""Maximum number of differences in an error message."""


@contextmanager
def open_trial_records(folder: str, key: Mapping[str, Any], *, overwrite: bool) -> Iterator[TrialRecords]:
    """Holds a lock: a second search with this folder fails."""
    with prefix_storage_errors(RESULTS_FLAG):
        make_folder(folder)
    with ExitStack() as stack:
        with prefix_storage_errors(RESULTS_FLAG):
            stack.enter_context(hold_writer_lock(Path(folder) / TRIALS_FILE))
        yield TrialRecords(folder, key, overwrite=overwrite)


class TrialRecords:
    """The trials under `key`."""

    def __init__(self, folder: str, key: Mapping[str, Any], *, overwrite: bool) -> None:
        self.folder, self._path = Path(folder), Path(folder) / TRIALS_FILE
        self.trials: dict[TuningChoice, TrialResult] = {}
        """In order of the first measurement."""
        lines = [] if overwrite or not self._path.exists() else self._read_complete_lines()
        if not lines:
            self._write({"subject": dict(key)}, mode="w")
            return
        head, *rest = [json.loads(line) for line in lines]
        if not isinstance(head.get("subject", {}), dict):
            raise self._bad_line_error()
        if others := [*_differences(head.get("subject", {}), key)]:
            more = [f"and {len(others) - MAX_DIFFERENCES} more"] * (len(others) > MAX_DIFFERENCES)
            raise ConfigError(f"{RESULTS_FLAG} {folder} has trials of another run or machine "
                              f"({'; '.join([*others[:MAX_DIFFERENCES], *more])}): name another folder, or start "
                              "again with --autotuning-overwrite")
        for record in rest:
            try:
                result = TrialResult(**record["outcome"])
                self.trials[TuningChoice(**record["choice"])] = replace(result, times=tuple(result.times))
            except (KeyError, TypeError) as error:
                raise self._bad_line_error() from error

    def add(self, choice: TuningChoice, result: TrialResult, predicted: float) -> None:
        """Add the result, or replace an earlier one of the choice."""
        self.trials[choice] = result
        self._write({"trial": list(self.trials).index(choice) + 1, "choice": asdict(choice), "predicted": predicted,
                     "outcome": asdict(result)}, mode="a")

    def remove(self, choices: Sequence[TuningChoice]) -> None:
        for choice in choices:
            del self.trials[choice]
        removed = [asdict(choice) for choice in choices]
        self._replace([line for line in self._read_complete_lines() if json.loads(line).get("choice") not in removed])

    def _read_complete_lines(self) -> list[str]:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        lines = text[:text.rfind("\n") + 1].splitlines()
        try:
            are_records = all(isinstance(json.loads(line), dict) for line in lines)
        except ValueError as error:
            raise self._bad_line_error() from error
        if not are_records:
            raise self._bad_line_error()
        if not text.endswith("\n"):  # remove the partial line of a killed search
            self._replace(lines)
        return lines

    def _bad_line_error(self) -> ConfigError:
        return ConfigError(f"{self._path} holds a line that is no record of a trial: start again with "
                           "--autotuning-overwrite")

    def _replace(self, lines: Sequence[str]) -> None:
        with prefix_storage_errors(RESULTS_FLAG), write_errors_for(self._path):
            fresh = self._path.with_suffix(".new")
            fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(fresh, self._path)

    def _write(self, record: Mapping[str, Any], mode: str) -> None:
        with prefix_storage_errors(RESULTS_FLAG), write_errors_for(self._path), \
                open(self._path, mode, encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    def as_text(value: Any) -> str:
        return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value)

    for name in sorted({*there, *here}):
        before, now = there.get(name), here.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now)
        elif before != now:
            yield "other settings" if name == "settings" else f"{name} {as_text(before)} there, {as_text(now)} here"
