"""Requests to stop: each signal, to a launcher, to a rank, to the launcher's process group and to all at once, in each
phase of a run. One line, the documented code, nobody and nothing left after five seconds, and a checkpoint where there
was a step (docs/launch.md)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, Signals

import pytest

from megatron.checkpoint.cli import main as checkpoint
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.helpers import ROOT, TINY, records, train_all
from tests.megatron.launch.processes import LIMIT, alive, begin, environment, wait_until
from tests.terminal import AtTerminal

PATIENCE = 60.0
"""For a phase to begin: torch is imported until then."""
LONG = "1000000"
SIGNALS = (SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU, SIGINT)
TARGETS = ("launcher", "rank", "group", "both")
FLAGS = {
    "start-up": (), "meeting": (), "index": (), "step": ("--train-iters", LONG),
    "evaluation": ("--train-iters", LONG, "--eval-interval", "2", "--eval-iters", LONG),
    "save": ("--train-iters", LONG, "--save-interval", "2"),
    "background": ("--train-iters", LONG, "--save-interval", "2", "--async-save"),
    "end": ("--train-iters", "2", "--eval-interval", "1000", "--eval-iters", LONG),
}
BEFORE_THE_FIRST_STEP = ("start-up", "meeting", "index")


class Run:
    """Two ranks of phased.py under the launcher, or one without it."""

    def __init__(self, folder: Path, phase: str, *more: object, ranks: int = 2, save: bool = True) -> None:
        self.folder, self.phase, self.ranks = folder, phase, ranks
        for name in ("marks", "tmp"):
            (folder / name).mkdir()
        self.save = folder / "save"
        saving = ["--save", self.save, "--load", self.save] if save else []
        launch = ["-m", "megatron.launch", "--nproc-per-node", ranks] if ranks > 1 else []
        program = [Path(__file__).with_name("phased.py"), phase, folder / "marks"]
        flags = [*TINY, "--mock-data", "--batch-size", 1, *saving, *FLAGS[phase], *more]
        self.process = subprocess.Popen([sys.executable, *map(str, [*launch, *program, *flags])],
                                        env=environment(TMPDIR=folder / "tmp"), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, start_new_session=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def pids(self, name: str = "pid") -> list[int]:
        """Of the ranks that have come there."""
        return [int(path.read_text()) for rank in range(self.ranks) if (path := self.folder / "marks" / f"{name}{rank}")
                .exists()]

    def reaches(self, phase: str) -> None:
        """Waits until all ranks have come there."""
        wait_until(lambda: len(self.pids(phase)) == self.ranks or self.process.poll() is not None, PATIENCE)
        assert self.process.poll() is None, self.process.communicate()
        time.sleep(0.3)  # well into it

    def ask(self, number: Signals, target: str) -> None:
        self.asked = time.monotonic()
        if target == "launcher":
            self.process.send_signal(number)
        if target in ("group", "both"):
            os.killpg(self.process.pid, number)
        if target in ("rank", "both"):
            for pid in self.pids()[-1:] if target == "rank" else self.pids():
                os.kill(pid, number)

    def ends(self) -> tuple[int, list[str], list[str]]:
        """Code, lines of standard output and of standard error; nobody and nothing is left."""
        out, err = self.process.communicate(timeout=PATIENCE)
        took = time.monotonic() - self.asked
        left = [pid for pid in self.pids() if alive(pid)]
        assert took < LIMIT, (took, out[-300:], err)
        assert not left and not [*(self.folder / "tmp").glob("megatron-*")]
        return self.process.returncode, out.splitlines(), err.splitlines()


def check(run: Run, number: Signals, target: str) -> None:
    """All that is promised."""
    code, out, err = run.ends()
    errors = [line for line in err if line.startswith("error:")]
    stopped = [line for line in out if re.search("preempted|interrupted", line)]
    assert not [line for line in err if "Traceback" in line], err
    if run.phase in BEFORE_THE_FIRST_STEP:
        how = "interrupted" if number == SIGINT else f"interrupted by {number.name}"
        too_early = f"ended by signal {int(number)}"
        assert code == 130 and len(errors) == 1 and not stopped, (code, out, err)
        assert errors[0].startswith(f"error: {how} before ") or too_early in errors[0]
        assert not [*run.save.glob("global_step*")]
        return
    assert code == 0 and not errors and len(stopped) == 1, (code, out[-3:], err)
    word = "interrupted" if number == SIGINT else "preempted"
    step = re.match(rf" {word} at step (\d+), saved ", stopped[0])
    assert step, stopped
    assert (run.save / "latest").read_text().strip() == f"global_step{step[1]}"
    assert not [path for path in run.save.iterdir() if path.name not in (".lock", "latest", "zero_to_fp32.py")
                and not path.name.startswith("global_step")]


@pytest.mark.parametrize(("phase", "number", "target"), [
    ("meeting", SIGQUIT, "launcher"), ("background", SIGTERM, "group"),
    *(pytest.param(*case.values, marks=pytest.mark.slow) for case in pairs([*FLAGS], SIGNALS, TARGETS))])
def test_a_request_in_any_phase_is_honoured_in_five_seconds(phase, number, target, tmp_path, capsys):
    with Run(tmp_path, phase) as run:
        run.reaches(phase)
        run.ask(number, target)
        check(run, number, target)
    if phase not in BEFORE_THE_FIRST_STEP:
        assert checkpoint(["verify", str(run.save)]) == 0, capsys.readouterr()


@pytest.mark.parametrize(("phase", "number"), [
    ("start-up", SIGQUIT), *(pytest.param(phase, number, marks=pytest.mark.slow) for phase, number in (
        ("step", SIGTERM), ("step", SIGINT), ("index", SIGHUP), ("evaluation", SIGUSR1)))])
def test_a_program_without_a_launcher_does_the_same(phase, number, tmp_path):
    with Run(tmp_path, phase, ranks=1) as run:
        run.reaches(phase)
        run.ask(number, "group")
        check(run, number, "group")


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "ranks"), [("step", 1), ("evaluation", 2), ("end", 2)])
def test_without_a_place_to_save_the_code_is_130_and_one_line_says_what_to_do(phase, ranks, tmp_path):
    with Run(tmp_path, phase, ranks=ranks, save=False) as run:
        run.reaches(phase)
        run.ask(SIGHUP, "group")
        code, out, err = run.ends()
    errors = [line for line in err if line.startswith("error:")]
    assert code == 130 and len(errors) == 1 and not [line for line in out if "saved" in line]
    assert re.fullmatch(r"error: asked to stop at step \d+, and nothing was saved: give --save", errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["step", "evaluation", "save"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(phase, tmp_path):
    """Also the evaluation that was left early is there."""
    flags = ["--metrics-file", tmp_path / "m.jsonl"]
    with Run(tmp_path, phase, *flags) as run:
        run.reaches(phase)
        run.ask(SIGQUIT, "launcher")
        check(run, SIGQUIT, "launcher")
    stopped_at = int((run.save / "latest").read_text().strip().removeprefix("global_step"))
    end = [*TINY, "--mock-data", "--batch-size", 1, "--train-iters", stopped_at + 2, "--lr-decay-iters", LONG,
           "--eval-interval", 2, "--eval-iters", 1]
    found = train_on_two([*end, "--metrics-file", tmp_path / "rest.jsonl", "--save", run.save, "--load", run.save])
    assert f"loaded weights and optimizer of global_step{stopped_at}" in found
    train_on_two([*end, "--metrics-file", tmp_path / "whole.jsonl"])
    whole, rest = records(tmp_path / "whole.jsonl"), records(tmp_path / "rest.jsonl")
    from_there = [record for record in whole if record["iteration"] > stopped_at
                  or phase == "evaluation" and record["iteration"] == stopped_at and record.get("eval")]
    assert rest == from_there


def train_on_two(argv: list[object]) -> str:
    return run_ranks(train_all, 2, [argv])[0][0]


def test_nohup_keeps_a_run_through_the_end_of_its_terminal(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, pathlib, time\nrank = os.environ['RANK']\n"
                       f"from megatron.distributed.signals import StopListener\nstop = StopListener().listen()\n"
                       f"pathlib.Path({str(tmp_path)!r}, f'pid{{rank}}').write_text(str(os.getpid()))\n"
                       f"while not stop and not os.path.exists({str(tmp_path / 'enough')!r}): time.sleep(0.01)\n"
                       "raise SystemExit(3 if stop else 0)\n")
    ignoring = f"trap '' HUP; exec {sys.executable} -m megatron.launch --nproc-per-node 2 {program}"
    process = subprocess.Popen(["sh", "-c", ignoring], env=environment(),
                               stderr=subprocess.PIPE, start_new_session=True)
    try:
        ranks = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in ranks))
        for pid in (process.pid, *(int(path.read_text()) for path in ranks)):
            os.kill(pid, SIGHUP)
        time.sleep(0.5)
        (tmp_path / "enough").touch()
        _, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (0, b"")
    finally:
        process.kill()
        process.wait()


def test_a_terminal_that_closes_under_a_run_is_a_request_to_stop(tmp_path):
    """Its progress bar and its lines have nowhere to go any more; that is no failure."""
    save, marks = tmp_path / "save", tmp_path / "marks"
    marks.mkdir()
    launch = ["-m", "megatron.launch", "--nproc-per-node", "2"]
    program = [str(Path(__file__).with_name("phased.py")), "step", str(marks)]
    flags = [*TINY, "--mock-data", "--batch-size", "1", "--save", str(save), "--train-iters", LONG, "--log-interval",
             "1"]
    command = [sys.executable, *launch, *program, *flags]
    with AtTerminal(command, environment(TMPDIR=tmp_path), limit=PATIENCE) as program_there:
        program_there.sees(" step 3/")
        program_there.hangs_up()
        assert program_there.process.wait(LIMIT) == 0
        pids = [int(path.read_text()) for path in marks.glob("pid*")]
        assert len(pids) == 2 and not any(alive(pid) for pid in pids)
    assert checkpoint(["verify", str(save)]) == 0


BAR_AND_A_STEP = """
import os, sys, time
from megatron.distributed.signals import StopListener
request = StopListener().listen()
if os.environ.setdefault("RANK", "0") == "0":
    print("a progress bar", end="", flush=True)
