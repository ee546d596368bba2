"""Engines: implementations of one ordered map, `Engine.map(function, items) -> results in order`.

`local` starts processes on this machine, `ray` tasks on a Ray cluster, and `slurm` an array job for each map. Functions
are those of a module other than `__main__`, perhaps with bound arguments; items are small, results too: large data is
in files on a disk that all machines share, which every function writes atomically, so it may run twice. Scheduling,
placement and retries are the engine's.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from data.compressed import read_errors_for
from data.input_files import checksum_in_threads
from data.parallel import MAX_PENDING_PER_WORKER, ordered_map, ordered_results
from data.storage import DataError, file_stamp, make_folder, staged_file

Item = TypeVar("Item")
Result = TypeVar("Result")

RAY_RETRIES = 3  # of a task whose worker or machine died
load_pickle_once = lru_cache(maxsize=1)(pickle.loads)  # a stage's function holds its models: load them once per process


@dataclass(frozen=True)
class Engine:
    workers: int = 1
    folder: Path = Path()  # for files of the engine, on a disk that all machines share

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """The results in order. Tasks may start only when the first result is asked for."""
        raise NotImplementedError

    def scan(self, function: Callable[[str], Result], paths: Sequence[str]) -> Iterator[Result]:
        """`map` for functions that only read the file at a path, such as checksums."""
        # The stamps tell an engine that keeps results between runs which files have changed.
        return self.map(partial(_scan_file, function=function), [(path, file_stamp(path)) for path in paths])


def _scan_file(task: tuple[str, object], function: Callable[[str], Result]) -> Result:
    path, _ = task
    with read_errors_for(path):
        return function(path)


class LocalEngine(Engine):
    """Processes of this machine, and threads where they are enough."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        return ordered_map(function, items, min(self.workers, len(items)))

    def scan(self, function: Callable[[str], Result], paths: Sequence[str]) -> Iterator[Result]:
        return checksum_in_threads(function, paths, self.workers)


class RayEngine(Engine):
    """Tasks on the cluster of RAY_ADDRESS, otherwise on one that Ray starts on this machine; `workers` is not used."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        try:
            import ray
        except ImportError as error:
            raise DataError("--engine ray needs a package: pip install ray") from error

        try:
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            raise DataError(f"--engine ray: {' '.join(str(error).split())[:200]}; start the cluster, or unset "
                            "RAY_ADDRESS (a cluster with tokens needs RAY_AUTH_MODE=token)") from error
        pickled, call = ray.put(pickle.dumps(function)), ray.remote(max_retries=RAY_RETRIES)(_call_pickled)
        in_flight = MAX_PENDING_PER_WORKER * int(ray.cluster_resources()["CPU"])
        try:
            yield from ordered_results(lambda item: call.remote(item, pickled, os.getcwd()).future(), items, in_flight)
        except ray.exceptions.RayTaskError as failed:
            raise failed.cause from None
        except ray.exceptions.RayError as lost:
            raise DataError(f"ray: a task was lost {RAY_RETRIES + 1} times: {' '.join(str(lost).split())[:200]}; out "
                            "of memory, perhaps: fewer CPUs per machine (ray start --num-cpus) need less") from lost


def _call_pickled(item: Any, pickled: bytes, folder: str) -> Any:
    os.chdir(folder)  # paths may be relative to the driver's
    return load_pickle_once(pickled)(item)


class SlurmEngine(Engine):
    """One array job per map. Its folder holds the pickled function and items, the job script, and a file for each
    result until all are there: the same map, run again, runs only the items without one. The options of the site
    (partition, account, memory, time) are sbatch's own variables, SBATCH_PARTITION, ..."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        # scancel goes by name: the same map for another output is another job
        content = pickle.dumps((function, items, self.folder.resolve()))
        name = f"webtext-{hashlib.sha256(content).hexdigest()[:16]}"
        folder = make_folder(self.folder.resolve() / name)
        results = [folder / f"{number}.result" for number in range(len(items))]
        if missing := [path for path in results if not path.exists()]:
            # Equal content is the same map: what it reads is named by stamps, or by a work folder of these inputs.
            _write(folder / "map", content)
            for path in missing:
                path.with_suffix(".error").unlink(missing_ok=True)  # of an earlier run
            tasks = min(self.workers, len(missing))
            command = shlex.join([sys.executable, "-m", "data.webtext", "worker", str(folder)])
            _write(folder / "missing", pickle.dumps([int(path.stem) for path in missing]))
            _write(folder / "job.sh", f"#!/bin/bash\n#SBATCH --job-name={name}\n#SBATCH --array=0-{tasks - 1}\n"
                   f"#SBATCH --output={folder}/%a.log\nexec {command} --share $SLURM_ARRAY_TASK_ID/{tasks}\n".encode())
            try:
                _run_slurm("scancel", "--name", name)  # the array of a driver that was killed
                _run_slurm("sbatch", "--wait", str(folder / "job.sh"))
            except BaseException:
                _run_slurm("scancel", "--name", name)
                raise
        for path in results:
            if not path.exists():
                _raise_failure(path, items, sum(not path.exists() for path in results))
        values = [pickle.loads(path.read_bytes()) for path in results]
        shutil.rmtree(folder)
        return iter(values)


def _run_slurm(*command: str) -> None:
    """Run a command of Slurm, which prints what is wrong; what counts are the results of its tasks."""
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise DataError(f"--engine slurm: cannot run {command[0]}: {error.strerror}; run on a machine of a Slurm "
                        "cluster") from error


def _raise_failure(result: Path, items: Sequence[object], missing: int) -> None:
    """Raise the error of an item; without one, its task was killed or never ran."""
    error = result.with_suffix(".error")
    if error.exists():
        raise pickle.loads(error.read_bytes())
    raise DataError(f"slurm: {missing} of {len(items)} items have no result, the first is {items[int(result.stem)]!r}; "
                    f"see {result.parent}/*.log, then run the same command again: finished ones are kept")


def _write(path: Path, content: bytes) -> None:
    with staged_file(path) as file:
        file.write(content)


def run_share(folder: Path, share: tuple[int, int]) -> None:
    """One task of an array: the items of its share that have no result."""
    function, items, _ = pickle.loads((folder / "map").read_bytes())
    for number in pickle.loads((folder / "missing").read_bytes())[share[0]::share[1]]:
        if not (result := folder / f"{number}.result").exists():
            try:
                _write(result, pickle.dumps(function(items[number])))
            except Exception as error:
                _write(result.with_suffix(".error"), pickle.dumps(error))


ENGINES: dict[str, type[Engine]] = {"local": LocalEngine, "ray": RayEngine, "slurm": SlurmEngine}
