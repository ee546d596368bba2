"""Several nodes, each a launcher on this machine: they meet or say why not, and each hears how the others end.

The ranks are small plain programs without torch; what a launcher says to a stranger is tried in this process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from megatron.launch import node_monitor, rendezvous
from megatron.launch.node_monitor import JsonConnection, NodeInfo, NodeMonitor
from tests.megatron.launch.processes import LIMIT, MEET, PATIENCE, ROOT, begin, catches, environment, wait_until

HOST = socket.gethostname()


class Node:
    """A launcher, whose ranks run `body`."""

    def __init__(self, folder: Path, port: int, node: int, body: str = "", *options: object, nodes: int = 2) -> None:
        script = folder / f"program{node}.py"
        script.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{MEET}{body}")
        command = [sys.executable, "-m", "megatron.launch", "--nnodes", nodes, "--node-rank", node, "--master-addr",
                   "127.0.0.1", "--master-port", port, *options, script]
        self.process = begin([*map(str, command)], env=environment(), text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self, limit: float = PATIENCE) -> tuple[int, str, list[str]]:
        """Exit code, standard output and the error lines."""
        out, err = self.process.communicate(timeout=limit)
        return self.process.returncode, out, [line for line in err.splitlines() if line.startswith("error:")]


def connected(port: int) -> socket.socket:
    """As soon as somebody listens there."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < until, "nobody listens"
            time.sleep(0.01)


TELL = "print(rank, *(os.environ[name] for name in ('LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
WAIT = "time.sleep(60)"


def ready(folder: Path) -> str:
    return f"open(r'{folder}/ready' + str(rank), 'w').close()\n"


def are_ready(folder: Path, ranks: int) -> Callable[[], bool]:
    return lambda: all((folder / f"ready{rank}").exists() for rank in range(ranks))


# ---- meeting -----------------------------------------------------------------------------------------------------


def test_nodes_begin_when_all_are_there_in_any_order(tmp_path: Path, port: int) -> None:
    nodes = {}
    for node in (2, 0, 1):
        nodes[node] = Node(tmp_path, port, node, TELL, "--nproc-per-node", 2, nodes=3)
        time.sleep(0.3)
    for node, launcher in nodes.items():
        code, out, errors = launcher.end()
        assert code == 0 and errors == []
        assert sorted(out.splitlines()) == [f"{2 * node + local} {local} 6 127.0.0.1 {port}" for local in range(2)]


def test_a_node_that_does_not_come_is_named_to_all_that_came(tmp_path: Path, port: int) -> None:
    third = Node(tmp_path, port, 3, TELL, nodes=5)
    wait_until(lambda: catches(third.process.pid, signal.SIGTERM))  # it runs, and needs less time than the next one
    for launcher in (Node(tmp_path, port, 0, TELL, "--meeting-timeout-seconds", 2, nodes=5), third):
        code, out, errors = launcher.end()
        assert (code, out) == (5, "") and len(errors) == 1
        assert f"nodes 1-2, 4 of 5 did not come to 127.0.0.1:{port} within 2 s" in errors[0], errors


def test_nodes_that_were_started_differently_are_refused(tmp_path: Path, port: int) -> None:
    options = ("--nproc-per-node", 2)
    launchers = [Node(tmp_path, port, 0, TELL), Node(tmp_path, port, 1, TELL, *options)]
    for launcher in launchers:
        code, out, errors = launcher.end()
        assert (code, out) == (2, "") and len(errors) == 1
        assert f"--nnodes 2 --nproc-per-node 1 on node 0 ({HOST})" in errors[0]
        assert f"{options[0]} {options[1]}" in errors[0] and f"on node 1 ({HOST})" in errors[0]


