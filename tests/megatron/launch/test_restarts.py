"""torchrun starts all ranks again when one has died (--max-restarts): they go on from the newest checkpoint, and what
the ranks before them left in torchrun's store is not taken for theirs."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.distributed import process_group
from megatron.distributed.preflight import check_ranks_match
from tests.distributed import run_ranks
from tests.megatron.helpers import ROOT, TINY, lines, records, total_digest, train_all
from tests.megatron.launch.processes import environment

DIES = """
import os, pathlib, signal, sys
import pretrain_gpt2
from megatron.train.loop import Trainer
HOW, MARK, TIMES = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
del sys.argv[1:4]
taken = Trainer.train_step
def dies(trainer, batches):
    died = MARK.read_text() if MARK.exists() else ""
    if os.environ["RANK"] == "1" and trainer.engine.global_steps == 4 and len(died) < TIMES:
        MARK.write_text(died + "x")
        if HOW == "raises":
            raise ValueError("once")
        os._exit(3) if HOW == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    return taken(trainer, batches)
Trainer.train_step = dies
sys.exit(pretrain_gpt2.program())
"""


def test_ranks_that_are_started_again_do_not_meet_those_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store that torchrun keeps over a restart."""
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    place = process_group.Environment(rank=0, world_size=1)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1",
                        "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MEGATRON_STORE_FILE", raising=False)
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        check_ranks_match(process_group._open_store(place, timedelta(seconds=5)), 0, 1, {}, timedelta(seconds=5))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "times"), [("is killed", 1), ("raises", 1), ("exits", 2), ("is killed", 3)])
def test_a_job_under_torchrun_goes_on_after_a_rank_dies(how: str, times: int, tmp_path: Path) -> None:
    """As often as torchrun starts it again: twice."""
    flags = [*TINY, "--mock-data", "--batch-size", 2, "--zero-stage", 2, "--train-iters", 8, "--save-interval", 2]
    run_ranks(train_all, 2, [[*flags, "--save", tmp_path / "whole", "--metrics-file", tmp_path / "whole.jsonl"]])
    (tmp_path / "dies.py").write_text(DIES)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2",
         "--monitor-interval", "0.1", tmp_path / "dies.py", how, tmp_path / "mark", str(times),
         *map(str, [*flags, "--save", tmp_path / "s", "--load", tmp_path / "s", "--metrics-file", tmp_path / "m"])],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert "given twice" not in ended.stderr and "started differently" not in ended.stderr, ended.stderr
    if times > 2:
        assert ended.returncode != 0 and max(step["iteration"] for step in records(tmp_path / "m")) == 4
        return
    assert ended.returncode == 0 and ended.stdout.count("loaded weights and optimizer of global_step4") == times
    assert lines(tmp_path / "m") == lines(tmp_path / "whole.jsonl")
    assert total_digest(tmp_path / "s") == total_digest(tmp_path / "whole")
