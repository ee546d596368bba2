"""Engines: the same bytes from local processes, Ray and Slurm arrays, also after kills of workers and of the driver.

Slurm is simulated: a `sbatch` on PATH runs the tasks of an array as processes of this machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from data.storage import DataError, UsageError
from data.webtext import exchange
from data.webtext.__main__ import main, words_of_config
from data.webtext.dedup import run_dedup
from data.webtext.engines import LocalEngine, SlurmEngine
from tests.data.helpers import in_a_fork
from tests.data.webtext.planted import babble, edited, plant, write
from tests.data.webtext.stages import square_once
from tests.data.webtext.test_dedup import visible
from tests.data.webtext.test_runner import contents

ROOT = Path(__file__).resolve().parents[3]
SBATCH = """#!/bin/bash
[[ $1 == --wait ]] || exit 1
last=$(sed -n 's/^#SBATCH --array=0-//p' "$2")
for task in $(seq 0 "$last"); do SLURM_ARRAY_TASK_ID=$task bash "$2" & done
wait
"""
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("sbatch", SBATCH), ("scancel", "#!/bin/bash\n")):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(script)
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages with copies, copies of copies, and repeated addresses."""
    rng, folder = random.Random(2), tmp_path_factory.mktemp("engines") / "raw"
    texts = [page.text for page in plant(8, originals=12, words=150)]
    for _ in range(8):
        family = [babble(rng, 150)]
        for _ in range(6):
            family.append(edited(rng, rng.choice(family[-2:]), 0.012))
        texts += family
    rng.shuffle(texts)
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(
        json.dumps({"text": text, "url": f"http://example.org/{rng.randrange(400)}"}) + "\n" for text in texts))
    return folder


def arguments(raw: Path, output: Path, *more: str) -> list[str]:
    return ["run", str(raw), "--output", str(output), "--shard-bytes", "20K", "--workers", "1", "--memory", "1M",
            "--tokenizer-type", "byte", "--skip", "extract", "clean", "language", *more]


@pytest.fixture(scope="module")
def whole(raw: Path) -> dict[str, bytes]:
    main(arguments(raw, raw.parent / "whole"))
    return contents(raw.parent / "whole")


# --------------------------------------------------------------------------------------------------- one engine

def test_an_array_runs_what_has_no_result_and_names_what_failed(slurm: None, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    items = [(number, calls) for number in range(7)]
    engine = SlurmEngine(3, tmp_path / "engine")
    for function, told, run_again in (
            # The second of three tasks has items 1 and 4.
            (partial(square_once, killed=1), r"2 of 7 items have no result, the first is .1, .*\.log", {"1.1", "4.0"}),
            (partial(square_once, refused=5), "^item 5 is refused", {"5.1"})):
        with pytest.raises(DataError, match=told):
            list(engine.map(function, items))
        before = {path.name for path in calls.iterdir()}
        assert list(engine.map(function, items)) == [number ** 2 for number in range(7)]
        assert {path.name for path in calls.iterdir()} - before == run_again
        for path in calls.iterdir():
            path.unlink()
    assert not [*(tmp_path / "engine").iterdir()], "results go when all are there"


def test_a_job_is_of_one_output_and_an_error_of_one_run(slurm: None, tmp_path: Path) -> None:
    calls, cancelled = tmp_path / "calls", tmp_path / "cancelled"
    calls.mkdir()
    (tmp_path / "bin" / "scancel").write_text(f'#!/bin/bash\necho "$2" >> {cancelled}\n')
    items = [(number, calls) for number in range(4)]
    for output in ("one", "two"):
        with pytest.raises(DataError, match="item 2 is refused"):
            list(SlurmEngine(2, tmp_path / output).map(partial(square_once, refused=2), items))
        (calls / "2.0").unlink()
    assert len({*cancelled.read_text().split()}) == 2, "or a run would cancel the array of another output"
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\n")  # a job whose tasks all die
    with pytest.raises(DataError, match="1 of 4 items have no result"):
        list(SlurmEngine(2, tmp_path / "one").map(partial(square_once, refused=2), items))


def test_without_slurm_or_a_worker_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="--engine slurm: cannot run scancel: No such file"):
        list(SlurmEngine(2, tmp_path).map(square_once, [(1, tmp_path)]))
    with pytest.raises(DataError, match="a worker process died"):
        list(LocalEngine(2).map(partial(square_once, killed=1), [(number, tmp_path) for number in range(4)]))


# ----------------------------------------------------------------------------------------------- same bytes

