"""The rank that a job waited for, or that left it, is named with its host and its place; its victims are not."""

from __future__ import annotations

import os
import socket
import time

import pytest

from megatron.distributed import exit_codes
from megatron.distributed.rank_status import RankStatus, StatusSnapshot, StragglerMonitor
from megatron.errors import ConfigError
from tests.megatron.launch.processes import LIMIT, PATIENCE, alive

HOST = socket.gethostname()

# ---- with ranks that are small programs without torch -------------------------------------------------------------

TRAINING = """
from megatron.errors import PeerError
from megatron.distributed import exit_codes
from megatron.distributed.process_group import publish_status
from megatron.distributed.rank_status import STATUS, COLLECTIVE
def main():
    publish_status()
    STATUS.set_activity("training")
    STATUS.set_step(7)
    STATUS.set_phase("backward", "blocks.1")
    meet(here)
    if rank == 1:
        {fault}
    STATUS.collective_counters[0] = 2
    time.sleep({patience})
    raise PeerError("rank 0 waited in vain")
sys.exit(exit_codes.run(main))
"""
AT = "at step 7: backward, blocks.1"


@pytest.mark.parametrize("fault, words, patience", [
    ("sys.exit(0)", "left with exit code 0", 0.3), ("os._exit(3)", "ended with exit code 3", 60),
    ("os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9 (SIGKILL)", 0.3),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "was stopped by signal 19 (SIGSTOP)", 60)])
def test_a_rank_that_leaves_is_named_with_its_place_whether_others_notice_or_not(fault, words, patience, start):
    job = start(TRAINING.format(fault=fault, patience=patience), ranks=3)
    pid = job.pid(1)
    begun = time.monotonic()
    code, _, lines = job.end()
    assert time.monotonic() - begun < 2 * LIMIT
    assert code == (3 if words.endswith("3") else 5)
    assert len(lines) == 1 and lines[0].startswith(f"error: rank 1 (pid {pid} on {HOST}) {words} {AT}")
    assert not any(alive(job.pid(rank)) for rank in range(3))


@pytest.mark.parametrize("fault", [
    "time.sleep(60)", *(pytest.param(fault, marks=pytest.mark.slow) for fault in (
        "while True: pass", "__import__('re').match('(a+)+$', 60 * 'a' + 'b')"))])
def test_a_rank_that_hangs_is_named_and_not_its_victims(fault, start):
    job = start(TRAINING.format(fault=fault, patience=3), ranks=3)
    pids = [job.pid(rank) for rank in range(3)]
    begun = time.monotonic()
    code, _, lines = job.end()
    assert time.monotonic() - begun < 3 + 2 * LIMIT
    assert code == 5 and len(lines) == 1
    who = f"rank 1 (pid {pids[1]} on {HOST})"
    assert lines[0].startswith(f"error: {who} hangs or is too slow: the others waited for it")
    assert AT in lines[0] and not any(map(alive, pids))


def test_a_rank_that_has_not_begun_is_named(start, tmp_path):
    (tmp_path / "met1").touch()
    job = start("if rank == 1:\n    time.sleep(60)\n" + TRAINING.format(fault="pass", patience=3), ranks=2)
    code, _, lines = job.end()
    assert code == 5 and len(lines) == 1
    assert f"rank 1 (pid {job.pid(1)} on {HOST}) did not come to the others" in lines[0]


WAITED = "raise PeerError('rank 0 waited in vain')"


@pytest.mark.parametrize("fault, patience, end", [
    ("pass", 0, "os._exit(0)"),  # all ranks leave in the middle
    ("os._exit(0)", 1, "STATUS.mark_done(); return"),  # one left early, where all others end well
    ("STATUS.mark_done(); return", 1, WAITED),
    # a network that fails at once: the rank that computes at that time has nothing to do with it
    ("STATUS.collective_counters[1] += 1; time.sleep(60)", 0.3, WAITED)])
def test_a_rank_that_has_not_failed_is_not_blamed(fault, patience, end, start):
    body = TRAINING.format(fault=fault, patience=patience).replace('raise PeerError("rank 0 waited in vain")', end)
    assert start(body).end() == ((5, "", ["error: rank 0 waited in vain"]) if end == WAITED else (0, "", []))


def test_an_error_of_a_ranks_own_goes_before_a_rank_that_hangs(start):
    body = TRAINING.format(fault="time.sleep(60)", patience=3).replace("raise PeerError(", "raise ValueError(")
    code, _, lines = start(body.replace("STATUS.collective_counters[0] = 2", "")).end()
    assert code == 5 and lines[0].startswith("error: internal error in rank 0: ValueError")


