"""The launcher, with ranks that are small plain programs: what they are given, and how a job ends when one fails.

No torch here, so a job takes a tenth of a second. Real ranks over gloo are at the end of the file, and only two.
"""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from megatron.launch import launcher as launch, supervisor
from tests.megatron.launch.processes import LIMIT, ROOT, alive, python, wait_until

SHOW_ENVIRONMENT = """
names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS GLOO_SOCKET_IFNAME "
         "MEGATRON_STORE_FILE").split()
with open(os.path.join(here, f"environment{rank}"), "w") as f:
    json.dump({name: os.environ.get(name) for name in names}, f)
"""
WAIT_FOR_A_STOP = """
def stop(number, frame):
    with open(os.path.join(here, f"got{rank}"), "w") as f:
        f.write(str(number))
    sys.exit(0)
from megatron.distributed.signals import STOP_SIGNALS
for number in STOP_SIGNALS:
    signal.signal(number, stop)
open(os.path.join(here, f"ready{rank}"), "w").close()
while True:
    time.sleep(0.02)
"""
SLEEP = "time.sleep(60)"
AFTER_RANK_0 = """
meet(here)
if rank:
    with open(os.path.join(here, "pid0")) as f:
        first = f.read()
    while os.path.exists(f"/proc/{first}"):
        time.sleep(0.01)
"""
"""The others go on once the launcher has seen rank 0 end."""


def test_every_rank_gets_its_numbers_and_one_node_meets_over_loopback(start, tmp_path):
    assert start(SHOW_ENVIRONMENT, ranks=3).end() == (0, "", [])
    seen = [json.loads((tmp_path / f"environment{rank}").read_text()) for rank in range(3)]
    assert [(s["RANK"], s["LOCAL_RANK"], s["WORLD_SIZE"], s["LOCAL_WORLD_SIZE"]) for s in seen] == [
        (str(rank), str(rank), "3", "3") for rank in range(3)]
    assert len({(s["MASTER_ADDR"], s["MASTER_PORT"], s["MEGATRON_STORE_FILE"]) for s in seen}) == 1
    assert seen[0]["MASTER_ADDR"] == "127.0.0.1" and seen[0]["GLOO_SOCKET_IFNAME"] == "lo"


