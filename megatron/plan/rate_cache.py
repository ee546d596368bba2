"""The cache of measured machine rates, a file for each precision, rank count and version; missing rates are probed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from data.storage import file_stamp, prefix_storage_errors, staged_file, wait_for_lock
from megatron.config.schema import require
from megatron.errors import ConfigError, PeerError
from megatron.launch.supervisor import die_with_parent
from megatron.package import DISTRIBUTION, __version__
from megatron.plan.activations import Device
from megatron.plan.footprint import PlannedRun
from megatron.plan.gpus import visible_gpus
from megatron.plan.machine_rates import MachineRates

PROBE_TIMEOUT = 600
"""Seconds; generous, for a busy machine."""
PROBE_LOCK = Path(tempfile.gettempdir()) / f"{DISTRIBUTION}-{os.getuid()}.measuring"
"""A lock per machine: several may share the folder of rates."""
MAX_ERROR_CHARACTERS = 300
"""Characters quoted from the end of a failed probe's stderr."""
RATES_HINT = "give --rates FILE, measured on a machine with GPUs"


def cached_or_measured_rates(run: PlannedRun, *, ranks_per_node: int | None = None, remeasure: bool = False,
                             path: str | None = None) -> MachineRates:
    """The rates to predict this run with: from the file `path`, or of this machine with up to `ranks_per_node` ranks.
    ConfigError if they are of another device or precision, or of a single rank."""
    rates = _read_rates(Path(path)) if path is not None else _local_rates(run, ranks_per_node or run.ranks, remeasure)
    require(rates.where.device == run.device,
            "the rates are of a CPU, and the run is planned for GPUs: plan it with --device cpu, or " + RATES_HINT
            if run.device == "cuda" else
            "the rates are of GPUs, and the run is planned for the CPU: plan it with --device cuda, or measure with "
            "its flags and --probe")
    require(rates.where.precision == run.config.precision.name,
            f"the rates are of {rates.where.precision}, and the run is in {run.config.precision.name}: measure with "
            "its flags and --probe")
    require(run.ranks == 1 or rates.where.ranks > 1,
            f"the rates are of one rank, which exchanges nothing, and the run has {run.ranks}: measure on a machine "
            "that serves two or more, and give --rates FILE")
    return rates


def _local_rates(run: PlannedRun, ranks_per_node: int, remeasure: bool) -> MachineRates:
    require(run.device == "cpu" or bool(visible_gpus()), "the run is planned for GPUs, and there is none here that it "
            "may use: plan it with --device cpu, or " + RATES_HINT)
    ranks = min(ranks_per_node, run.ranks, num_local_ranks(run.device))
    key = rates_key(run, ranks)
    file = rates_folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if not remeasure and (cached := _cached_rates(file, key)):
        return cached
    with prefix_storage_errors("the folder of measured rates"):
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file_stamp(file)
        with wait_for_lock(PROBE_LOCK):  # two probes at once would slow each other down
            if (not remeasure or file_stamp(file) != before) and (cached := _cached_rates(file, key)):
                return cached  # another process has measured them meanwhile
            text = _run_probe(run, ranks, key["machine"])
            with staged_file(str(file)) as out:
                out.write(text)
    return _read_rates(file)


def _cached_rates(file: Path, key: dict[str, str]) -> MachineRates | None:
    """None if the file is missing, damaged or of another key."""
    with suppress(ConfigError):
        rates = _read_rates(file)
        if all(str(getattr(rates.where, name)) == key[name] for name in ("machine", "device", "precision", "ranks")):
            return rates
    return None


def rates_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / DISTRIBUTION / "rates"


def num_local_ranks(device: Device) -> int:
    return len(visible_gpus()) if device == "cuda" else len(os.sched_getaffinity(0))


def rates_key(run: PlannedRun, ranks: int) -> dict[str, str]:
    """The properties that rates depend on, read without importing torch."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    if run.device == "cuda":
        name = " and ".join(sorted({gpu.model for gpu in visible_gpus()}))
    else:
        name = platform.machine()
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {"machine": f"{platform.node()}, {name}", "torch": torch, "device": run.device, "ranks": str(ranks),
            "precision": run.config.precision.name, "cores": str(len(os.sched_getaffinity(0))),
            "threads": os.environ.get("OMP_NUM_THREADS", ""), "version": __version__}


def _run_probe(run: PlannedRun, ranks: int, machine: str) -> bytes:
    """The rates as JSON."""
    print(f"measuring this machine with {ranks} rank{'s' * (ranks > 1)} in {run.config.precision.name}, about a "
          "minute; the rates are kept", file=sys.stderr, flush=True)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if run.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rates.json"
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "megatron.launch",
                   "--nproc-per-node", str(ranks), "-m", "megatron.plan.probe", str(file), machine,
                   run.config.precision.name, run.device]
        try:
            done = subprocess.run(command, env={**os.environ, **hidden}, stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, errors="replace", timeout=PROBE_TIMEOUT, check=False,
                                  preexec_fn=die_with_parent())
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"the probe of this machine took more than {PROBE_TIMEOUT} s: try again when it is less "
                            "busy, or give --rates FILE") from error
        if done.returncode or not file.exists():
            raise PeerError(f"the probe of this machine ended with {done.returncode}: "
                            f"{done.stderr.strip()[-MAX_ERROR_CHARACTERS:]}")
        return file.read_bytes()


def _read_rates(path: Path) -> MachineRates:
    try:
        return MachineRates.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--rates {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} holds no rates of a machine: measure them again with --probe") from error
