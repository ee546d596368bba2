"""A save in the background is the save of that step, whatever training does meanwhile; it fails and dies like any."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.checkpoint.writer import AsyncSaver
from megatron.errors import NumericsError, PeerError, StorageError, TrainerError
from megatron.train.loop import Trainer
from megatron.zero.api.engine import Engine
from tests.distributed import RankError, on_ranks, run_ranks
from tests.megatron.checkpoint.faults import before_each, failing, held_back
from tests.megatron.checkpoint.made import open_quietly
from tests.megatron.helpers import ROOT, TINY, lines, steps, total_digest, train, train_all, write_corpus
from tests.wires import accelerator_side


def engine_of(world: int = 1, stage: int = 0) -> Engine:
    torch.manual_seed(0)
    made: Engine = zero.initialize(model=nn.Linear(4, 4), config={
        "train_batch_size": world, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage}})[0]
    return made


def step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(1, 4)).square().mean())
    engine.step()


def weights(engine: Engine) -> list[float]:
    return [x for parameter in engine.module.parameters() for x in parameter.detach().flatten().tolist()]


def join_writers() -> None:
    """Wait for the threads of abandoned saves."""
    for thread in threading.enumerate():
        if thread.name == "save":
            thread.join(60)


@contextmanager
def slow_writes(root: Path, seconds: float) -> Iterator[None]:
    """A file of tensors takes so long."""
    def wait(operation: str, path: str) -> None:
        if path.endswith(".safetensors"):
            time.sleep(seconds)

    with before_each(root, wait, ["fsync"]):
        yield


# ---- one engine --------------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_at_the_start_whatever_happens_to_it_meanwhile(tmp_path: Path) -> None:
    engine, told = engine_of(), list[Any]()
    for number in (1, 2):
        step(engine)
        mix = [torch.rand(2, 5).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.bool)]
        mix += [torch.empty(0, 4), torch.tensor(7), torch.rand(1001)]
        wanted, position, before = [x.clone() for x in mix], [1, 2], weights(engine)
        with held_back(tmp_path) as go:
            engine.save_checkpoint(tmp_path, client_state={"mix": mix, "position": position}, in_background=True,
                                   on_complete=told.append)
            position.append(3)
            for x in mix:
                x.zero_()
            step(engine)
            assert engine.is_saving and len(told) == number - 1 == len(tag_names(tmp_path))
            go.set()
            engine.finish_save()
        again = engine_of()
        state: Any = again.load_checkpoint(tmp_path)[1]
        assert weights(again) == before != weights(engine) and state["position"] == [1, 2]
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(state["mix"], wanted, strict=True))
    assert [report.tag for report in told] == ["global_step1", "global_step3"] and not engine.is_saving


@pytest.mark.parametrize("side", ["cpu", "accelerator"])
def test_a_step_waits_for_no_save_and_finds_out_that_it_is_complete_or_has_failed(side: str, tmp_path: Path) -> None:
    """How far the ranks are travels with the sums of a step, and is known when the step is."""
    with accelerator_side(side == "accelerator"):
        engine = engine_of()
        with held_back(tmp_path) as go:
            engine.save_checkpoint(tmp_path, "t", in_background=True)
            step(engine), step(engine)
            assert engine.is_saving
            go.set()
            while engine.is_saving:
                step(engine)
        assert open_checkpoint(tmp_path, "t").tag == "t"
        with failing(tmp_path, errno.EIO, lambda operation, path: path.endswith("rank0.json")):
            engine.save_checkpoint(tmp_path, "u", in_background=True)
            with pytest.raises(StorageError, match="Input/output error"):
                while True:
                    step(engine)
        assert not engine.is_saving and tag_names(tmp_path) == ["t"]


def test_an_abandoned_save_never_comes_and_one_of_its_name_may_follow_while_it_still_writes(tmp_path: Path) -> None:
    engine, calls = engine_of(), count()
    began, go = threading.Event(), threading.Event()

    def hold_the_first(operation: str, path: str) -> None:
        if path.endswith(".safetensors") and next(calls) == 0:
            began.set()
            assert go.wait(60)

    engine.save_checkpoint(tmp_path, "before")
    with before_each(tmp_path, hold_the_first, ["fsync"]):
        engine.save_checkpoint(tmp_path, "t", in_background=True)
        assert began.wait(60) and not engine.abandon_save() and not engine.is_saving
        assert tag_names(tmp_path) == ["before"]
        step(engine)
        engine.save_checkpoint(tmp_path, "t")
        go.set()
        join_writers()
    verify_tag(tmp_path, "t")
    assert open_quietly(tmp_path, "t").iteration == 1


def test_one_that_is_abandoned_too_late_is_complete(tmp_path: Path) -> None:
    """Nothing comes after `abandon_save`: its folder may be another run's by then."""
    engine, began, go = engine_of(), threading.Event(), threading.Event()

    def hold(operation: str, path: str) -> None:
        began.set()
        assert go.wait(60)

    with before_each(tmp_path, hold, ["rename"]):
        engine.save_checkpoint(tmp_path, "t", in_background=True)
        while not began.wait(0.01):
            step(engine)
        threading.Timer(0.1, go.set).start()
        assert engine.abandon_save() and tag_names(tmp_path) == ["t"]