def test_warnings_of_torchs_in_scripts_of_others_are_not_printed(start, monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert start("print(os.environ['TORCH_CPP_LOG_LEVEL'])").end() == (0, "ERROR\nERROR\n", [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_record_the_last_collectives_of_nccl_unless_told_otherwise(ranks, start, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    script = "rank or print(os.environ['TORCH_FR_BUFFER_SIZE'], os.environ['TORCH_NCCL_DUMP_ON_TIMEOUT'])"
    assert start(script, ranks=ranks).end() == (0, "2000 0\n", [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_arguments_reach_the_script_unchanged(start, ranks):
    arguments = ("--", "a b", "$(touch x)", ";", "'\"", "--nproc-per-node", "-x", "", "*", "--key=v w", "\u00e9\n")
    job = start("rank or print(json.dumps(sys.argv[1:]))", ranks=ranks, arguments=arguments)
    code, out, _ = job.end()
    assert code == 0 and tuple(json.loads(out)) == arguments


def test_standard_input_is_that_of_the_first_rank_alone(start, tmp_path):
    job = start("open(os.path.join(here, f'read{rank}'), 'w').write(sys.stdin.read())", stdin="typed\n")
    assert job.end() == (0, "", [])
    assert [(tmp_path / f"read{rank}").read_text() for rank in range(2)] == ["typed\n", ""]


def test_one_rank_is_the_script_in_the_same_process(start):
    job = start("print(os.getpid(), os.environ['WORLD_SIZE'], 'MEGATRON_LAUNCHER' in os.environ)", ranks=1)
    assert job.end() == (0, f"{job.process.pid} 1 False\n", [])


@pytest.mark.parametrize("code, expected", [(2, 2), (5, 5), (7, 7), (77, 5)])
def test_the_job_ends_with_the_code_of_the_rank_that_failed(start, code, expected):
    """Rank 0 is a victim: it leaves with 5 although it is the first to end."""
    body = f"print('error: of rank', rank, file=sys.stderr)\nsys.exit({code} if rank else 5)"
    ended, _, lines = start(AFTER_RANK_0 + body).end()
    assert ended == expected
    assert lines == ["error: of rank 1" if code != 5 else "error: of rank 0"]


def test_stderr_passes_through_and_a_failure_without_a_line_gets_one(start):
    body = "print(f'note {rank}', file=sys.stderr); sys.stderr.write('no newline'); sys.exit(3)"
    code, _, lines = start(body, ranks=1 + 1).end()
    assert code == 3
    assert sorted(lines[:-1]) == ["no newline", "no newline", "note 0", "note 1"]
    assert lines[-1].startswith("error: rank ") and "exit code 3" in lines[-1]


def test_a_rank_that_fails_slowly_is_named_and_not_its_victim(start):
    """An error of the script's own takes Python a while; its peer, whose error is ours, has ended before."""
    body = ("import time\nfrom megatron.errors import PeerError\nfrom megatron.distributed import exit_codes\n"
            "exit_codes.install_excepthook()\nmeet(here)\nif rank == 0:\n    raise PeerError('rank 1 has left')\n"
            "time.sleep(1)\nraise ValueError('mine')")
    code, _, lines = start(body).end()
    assert code == 5 and lines[-1].startswith("error: rank 1 (pid ") and "ValueError: mine" in lines
    assert not [line for line in lines if "rank 1 has left" in line]


def test_a_line_of_a_job_that_succeeds_is_not_swallowed(start):
    assert start("rank or print('error: only words', file=sys.stderr)").end() == (0, "", ["error: only words"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_crashes_in_native_code_shows_where_it_was(start, ranks):
    body = "def crash():\n    import ctypes\n    rank or ctypes.string_at(0)\ncrash()\ntime.sleep(30)"
    code, _, lines = start(body, ranks=ranks).end()
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert any(re.fullmatch(r'  File ".*program.py", line \d+ in crash', line) for line in lines)
    assert code == (-signal.SIGSEGV if ranks == 1 else 5)
    assert ranks == 1 or re.match(r"error: rank 0 \(.*\) ended by signal 11 \(SIGSEGV\)", lines[-1])


def test_ranks_that_refuse_to_end_and_their_children_are_killed(start, tmp_path):
    body = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        open(os.path.join(here, "child.tmp"), "w").write(str(child))
        os.rename(os.path.join(here, "child.tmp"), os.path.join(here, "child"))
    time.sleep(60)
while not os.path.exists(os.path.join(here, "child")):
    time.sleep(0.01)
sys.exit(6)
"""
    job = start(body)
    wait_until((tmp_path / "child").exists)
    begun = time.monotonic()
    assert job.end()[0] == 6 and time.monotonic() - begun < 2 * LIMIT
    wait_until(lambda: not alive(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_once_and_a_clean_stop_is_success(start, tmp_path, number):
    job = start(WAIT_FOR_A_STOP)
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    job.process.send_signal(number)
    code, _, lines = job.end()
    assert code == 0 and not [line for line in lines if line.startswith("error:")]
    assert [int((tmp_path / f"got{rank}").read_text()) for rank in range(2)] == [number, number]


ASKED_AT_IMPORT = """
import os, signal, sys
os.kill(os.getpid(), signal.{name})
sys.path.remove(os.path.dirname(__file__))
del sys.modules["argparse"]
import argparse
"""
"""In the place of a module that is imported early."""


@pytest.mark.parametrize(("name", "how", "command", "when"), [
    ("SIGHUP", " by SIGHUP", ["-m", "megatron.launch", "--nproc-per-node", 2, "pretrain_gpt2.py"],
     "a rank was started;"),
    ("SIGINT", "", ["pretrain_gpt2.py", "--help"], "the first step, so that nothing was lost:")])
def test_a_request_to_stop_while_a_program_is_imported_ends_it_with_a_line(name, how, command, when, tmp_path):
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "argparse.py").write_text(ASKED_AT_IMPORT.format(name=name))
    result = python(*command, PYTHONPATH=f"{tmp_path / 'early'}:{ROOT}", TMPDIR=tmp_path)
    assert result.returncode == 130
    assert result.stderr == f"error: interrupted{how} before {when} start the same command again\n"


def test_a_request_to_stop_that_comes_too_early_is_a_failure_with_a_reason(start):
    job = start(SLEEP)
    pids = [job.pid(rank) for rank in range(2)]
    job.process.terminate()
    code, _, lines = job.end()
    assert code == 130 and len(lines) == 1 and "before it could save" in lines[0]
    assert not any(alive(pid) for pid in pids)


def test_the_second_interrupt_ends_at_once(start):
    deaf = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    job = start(deaf + "open(here + f'/ready{rank}', 'w').close()\n" + SLEEP)
    wait_until(lambda: all((job.folder / f"ready{rank}").exists() for rank in range(2)))
    job.process.send_signal(signal.SIGINT)
    assert job.process.stderr.readline() == supervisor.STOPPING_LINE.decode()
    job.process.send_signal(signal.SIGINT)
    code, _, lines = job.end()
    assert code == 130 and [line for line in lines if line.startswith("error:")] == lines[-1:]


def test_a_killed_launcher_leaves_no_ranks(start):
    job = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    pids = [job.pid(rank) for rank in range(2)]
    job.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids))


WRONG = [
    ([], "no script given"),
    (["--nproc-per-node", "0", __file__], "--nproc-per-node is 0"),
    (["--nproc-per-node", "two", __file__], "invalid int value"),
    (["--nproc-per-node"], "expected one argument"),
    (["--nnodes", "2", __file__], "--master-addr is missing"),
    (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", __file__], "--node-rank 2 does not fit --nnodes 2"),
    (["--master-port", "70000", __file__], "--master-port 70000"),
    (["no such file.py"], "'no such file.py' is not a file; give the path of a Python script, or -m"),
    (["somewhere/pretrain_gpt2.py"], "start it with -m pretrain_gpt2"),
    (["-m"], "no script given"),
    (["-m", "no_such_module"], "finds no module 'no_such_module' to run"),
    (["-m", "no_such_package.part"], "finds no module 'no_such_package.part' to run"),
    (["--module", "megatron.launch.launcher.nothing"], "finds no module"),
    (["-m", "megatron.train"], "finds no module 'megatron.train' to run"),  # a package without __main__
    (["-m", __file__], "finds no module"),
    (["--gpus", "2", __file__], "--gpus")]


def test_a_wrong_command_line_is_one_error_line_and_exit_2(capfd):
    for arguments, words in WRONG:
        assert launch.main(arguments) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: launcher: ") and words in lines[0]


def test_flags_may_be_written_with_underscores_and_equals_signs():
    head, command = launch.split_command_line(["--nproc_per_node=2", "--node_rank", "0", "a.py", "--x_y"])
    options = launch.build_launcher_parser().parse_args(head)
    assert (options.nproc_per_node, options.node_rank, command) == (2, 0, ["a.py", "--x_y"])


@pytest.mark.parametrize(("flags", "ranks"), [(["-m"], 1), (["--nproc-per-node", "2", "--module"], 2)])
def test_a_module_runs_like_a_script_and_its_arguments_are_its_own(flags, ranks, tmp_path):
    """Also `-m` among them, and a module that lies beside the folder `python -P` would hide."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(
        "import os, sys\nopen(f'ran{os.environ[\"RANK\"]}', 'w').write(repr((__name__, sys.argv[1:])))\n")
    done = python("-m", "megatron.launch", *flags, "package.program", "-m", "--x_y", "--", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.glob("ran*")) == [f"ran{rank}" for rank in range(ranks)]
    assert (tmp_path / "ran0").read_text() == repr(("__main__", ["-m", "--x_y", "--"]))


TWO_RANKS_OVER_GLOO = """
from megatron.distributed import exit_codes
from megatron.distributed import process_group
def main():
    env = process_group.init_process_group(timeout_seconds=60)
    import torch
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    if "fail" in sys.argv and rank == 1:
        raise ValueError("on purpose")
    if "fail" in sys.argv:
        torch.distributed.all_reduce(x)
    process_group.init_process_group()
    process_group.shutdown()
    if rank == 0:
        print(int(x), env.world_size)
sys.exit(exit_codes.run(main))
"""


def test_a_bug_in_one_rank_is_reported_and_its_victim_is_silent(start):
    code, _, lines = start(TWO_RANKS_OVER_GLOO, arguments=("fail",)).end(60)
    assert code == 5
    assert lines == ["error: internal error in rank 1: ValueError: on purpose (set MEGATRON_DEBUG=1 for the traceback)"]