while not request:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("launch", [[], ["-m", "megatron.launch", "--nproc-per-node", "1"]], ids=["alone", "launched"])
def test_ctrl_c_at_a_terminal_is_answered_on_a_line_of_its_own(launch, tmp_path):
    """In the place of the progress bar, and of the ^C that the terminal writes behind it."""
    (tmp_path / "program.py").write_text(BAR_AND_A_STEP)
    with AtTerminal([sys.executable, *launch, str(tmp_path / "program.py")], environment(), PATIENCE) as program:
        program.sees("a progress bar")
        program.presses("C")
        code, shown = program.ends()
    assert code == 0 and shown.count("stopping after this step") == 1
    assert "\r\x1b[Kstopping after this step" in shown, shown


# -- programs beside training ---------------------------------------------------------------------------------------


PROGRAM = """
import pathlib, sys, time
from data.storage import staged_file
from {home} import {runner} as run
def main():
    with staged_file("made.txt", "w") as file:
        file.write("begun")
        file.flush()
        try:
            pathlib.Path("begun").touch()
            for _ in range(6000):
                time.sleep(0.01)  # a signal just before Python sleeps is heard afterwards
        except Exception:
            file.write("taken for a failure")
        finally:
            pathlib.Path("begun").rename("tidying")
            while not pathlib.Path("enough").exists():
                time.sleep(0.01)
            pathlib.Path("tidying").unlink()
sys.exit(run(main))
"""