# ---- several engines ---------------------------------------------------------------------------------------------


def test_a_save_that_another_engine_left_under_way_comes_before_the_next_one(tmp_path: Path) -> None:
    dropped, engine = engine_of(), engine_of()
    dropped.save_checkpoint(tmp_path, "first", in_background=True)
    engine.save_checkpoint(tmp_path, "second")
    assert not dropped.is_saving and (tmp_path / "latest").read_text().strip() == "second"
    assert tag_names(tmp_path) == ["first", "second"]


@on_ranks(2)
def test_a_rank_that_fails_is_told_while_another_one_still_writes(rank: int, world: int, tmp_path: Path) -> None:
    """Rank 1 fails while rank 0 writes: all advance at once, and only then rank 0 completes its file."""
    engine, advance = engine_of(world, 2), AsyncSaver._advance
    full = failing(tmp_path, errno.ENOSPC, lambda operation, path: path.endswith("rank1.safetensors"), ["write"])
    with held_back(tmp_path) if rank == 0 else full as go:
        def completes_its_file(saver: AsyncSaver) -> None:
            if go is not None:
                go.set()
            advance(saver)

        engine.save_checkpoint(tmp_path, in_background=True)
        with mock.patch.object(AsyncSaver, "_advance", completes_its_file):
            with pytest.raises(StorageError, match="No space left"):
                for _ in range(500):
                    step(engine)
    assert tag_names(tmp_path) == []


def killed(rank: int, world: int, root: Path, victim: int, call: int) -> int:
    """Two saves, in the second of which the `call`-th change kills rank `victim`; how many changes it made."""
    engine, calls = engine_of(world, 2), count()

    def die(operation: str, path: str) -> None:
        if next(calls) == call and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    step(engine)
    engine.save_checkpoint(root)
    step(engine)
    with before_each(root, die):
        engine.save_checkpoint(root)
    return next(calls)


