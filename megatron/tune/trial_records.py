"""The trials of a search as JSON lines on disk, so that a killed search continues with the next trial.

The first line is the key (all untuned settings, the machine, its torch); trials under another key are refused. The
file is replaced as a whole, so that no kill leaves half a line.
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

from data.storage import hold_writer_lock, make_folder, prefix_storage_errors, staged_file
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
    with ExitStack() as stack:
        with prefix_storage_errors(RESULTS_FLAG):
            make_folder(folder)
            stack.enter_context(hold_writer_lock(Path(folder) / TRIALS_FILE))
        yield TrialRecords(folder, key, overwrite=overwrite)


class TrialRecords:
    """The trials under `key`: a line each, replaced as a whole when a trial is repeated or removed."""

    def __init__(self, folder: str, key: Mapping[str, Any], *, overwrite: bool) -> None:
        self.folder, self._path, self._key = Path(folder), Path(folder) / TRIALS_FILE, dict(key)
        self.trials: dict[TuningChoice, TrialResult] = {}
        """In order of the first measurement."""
        if not overwrite and self._path.exists():
            self._read()
        self._write()

    def add(self, choice: TuningChoice, result: TrialResult) -> None:
        """Add the result, or replace an earlier one of the choice."""
        self.trials[choice] = result
        self._write()

    def remove(self, choices: Sequence[TuningChoice]) -> None:
        for choice in choices:
            del self.trials[choice]
        self._write()

    def _read(self) -> None:
        try:
            head, *records = map(json.loads, self._path.read_text(encoding="utf-8", errors="replace").splitlines())
            others = [*_differences(head["subject"], self._key)]
            for record in records:
                choice, result = TuningChoice(**record["choice"]), TrialResult(**record["outcome"])
                self.trials[choice] = replace(result, times=tuple(result.times))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self._path} holds a line that is no record of a trial: start again with "
                              "--autotuning-overwrite") from error
        if others:
            more = [f"and {len(others) - MAX_DIFFERENCES} more"] * (len(others) > MAX_DIFFERENCES)
            raise ConfigError(f"{RESULTS_FLAG} {self.folder} has trials of another run or machine "
                              f"({'; '.join([*others[:MAX_DIFFERENCES], *more])}): name another folder, or start "
                              "again with --autotuning-overwrite")

    def _write(self) -> None:
        records: list[dict[str, Any]] = [{"subject": self._key}]
        records += [{"trial": number, "choice": asdict(choice), "outcome": asdict(result)}
                    for number, (choice, result) in enumerate(self.trials.items(), 1)]
        with prefix_storage_errors(RESULTS_FLAG), staged_file(self._path, "w") as file:
            file.write("".join(f"{json.dumps(record)}\n" for record in records))


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    def as_text(value: Any) -> str:
        return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value)

    for name in sorted({*there, *here}):
        before, now = there.get(name), here.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now)
        elif before != now:
            yield "other settings" if name == "settings" else f"{name} {as_text(before)} there, {as_text(now)} here"