@pytest.mark.parametrize("home, runner, number", [
    ("megatron.distributed.exit_codes", "run", SIGHUP), ("megatron.distributed.exit_codes", "run", SIGXCPU),
    ("data.cli", "run_command", SIGTERM), ("data.cli", "run_command", SIGUSR2)])
def test_a_program_that_saves_nothing_ends_with_a_line_and_leaves_nothing(home, runner, number, tmp_path):
    process = begin([sys.executable, "-c", PROGRAM.format(home=home, runner=runner)], cwd=tmp_path, env=environment(),
                    stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "begun").exists)
    assert [*tmp_path.glob(".made.txt.*")]
    process.send_signal(number)
    wait_until((tmp_path / "tidying").exists)
    process.send_signal(number)  # changes nothing
    (tmp_path / "enough").touch()
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, f"error: interrupted by {number.name}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["enough"]


def test_a_run_in_a_process_that_goes_on_gives_its_signals_and_its_place_back(tmp_path):
    """A notebook: what fails there is caught, and what ends later ends well."""
    job = subprocess.run([sys.executable, "-c", f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import pretrain_gpt2
from megatron import zero
from megatron.train.loop import Trainer
former = [signal.getsignal(number) for number in signal.valid_signals()]
run, metrics = "pretrain_gpt2.py --mock-data --train-iters 2 --eval-interval 0".split() + {TINY!r}, Trainer._metrics
def fails(*_):
    raise OSError("broken")
for wrong, last in (["--plan"], metrics), (["--load", "missing"], metrics), ([], metrics), ([], fails):
    zero.init_distributed()
    sys.argv, Trainer._metrics = run + wrong, last
    try:
        pretrain_gpt2.main()
    except Exception as error:
        print("caught", error)
    assert former == [signal.getsignal(number) for number in signal.valid_signals()], wrong
print("ends well")
"""], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment())
    assert job.returncode == 0 and job.stdout.endswith("ends well\n"), job.stdout + job.stderr
