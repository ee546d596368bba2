"""Of ranks that end with the same error one says it, where no launcher of ours picks the line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.megatron.launch.processes import PATIENCE, begin, catches, wait_until

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import os, sys, time
from megatron.errors import ConfigError
from megatron.distributed import exit_codes
from megatron.distributed import exit_codes
exit_codes.LINGER_SECONDS *= float(os.environ["PATIENT"])
def main():
    open(os.environ["MASTER_PORT"] + "-" + os.environ["RANK"], "w").close()
    while len(os.listdir()) < int(os.environ["COMPANY"]):
        time.sleep(0.01)
    time.sleep(float(os.environ["RANK"]) / 10)
    raise ConfigError({text})
sys.exit(exit_codes.run(main, is_job=True))
"""
"""All ranks of all jobs meet in a folder: once one has spoken, nobody has Python's start before him. (A job leaves
signals alone, so that SIGTERM is caught from when the speaker waits for others.)"""
SAME, OWN, NAMED = '"no such flag"', '"no such file: " + "x" * int(os.environ["RANK"])', '"rank " + os.environ["RANK"]'


def speak(folder: Path, port: int, text: str, rank: int, **more: str) -> subprocess.Popen[str]:
    """The address is of these tests alone: others on this machine may run them at the same time."""
    environ = {name: value for name, value in os.environ.items() if name != "MEGATRON_LAUNCHER"}
    environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": f"here {os.getpid()}", "MASTER_PORT": str(port),
                "PYTHONPATH": str(ROOT), "COMPANY": "18", "PATIENT": "1", **more}
    return begin([sys.executable, "-c", RANK.format(text=text)], cwd=folder, env=environ, text=True,
                 stderr=subprocess.PIPE)


def test_an_error_of_all_ranks_is_said_once_a_job_and_other_errors_by_everyone(tmp_path: Path) -> None:
    jobs = {(1, SAME): 1, (2, SAME): 1, (3, OWN): 3, (4, NAMED): 1}
    ranks = {job: [speak(tmp_path, *job, rank) for rank in range(3)] for job in jobs}
    ranks |= {(5, SAME): [speak(tmp_path, 5, SAME, rank, MEGATRON_LAUNCHER="1") for rank in range(3)],
              (6, SAME): [speak(tmp_path, 6, SAME, rank, LOCAL_WORLD_SIZE="1") for rank in range(3)]}
    told = {job: "".join(rank.communicate(timeout=2 * PATIENCE)[1] for rank in of_it).splitlines()
            for job, of_it in ranks.items()}
    assert all(rank.returncode == 2 for of_it in ranks.values() for rank in of_it)
    assert all(line.startswith("error: ") for lines in told.values() for line in lines)
    assert {job: len(lines) for job, lines in told.items()} == {**jobs, (5, SAME): 3, (6, SAME): 3}


def test_a_launcher_that_ends_the_speaker_learns_its_code(tmp_path: Path) -> None:
    speaker = speak(tmp_path, 7, SAME, 0, COMPANY="1", PATIENT="1000")
    assert speaker.stderr is not None and speaker.stderr.readline() == "error: no such flag\n"
    wait_until(lambda: catches(speaker.pid, signal.SIGTERM))

    def ends() -> bool:
        """A signal that comes just before Python sleeps is heard with the next one."""
        speaker.send_signal(signal.SIGTERM)
        return speaker.poll() is not None

    wait_until(ends)
    assert speaker.returncode == 2
