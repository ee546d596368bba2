"""Of ranks that end with the same error one says it, where no launcher of ours picks the line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import os, sys, time
from megatron.errors import ConfigError
from megatron.launch import exits
def main():
    time.sleep(float(os.environ["RANK"]) / 4)
    raise ConfigError({text})
sys.exit(exits.run(main))
"""
SAME, OWN, NAMED = '"no such flag"', '"no such file: " + "x" * int(os.environ["RANK"])', '"rank " + os.environ["RANK"]'


def begin(port: int, text: str, rank: int, **more: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "MEGATRON_LAUNCHER"}
    environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "here", "MASTER_PORT": str(port), **more}
    return subprocess.Popen([sys.executable, "-c", RANK.format(text=text)], cwd=ROOT, env=environ, text=True,
                            stderr=subprocess.PIPE)


def test_an_error_of_all_ranks_is_said_once_a_job_and_other_errors_by_everyone() -> None:
    jobs = {(1, SAME): 1, (2, SAME): 1, (3, OWN): 3, (4, NAMED): 1}
    ranks = {job: [begin(*job, rank) for rank in range(3)] for job in jobs}
    ranks |= {(5, SAME): [begin(5, SAME, rank, MEGATRON_LAUNCHER="1") for rank in range(3)],
              (6, SAME): [begin(6, SAME, rank, LOCAL_WORLD_SIZE="1") for rank in range(3)]}
    told = {job: "".join(rank.communicate(timeout=30)[1] for rank in of_it).splitlines()
            for job, of_it in ranks.items()}
    assert all(rank.returncode == 2 for of_it in ranks.values() for rank in of_it)
    assert all(line.startswith("error: ") for lines in told.values() for line in lines)
    assert {job: len(lines) for job, lines in told.items()} == {**jobs, (5, SAME): 3, (6, SAME): 3}


def test_a_launcher_that_ends_the_speaker_learns_its_code() -> None:
    speaker = begin(7, SAME, 0)
    assert speaker.stderr is not None and speaker.stderr.readline() == "error: no such flag\n"
    time.sleep(0.2)
    speaker.send_signal(signal.SIGTERM)
    assert speaker.wait(timeout=1) == 2
    speaker.stderr.close()
