"""The cache of measured machine rates on disk, one file for each precision, rank count and version; missing rates are
probed.
"""

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

from data.storage import prefix_storage_errors, staged_file, wait_for_lock
from megatron.config.schema import require
from megatron.errors import ConfigError, PeerError
from megatron.launch.supervisor import die_with_parent
from megatron.package import DISTRIBUTION, __version__
from megatron.plan.activations import Device
from megatron.plan.footprint import PlannedRun
from megatron.plan.gpus import visible_gpus
from megatron.plan.machine_rates import MachineRates

PROBE_TIMEOUT = 600
"""Seconds of a probe, on a machine that is very busy."""
PROBE_LOCK = Path(tempfile.gettempdir()) / f"{DISTRIBUTION}-{os.getuid()}.measuring"
"""Of this machine: the folder of rates may be one that many share."""
MAX_ERROR_CHARACTERS = 300
"""Letters of what a probe that failed said last."""
RATES_HINT = "give --rates FILE, measured on a machine with GPUs"


def cached_or_measured_rates(run: PlannedRun, *, ranks_per_node: int | None = None, remeasure: bool = False,
                             path: str | None = None) -> MachineRates:
    """Those that the time of this run is made of; `ranks_per_node` of them work on one machine."""
    found = _read_rates(Path(path)) if path is not None else _local_rates(run, ranks_per_node or run.ranks, remeasure)
    require(found.where.device == run.device,
            "the rates are of a CPU, and the run is planned for GPUs: plan it with --device cpu, or " + RATES_HINT
            if run.device == "cuda" else
            "the rates are of GPUs, and the run is planned for the CPU: plan it with --device cuda, or measure with "
            "its flags and --probe")
    require(found.where.precision == run.config.precision.name,
            f"the rates are of {found.where.precision}, and the run is in {run.config.precision.name}: measure with "
            "its flags and --probe")
    require(run.ranks == 1 or found.where.ranks > 1,
            f"the rates are of one rank, which exchanges nothing, and the run has {run.ranks}: measure on a machine "
            "that serves two or more, and give --rates FILE")
    return found


def _local_rates(run: PlannedRun, ranks_per_node: int, remeasure: bool) -> MachineRates:
    require(run.device == "cpu" or bool(visible_gpus()), "the run is planned for GPUs, and there is none here that it "
            "may use: plan it with --device cpu, or " + RATES_HINT)
    ranks = min(ranks_per_node, run.ranks, num_local_ranks(run.device))
    found = rates_key(run, ranks)
    file = rates_folder() / f"{hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if not remeasure and (kept := _cached_rates(file, found)):
        return kept
    with prefix_storage_errors("the folder of measured rates"):
        file.parent.mkdir(parents=True, exist_ok=True)
        before = _mtime(file)
        with wait_for_lock(PROBE_LOCK):  # two at once would measure each other
            if (not remeasure or _mtime(file) != before) and (kept := _cached_rates(file, found)):
                return kept  # which another has measured meanwhile
            text = _run_probe(run, ranks, found["machine"])
            with staged_file(str(file)) as out:
                out.write(text)
    return _read_rates(file)


def _cached_rates(file: Path, here: dict[str, str]) -> MachineRates | None:
    """None: there are none, or they are of something else, or damaged."""
    with suppress(ConfigError):
        rates = _read_rates(file)
        if all(str(getattr(rates.where, name)) == here[name] for name in ("machine", "device", "precision", "ranks")):
            return rates
    return None


def _mtime(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def rates_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / DISTRIBUTION / "rates"


def num_local_ranks(device: Device) -> int:
    """Ranks that this machine can serve."""
    return len(visible_gpus()) if device == "cuda" else len(os.sched_getaffinity(0))


def rates_key(run: PlannedRun, ranks: int) -> dict[str, str]:
    """What rates depend on, as far as it is known without torch."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    name = " and ".join(sorted({gpu.model for gpu in visible_gpus()})) if run.device == "cuda" else _processor_name()
    return {"machine": f"{platform.node()}, {name}", "torch": torch, "device": run.device, "ranks": str(ranks),
            "precision": run.config.precision.name, "cores": str(len(os.sched_getaffinity(0))),
            "threads": os.environ.get("OMP_NUM_THREADS", ""), "version": __version__}


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.machine())


def _run_probe(run: PlannedRun, ranks: int, machine: str) -> bytes:
    """What the probe has written."""
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
        raise ConfigError(f"{path} holds no rates of a machine: measure them anew with --probe") from error