def test_a_connection_over_a_silent_network_ends_after_20_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, (theirs, _) = socket.create_connection(listener.getsockname()), listener.accept()
    with closing(JsonConnection(ours)), closing(theirs):
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def test_a_second_launcher_of_a_node_is_sent_away_and_the_job_is_not_disturbed(tmp_path: Path, port: int) -> None:
    first, *both = (Node(tmp_path, port, node, TELL, nodes=3) for node in (0, 1, 1))
    wait_until(lambda: any(launcher.process.poll() is not None for launcher in both))
    second, taken = sorted(both, key=lambda launcher: launcher.process.poll() is None)
    code, out, errors = second.end()
    assert (code, out) == (2, "") and "--node-rank 1 was given twice" in errors[0] and HOST in errors[0]
    third = Node(tmp_path, port, 2, TELL, nodes=3)
    assert [launcher.end()[0] for launcher in (first, taken, third)] == [0, 0, 0]


def test_a_launcher_that_is_asked_to_stop_while_it_waits_says_so(tmp_path: Path, port: int) -> None:
    launcher = Node(tmp_path, port, 0, TELL)
    with connected(port):
        launcher.process.send_signal(signal.SIGTERM)
        code, out, errors = launcher.end()
    assert (code, out) == (130, "") and len(errors) == 1 and "before a rank was started" in errors[0]


# ---- strangers ---------------------------------------------------------------------------------------------------


def lines() -> tuple[list[str], Callable[[str], None]]:
    said: list[str] = []
    return said, said.append


@pytest.mark.parametrize("greeting", [
    None, b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * 300_000,
    b'{"greeting": "megatron.launch 2", "node": 7, "nodes": 2, "ranks": 1, "host": "x"}\n',
    b'{"greeting": "megatron.launch 2", "node": "x", "nodes": 2, "ranks": 1, "host": 1}\n'])
def test_strangers_on_the_port_do_not_disturb_the_meeting(port, greeting):
    found: dict[int, NodeMonitor] = {}

    def come(node: int) -> None:
        found[node] = rendezvous.meet_nodes(NodeInfo(node, 2, 1, f"host{node}"), "127.0.0.1", port, 10, lines()[1])

    threads = [threading.Thread(target=come, args=(node,)) for node in range(2)]
    threads[0].start()
    with connected(port) as stranger:
        if greeting is not None:
            with suppress(OSError):
                stranger.sendall(greeting)
        threads[1].start()
        for thread in threads:
            thread.join(10)
    with closing(found[0]), closing(found[1]):
        found[1].announce_exit(3, "error: it was I")
        end = found[0].wait_for_culprit(5)
        assert end is not None and end.code == 3
        assert end.describe() == "error: node 1 (host1, rank 1): it was I"


# ---- ends --------------------------------------------------------------------------------------------------------


FAIL = """
while not os.path.exists(r'{folder}/go'): time.sleep(0.02)
time.sleep(0.5)
print('error: the reason', file=sys.stderr, flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("culprit", [0, 2])
def test_every_node_names_the_one_whose_rank_failed(tmp_path: Path, port: int, culprit: int) -> None:
    """The others wait for it, notice at once, or fail before it does."""
    slow_victim = f"while not os.path.exists(r'{tmp_path}/go'): time.sleep(0.02)\nsys.exit(5)"
    bodies = {culprit: FAIL.format(folder=tmp_path), (culprit + 1) % 3: WAIT,
              (culprit + 2) % 3: slow_victim}
    launchers = [Node(tmp_path, port, node, ready(tmp_path) + bodies[node], nodes=3) for node in range(3)]
    wait_until(are_ready(tmp_path, 3))
    (tmp_path / "go").touch()
    began = time.monotonic()
    for node, launcher in enumerate(launchers):
        code, _, errors = launcher.end()
        expected = "error: the reason" if node == culprit else (
            f"error: node {culprit} ({HOST}, rank {culprit}): the reason")
        assert (code, errors) == (3, [expected])
    assert time.monotonic() - began < 2 * LIMIT


def test_a_launcher_that_is_killed_ends_the_job_of_the_others(tmp_path: Path, port: int) -> None:
    culprit = 2
    launchers = [Node(tmp_path, port, node, ready(tmp_path) + WAIT, nodes=3) for node in range(3)]
    wait_until(are_ready(tmp_path, 3))
    began = time.monotonic()
    launchers[culprit].process.kill()
    for node, launcher in enumerate(launchers):
        code, _, errors = launcher.end()
        if node != culprit:
            assert code == 5 and len(errors) == 1
            assert f"node {culprit} ({HOST}, rank {culprit}) is gone without a word" in errors[0], errors
    assert time.monotonic() - began < 2 * LIMIT


IN_A_STEP = """
from megatron.errors import PeerError
from megatron.distributed import exit_codes
from megatron.distributed.process_group import publish_status
from megatron.distributed.rank_status import STATUS
def main():
    publish_status()
    STATUS.set_activity("training")
    STATUS.set_step(7)
    STATUS.set_phase("backward", "blocks.1")
    meet(r"{folder}")
    {then}