@pytest.mark.slow
def test_an_array_makes_the_same_bytes(slurm: None, raw: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    main(arguments(raw, tmp_path / "out", "--engine", "slurm", "--workers", "2"))
    assert contents(tmp_path / "out") == whole


def run_in_process(words: list[str], cpus: int | None = None) -> subprocess.Popen[bytes]:
    start = "" if cpus is None else f"import ray; ray.init(num_cpus={cpus}, log_to_driver=False); "
    code = f"{start}import runpy; runpy.run_module('data.webtext', run_name='__main__', alter_sys=True)"
    return subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("cpus", [1, 2, 4])
def test_ray_makes_the_same_bytes(cpus: int, raw: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    assert run_in_process(arguments(raw, tmp_path / "out", "--engine", "ray"), cpus).wait(300) == 0
    assert contents(tmp_path / "out") == whole


# ----------------------------------------------------------------------------------------------------- kills

def test_a_dedup_killed_anywhere_between_its_tasks_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PARTITION_BYTES", 1)
    shards = write(plant(8, originals=6, words=100), tmp_path / "in", 3)

    def deduplicate(name: str) -> Callable[[], object]:
        return lambda: list(run_dedup(shards, tmp_path / name, LocalEngine(), memory=1 << 14))

    events = in_a_fork(deduplicate("whole"))
    assert events > 50
    for stop in range(1, events, 9):
        assert in_a_fork(deduplicate("out"), stop) == -1
    assert in_a_fork(deduplicate("out")) > 0 and visible(tmp_path / "out") == visible(tmp_path / "whole")


def descendants(process: int, word: str) -> Iterator[int]:
    """Processes below `process` whose command line has this word."""
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        try:
            if word in Path(f"/proc/{child}/cmdline").read_bytes().decode():
                yield int(child)
            yield from descendants(int(child), word)
        except OSError:  # it has ended
            continue


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "worker"), [
    ("local", "spawn_main"), pytest.param("ray", "ray::_call_pickled", marks=needs_ray)])
@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_workers_and_drivers_are_killed_at_any_time(engine, worker, victim, raw, whole, tmp_path):
    rng, killed = random.Random(victim), 0
    words = arguments(raw, tmp_path / "out", "--engine", engine, "--workers", "2")
    for _ in range(4):
        process = run_in_process(words, 2 if engine == "ray" else None)
        end = time.monotonic() + rng.uniform(2, 12)
        while process.poll() is None and time.monotonic() < end + 20:
            time.sleep(0.05)
            found = [process.pid] if victim == "driver" else [*descendants(process.pid, worker)]
            if time.monotonic() > end and found:
                os.kill(rng.choice(found), signal.SIGKILL)
                killed += 1
                break
        process.wait(300)
        assert (engine, victim) != ("ray", "worker") or process.returncode == 0, "Ray runs its task again"
        left = contents(tmp_path / "out") if (tmp_path / "out").exists() else {}
        assert left == {name: whole[name] for name in left}
    assert killed
    assert run_in_process(words, 2 if engine == "ray" else None).wait(300) == 0
    assert contents(tmp_path / "out") == whole


# ---------------------------------------------------------------------------------------------- run CONFIG

@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_a_configuration_file_is_flags_and_flags_win(raw, whole, tmp_path, suffix):
    settings = {"inputs": [str(raw)], "output": str(tmp_path / "mine"), "shard_bytes": "20K", "workers": 1,
                "memory": "1M", "tokenizer-type": "byte", "skip": ["extract", "clean", "language"],
                "exact_only": False, "seed": 9, "min_tokens": 0, "keep": ["fr", "de"]}
    config = tmp_path / f"web.{suffix}"
    config.write_text("".join(f"{name}{': ' if suffix == 'yaml' else ' = '}{json.dumps(value)}\n"
                              for name, value in settings.items()))
    main(["run", str(config), "--seed=0", "--output", str(tmp_path / "out")])
    assert contents(tmp_path / "out") == whole and not (tmp_path / "mine").exists()
    assert words_of_config(config, [])[-4:] == ["--min-tokens=0", "--keep", "fr", "de"]
    assert "--keep" not in words_of_config(config, ["--keep=en"]), "which would be one language more"


@pytest.mark.parametrize(("content", "told"), [
    ("treshold: 0.7\n", "unknown flag --treshold: did you mean --threshold?"),
    ("shard: 0/2\n", "unknown flag --shard"), ("threshold: high\n", "--threshold: invalid float value: 'high'"),
    ("keep: no\n", "found 'false'"), ("min_score: 2\n", "--min-score: expected a number from 0 to 1, found '2'"),
    ("seed: 1\nseed: 2\n", "web.yaml: seed is given twice; keep one"), ("[1\n", "web.yaml: no valid YAML: ")])
def test_a_wrong_name_or_value_in_a_configuration_file_is_named(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text(content if content.startswith("[") else f"inputs: raw\noutput: out\n{content}")
    with pytest.raises(UsageError) as caught:
        main(["run", str(tmp_path / "web.yaml")])
    assert told in str(caught.value)