# ---- the file -----------------------------------------------------------------------------------------------------

def test_a_place_is_read_as_it_was_written(tmp_path):
    places, mine = StragglerMonitor(str(tmp_path / "places"), 2), RankStatus()
    assert str(places.status_of(1)) == "before its program began"
    mine.set_activity("start-up")
    mine.publish_in(str(tmp_path / "places"), 1)
    assert places.status_of(1) == StatusSnapshot(1, os.getpid(), 0, "start-up")
    assert places.status_of(0) == StatusSnapshot()
    for step, phase, unit, text in [(0, "", "", "start-up"), (3, "forward", "blocks.11", "step 3: forward, blocks.11"),
                                    (3, "forward", "", "step 3: forward"), (4, "", "", "step 4: training")]:
        mine.set_activity("training" if step else "start-up")
        mine.set_step(step)
        mine.set_phase(phase, unit)
        assert str(places.status_of(1)) == text
    with mine.in_activity("evaluation"):
        mine.set_phase("forward", "blocks.0")
        mine.collective_counters[0] = 1
        assert str(places.status_of(1)) == "step 4: evaluation, forward, blocks.0, exchange"
    mine.collective_counters[0] = 0
    assert str(places.status_of(1)) == "step 4: training"


def test_only_who_does_not_wait_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.distributed.rank_status.STRAGGLER_SECONDS", 0.05)
    path = str(tmp_path / "places")
    ranks = [RankStatus() for _ in range(3)]
    sight = StragglerMonitor(path, 3)
    for local, one in enumerate(ranks):
        one.publish_in(path, local)
        one.collective_counters[0], one.collective_counters[1] = (2, 1, 0)[local], 5
    sight.update()
    time.sleep(0.1)
    ranks[2].collective_counters[1] += 1
    assert [one.local_rank for one in sight.stragglers([0, 1, 2])] == [1]
    assert sight.stragglers([0, 2]) == []


def test_an_error_of_the_engine_may_be_caught_but_an_exit_may_not():
    for error, is_inside in ((ConfigError("no"), False), (SystemExit(), True), (SystemExit(0), True),
                             (SystemExit(3), False), (SystemExit("why"), False), (KeyboardInterrupt(), False)):
        mine = RankStatus()
        mine.mark_running()
        with pytest.raises(type(error)), mine.in_activity("training"):
            mine.set_phase("forward")
            raise error
        assert mine.snapshot.is_mid_operation == is_inside


def test_errors_of_a_device_that_come_out_of_an_exchange_are_its_own(monkeypatch):
    mine = RankStatus()
    mine.collective_counters[0] = 1
    monkeypatch.setattr(exit_codes, "STATUS", mine)
    assert exit_codes.is_peer_loss(
        RuntimeError("what is this")) and not exit_codes.is_peer_loss(ValueError("what is this"))
    assert not exit_codes.is_peer_loss(RuntimeError("CUDA error: an illegal memory access was encountered"))


# ---- the trainer --------------------------------------------------------------------------------------------------

FAULTY_TRAINING = """
import pretrain_gpt2
from megatron.distributed.rank_status import STATUS
from megatron.model.transformer import Block
forward = Block.forward
def faulty(block, *args, **kwargs):
    if rank == 1 and STATUS.snapshot.step == 3:
        {fault}
    return forward(block, *args, **kwargs)
Block.forward = faulty
sys.exit(pretrain_gpt2.program())
"""


@pytest.mark.parametrize("fault, words", [
    ("os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9 (SIGKILL)"),
    pytest.param("time.sleep(1000)", "hangs or is too slow: the others waited for it", marks=pytest.mark.slow)])
def test_a_faulty_rank_of_a_training_is_named_with_its_place(fault, words, start):
    flags = ("--preset tiny --mock-data --train-iters 6 --zero-stage 3 --stage3-param-persistence-threshold 0 "
             "--eval-interval 0 --distributed-timeout-seconds 4").split()
    job = start(FAULTY_TRAINING.format(fault=fault), arguments=(*flags,))
    code, _, lines = job.end(2 * PATIENCE)
    errors = [line for line in lines if line.startswith("error:")]
    assert code == 5 and len(errors) == 1, lines
    assert errors[0].startswith(f"error: rank 1 (pid {job.pid(1)} on {HOST}) {words}")
    assert "step 3: forward, blocks.0" in errors[0]
    assert not any(alive(job.pid(rank)) for rank in range(2))