sys.exit(exit_codes.run(main))
"""
WAITS = "STATUS.collective_counters[0] = 2; time.sleep(3); raise PeerError('waited in vain')"


@pytest.mark.parametrize("fault, words, culprit", [
    ("time.sleep(60)", "hangs or is too slow: the others waited for it", 1),
    ("sys.exit(0)", "left with exit code 0 at step 7: backward, blocks.1", 0)])
def test_every_node_names_a_rank_of_another_one_that_hangs_or_leaves(tmp_path, port, fault, words, culprit):
    launchers = [Node(tmp_path, port, node,
                      IN_A_STEP.format(folder=tmp_path, then=fault if node == culprit else WAITS))
                 for node in range(2)]
    for node, launcher in enumerate(launchers):
        code, _, errors = launcher.end()
        assert code == 5 and len(errors) == 1, errors
        assert f"rank {culprit} (pid " in errors[0] and words in errors[0], errors
        assert errors[0].startswith(f"error: rank {culprit} " if node == culprit else f"error: node {culprit} ({HOST}")
        assert "step 7: backward, blocks.1" in errors[0]


def test_ranks_that_leave_on_all_nodes_have_not_failed(tmp_path: Path, port: int) -> None:
    """A script may end itself in the middle of a step; on one node it is done, and two do it one after the other."""
    ends = ("os._exit(0)", "STATUS.mark_done(); return", "time.sleep(1); os._exit(0)")
    launchers = [Node(tmp_path, port, node, IN_A_STEP.format(folder=tmp_path, then=then), nodes=3)
                 for node, then in enumerate(ends)]
    assert [launcher.end() for launcher in launchers] == [(0, "", [])] * 3


# ---- nodes that stand still --------------------------------------------------------------------------------------


def members(port: int, nodes: int) -> tuple[list[NodeMonitor], list[list[str]]]:
    """Nodes of one job in this process, and what their launchers would say."""
    found: dict[int, NodeMonitor] = {}
    said = [lines() for _ in range(nodes)]

    def come(node: int) -> None:
        found[node] = rendezvous.meet_nodes(NodeInfo(node, nodes, 1, f"host{node}"), "127.0.0.1", port, 10,
                                            said[node][1])

    threads = [threading.Thread(target=come, args=(node,)) for node in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for told, _ in said:
        told.clear()
    return [found[node] for node in range(nodes)], [told for told, _ in said]


class Clock:
    """Of a test, in which nobody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(node_monitor, "boot_clock", lambda: self.now)

    def run(self, seconds: float, alive: list[NodeMonitor]) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for _ in range(2):
                for one in alive:
                    one.receive()