def test_a_save_of_two_ranks_that_dies_at_any_change_leaves_the_tag_before_it(tmp_path: Path) -> None:
    newest = []
    for victim, changes in enumerate(run_ranks(killed, 2, tmp_path / "rehearsal", 0, -1)):
        for call in sorted({0, changes // 3, 2 * changes // 3, changes - 1}):
            root = tmp_path / f"{victim}-{call}"
            with pytest.raises(RankError, match=f"rank {victim} of 2 died"):
                run_ranks(killed, 2, root, victim, call)
            for tag in tag_names(root):
                verify_tag(root, tag)
            assert "global_step1" in tag_names(root)
            newest.append(open_quietly(root).tag)
            assert newest[-1] == tag_names(root)[-1]
    assert set(newest) == {"global_step1", "global_step2"}, "before and after the commit"


# ---- runs --------------------------------------------------------------------------------------------------------


def flags(root: Path, name: str, *more: object) -> list[object]:
    return [*TINY, "--train-data", root / "corpus", "--train-iters", 6, "--save-interval", 2, "--save", root / name,
            "--load", root / name, "--metrics-file", root / f"{name}.jsonl", *more]


def slowly(rank: int, world: int, argv: list[object], seconds: float) -> str:
    """A run whose rank `world - 1` needs that long to write."""
    with slow_writes(Path(str(argv[argv.index("--save") + 1])), seconds if rank == world - 1 else 0):
        return train(argv)


@pytest.mark.parametrize(("world", "layout", "seconds"), [
    (1, [], 0.0), (2, ["--model-parallel-size", 2], 0.3),
    pytest.param(2, ["--zero-stage", 2], 0.1, marks=pytest.mark.slow)])
def test_every_tag_of_a_run_is_the_one_of_a_run_that_waits_for_its_saves(world: int, layout: list[object],
                                                                         seconds: float, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    run_ranks(train_all, world, [flags(tmp_path, "plain", *layout)])
    said = run_ranks(slowly, world, flags(tmp_path, "async", *layout, "--async-save"), seconds)[0]
    tags = ["global_step2", "global_step4", "global_step6"]
    assert re.findall(r"saved (\w+) to", said) == tag_names(tmp_path / "async") == tags
    assert lines(tmp_path / "async.jsonl") == lines(tmp_path / "plain.jsonl")
    for tag in tags:
        verify_tag(tmp_path / "async", tag)
        assert total_digest(tmp_path / "async", tag) == total_digest(tmp_path / "plain", tag)
        plain, other = (open_checkpoint(tmp_path / name, tag).shared_state for name in ("plain", "async"))
        assert {**plain, "run_id": ""} == {**other, "run_id": ""}
    assert sorted(os.listdir(tmp_path / "async")) == [".lock", *tags, "latest", "zero_to_fp32.py"]


# ---- errors ------------------------------------------------------------------------------------------------------


def failing_run(rank: int, world: int, argv: list[object], root: Path, culprit: int) -> str:
    """A run in which rank `culprit` cannot write its part of global_step4."""
    end = f"/rank{culprit}.safetensors"
    with failing(root, errno.ENOSPC, lambda operation, path: "global_step4" in path and path.endswith(end), ["write"]):
        try:
            return train(argv)
        except TrainerError as error:
            return f"{error.code}: {error}"


@pytest.mark.parametrize(("world", "culprit"), [(2, 1), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_an_error_of_the_writing_ends_every_rank_with_code_7(world: int, culprit: int, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    (said,) = set(run_ranks(failing_run, world, flags(tmp_path, "s", "--async-save"), tmp_path / "s", culprit))
    assert said.startswith(f"7: --save: cannot write {tmp_path}/s/.staging-global_step4-") and \
        f"/rank{culprit}.safetensors: No space left" in said
    assert len(steps(tmp_path / "s.jsonl")) >= 4
    assert sorted(os.listdir(tmp_path / "s")) == [".lock", "global_step2", "latest", "zero_to_fp32.py"]
    verify_tag(tmp_path / "s", "global_step2")
    train_again = run_ranks(train_all, world, [flags(tmp_path, "s", "--async-save")])[0]
    assert "loaded weights and optimizer of global_step2" in train_again[0]


def broken_training(rank: int, world: int, argv: list[object], kind: type[BaseException], culprit: int | None) -> str:
    """A run whose step 3 fails, on rank `culprit` or all, while the save of step 2 is under way."""
    step, said = Trainer.train_step, list[str]()

    def breaks(trainer: Trainer, *args: Any) -> Any:
        if trainer.engine.global_steps == 2:
            trainer.log.print_line = said.append  # type: ignore[method-assign]
            raise kind("broken") if culprit in (None, rank) else PeerError("lost")
        return step(trainer, *args)

    with mock.patch.object(Trainer, "train_step", breaks):
        try:
            return slowly(rank, world, argv, 0.3)
        except (TrainerError, KeyboardInterrupt) as error:
            join_writers()
            return f"{type(error).__name__} {''.join(said)}"


LOST = "the save under way is not complete; the tag before it is the newest"


@pytest.mark.parametrize(("world", "kind", "culprit", "said"), [
    (1, PeerError, None, "PeerError  saved global_step2"),
    (2, NumericsError, None, "NumericsError  saved global_step2"),
    (2, StorageError, 1, f"PeerError  {LOST}"), (1, KeyboardInterrupt, None, f"KeyboardInterrupt  {LOST}")])
def test_an_error_of_every_rank_completes_the_save_under_way_and_one_of_a_rank_does_not(
        world: int, kind: type[BaseException], culprit: int | None, said: str, tmp_path: Path) -> None:
    """The folder is given back: another run may save there before this process ends, so nothing comes later."""
    write_corpus(tmp_path / "corpus")
    found = run_ranks(broken_training, world, flags(tmp_path, "s", "--async-save"), kind, culprit, timeout=20)
    assert found[0].startswith(said)
    assert tag_names(tmp_path / "s") == (["global_step2"] if "saved" in said else [])


# ---- the end of the program ----------------------------------------------------------------------------------------

ENDS = """
import os, sys, time
import torch
from torch import nn
from megatron import zero
from megatron.checkpoint import safetensors_io

safetensors_io.WRITE_BLOCK_BYTES = 4096  # of several blocks each but the first waits for a thread
fsync, seconds = os.fsync, iter([1])
def slowly(descriptor):
    time.sleep(next(seconds, 0))
    fsync(descriptor)

torch.manual_seed(0)
engine = zero.initialize(model=nn.Linear(64, 64), config={
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2}})[0]
def step():
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
rank = int(os.environ.get("RANK", 0))
step()
engine.save_checkpoint(sys.argv[1])
step()
os.fsync = slowly
engine.save_checkpoint(sys.argv[1], in_background=True)
"""
INCOMPLETE = " global_step2 of {folder}, which was being written in the background, is not complete"
FULL = "def full(descriptor): raise OSError(28, 'No space left')\nos.fsync = full"
ENDINGS = [(1, "del engine, step", 0, ""), (1, FULL, 7, f"error:{INCOMPLETE}: --save: cannot write "),
           (2, "raise ValueError if rank == 1 else SystemExit(0)", 5, f"warning:{INCOMPLETE}"),
           (2, "", 0, ""), (1, "sys.exit(0)", 0, ""), (2, "del engine, step", 0, ""),
           (2, "torch.distributed.destroy_process_group()", 2, f"error:{INCOMPLETE}"),
           (2, "[step() for _ in range(100 * rank)]", 2, "rank 0 is at the end of its program, with a")]


@pytest.mark.parametrize(("ranks", "last_line", "code", "said"), [
    *ENDINGS[:3], *(pytest.param(*ending, marks=pytest.mark.slow) for ending in ENDINGS[3:])])
def test_a_program_that_ends_completes_its_save_or_says_that_it_cannot(ranks: int, last_line: str, code: int, said: str,
                                                                       tmp_path: Path) -> None:
    script, root = tmp_path / "script.py", tmp_path / "s"
    script.write_text(ENDS + last_line)
    launcher = ["-m", "megatron.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, str(script), str(root)], cwd=ROOT, text=True,
                          capture_output=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == code and said.format(folder=root) in done.stderr, done.stderr
    assert tag_names(root) == ["global_step1", "global_step2"][:1 if code else 2] and (code or not done.stderr)
    verify_tag(root, tag_names(root)[-1])