def test_a_launcher_that_does_not_answer_is_told_and_so_is_its_return(port, monkeypatch):
    clock = Clock(monkeypatch)
    all_three, (first, second, third) = members(port, 3)
    clock.run(30, all_three)
    assert first == second == third == []
    clock.run(41, [all_three[0], all_three[2]])
    assert [line.partition(":")[0] for line in first] == ["warning"] * 3 and second == third == []
    for line, seconds in zip(first, (10, 20, 40), strict=True):
        assert f"the launcher of node 1 (host1, rank 1) has not answered for {seconds} s" in line
        assert "the run goes on" in line
    clock.run(2, all_three)
    assert len(first) == 4 and first[3].startswith("note: the launcher of node 1 (host1, rank 1) answers again")
    assert third == [] and len(second) == 1, "it was not the others that were away"
    assert second[0].startswith("warning: the launcher of node 1 (host1, rank 1), this node, did not run for 4")
    clock.run(15, all_three[1:])
    assert len(second) == 2 and "the launcher of node 0 (host0, rank 0) has not answered for 10 s" in second[1]
    for one in all_three:
        one.close()


STANDS_STILL = ("STATUS.collective_counters[0] = 2; open(r'{folder}/ready' + str(rank), 'w').write(str(os.getpid())); "
                "time.sleep({seconds}); raise PeerError('waited in vain')")


@pytest.mark.slow
@pytest.mark.parametrize("away", [0, 1])
def test_a_node_that_stops_whole_is_named_and_hears_that_the_job_ended_without_it(tmp_path, port, away):
    """As a machine that is suspended, or swaps: its connections stay, and no rank says a word."""
    launchers = [Node(tmp_path, port, node, IN_A_STEP.format(folder=tmp_path, then=STANDS_STILL.format(
        folder=tmp_path, seconds=60 if node == away else 8)), nodes=3) for node in range(3)]
    wait_until(are_ready(tmp_path, 3))
    wait_until((tmp_path / f"ready{away}").read_text)
    stopped = [launchers[away].process.pid, int((tmp_path / f"ready{away}").read_text())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        for node, launcher in enumerate(launchers):
            if node != away:
                code, _, errors = launcher.end()
                assert code == 5 and len(errors) == 1, errors
                assert errors[0].startswith(f"error: node {away} ({HOST}, rank {away}) did not answer for 1"), errors
                assert "step 7: backward, blocks.1, exchange; it is stopped or suspended" in errors[0]
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    code, _, errors = launchers[away].end()
    assert code == 5 and len(errors) == 1, errors
    assert errors[0].startswith(f"error: this node (node {away}, {HOST}) was away for 1"), errors
    assert "at step 7: backward, blocks.1, exchange, and the job has ended without it" in errors[0]


# ---- real ranks --------------------------------------------------------------------------------------------------


def training(port: int, iterations: int) -> list[subprocess.Popen[str]]:
    """A run on two nodes of one rank each."""
    flags = (f"--preset tiny --mock-data --train-iters {iterations} --log-interval 1 --eval-interval 0 --num-layers 1 "
             "--hidden-size 16 --num-attention-heads 2").split()
    return [begin([sys.executable, "-m", "megatron.launch", "--nnodes", "2", "--node-rank", str(node), "--master-addr",
                   "127.0.0.1", "--master-port", str(port), "pretrain_gpt2.py", *flags], cwd=ROOT,
                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) for node in range(2)]


def test_a_run_on_two_nodes_ends_without_a_word_of_torchs_about_its_store(port: int) -> None:
    """Rank 0 keeps the store in which ranks leave notes for each other, and leaves last."""
    launchers = training(port, 2)
    said = [launcher.communicate(timeout=120) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert "iteration        2/       2" in said[0][0] and said[1] == ("", ""), said
    assert "TCPStore" not in said[0][1]


def test_a_lost_node_0_leaves_one_line_and_no_stack_of_torchs(port: int) -> None:
    """It keeps the store, and each connection to it that breaks is a warning of torch's with a stack in C++."""
    launchers = training(port, 1_000_000)
    assert launchers[0].stdout is not None
    assert any("iteration  " in line for line in launchers[0].stdout)
    launchers[0].kill()
    _, err = launchers[1].communicate(timeout=PATIENCE)
    assert launchers[1].returncode == 5 and err.count("\n") == 1, err
    assert err.startswith(f"error: node 0 ({HOST}, rank 0) is gone without a word")
