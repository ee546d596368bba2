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
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.checkpoint import async_save, safetensors_io, writer
from megatron.checkpoint.async_save import AsyncSaver, HostSnapshot
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.safetensors_io import FileTensor
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.checkpoint.reshard import TPSlice
from megatron.checkpoint.writer import PendingSave, RankFiles, SaveReport, TensorPiece
from megatron.errors import NumericsError, PeerError, StorageError, TrainerError
from megatron.train.loop import Trainer
from mpu.groups import SOLO, Groups
from tests.distributed import run_ranks
from tests.megatron.checkpoint.made import open_quietly, save_solo
from tests.megatron.helpers import ROOT, TINY, lines, steps, total_digest, train, train_all, write_corpus
from tests.megatron.zero.run import configure, engine_around
from tests.wires import accelerator_side

CPU = torch.device("cpu")


def save_of(root: Path, step: int, data: torch.Tensor, copy: HostSnapshot, **states: Any) -> PendingSave:
    content: dict[str, Any] = dict(rank_state={}, shared_state={}, config={}, layout={"tp": 1, "dp": 1})
    piece = TensorPiece("w", "weight", TPSlice(tuple(data.shape)), 0, data)
    return PendingSave(root, f"global_step{step}", pieces=[piece], world=SOLO, run_id="run", iteration=step,
                       hold=copy.copy_tensors, **{**content, **states})


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    go, write = threading.Event(), RankFiles.write

    def later(*args: Any) -> Any:
        assert go.wait(60)
        return write(*args)

    with mock.patch.object(RankFiles, "write", later):
        yield go


@contextmanager
def slow_writes(seconds: float) -> Iterator[None]:
    write = RankFiles.write

    def later(*args: Any) -> Any:
        time.sleep(seconds)
        return write(*args)

    with mock.patch.object(RankFiles, "write", later):
        yield


def weight(root: Path, step: int, count: int) -> list[float]:
    out = torch.empty(count)
    open_checkpoint(root, f"global_step{step}").read_slice("weight", "w", TPSlice((count,)), 0, out)
    return out.tolist()


# ---- the copy ----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_at_the_start_whatever_happens_to_it_meanwhile(tmp_path: Path) -> None:
    data, stream, shared = torch.arange(8.0), torch.arange(3, dtype=torch.uint8), {"position": [1, 2]}
    told: list[SaveReport] = []
    saver = AsyncSaver(SOLO)
    with held_back() as go:
        saver.start(save_of(tmp_path, 1, data, HostSnapshot(CPU), rank_state={"s": stream}, shared_state=shared),
                    told.append)
        data.zero_(), stream.zero_(), shared["position"].append(3)
        saver.poll(saver.progress)
        assert saver.has_pending_save and not told and tag_names(tmp_path) == []
        go.set()
        saver.wait_for_save()
    assert [report.tag for report in told] == ["global_step1"] and not saver.has_pending_save
    found = open_checkpoint(tmp_path)
    assert weight(tmp_path, 1, 8) == list(range(8))
    assert found.rank_state(0) == {"s": mock.ANY} and found.rank_state(0)["s"].tolist() == [0, 1, 2]  # type: ignore
    assert found.shared_state == {"position": [1, 2]}


@pytest.mark.parametrize("second", [1, 2])
def test_two_saves_under_way_in_one_folder_are_both_complete(second: int, tmp_path: Path) -> None:
    """Two engines that went on from one checkpoint: their run has the same name."""
    savers = AsyncSaver(SOLO), AsyncSaver(SOLO)
    with held_back() as go:
        for saver, step in zip(savers, (1, second), strict=True):
            saver.start(save_of(tmp_path, step, torch.full((8,), float(step)), HostSnapshot(CPU)), lambda report: None)
        assert sum(name.startswith(".staging") for name in os.listdir(tmp_path)) == 2
        go.set()
        for saver in savers:
            saver.wait_for_save()
    assert [weight(tmp_path, step, 8) for step in (1, second)] == [[1.0] * 8, [float(second)] * 8]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_a_save_that_somebody_else_left_under_way_comes_before_the_next_one(tmp_path: Path) -> None:
    """An engine that a notebook dropped, and one that writes elsewhere."""
    dropped, elsewhere = AsyncSaver(SOLO, owner="dropped"), AsyncSaver(SOLO, owner="elsewhere")
    for saver, root, step in ((dropped, tmp_path / "s", 9), (elsewhere, tmp_path / "other", 1)):
        root.mkdir()
        saver.start(save_of(root, step, torch.zeros(8), HostSnapshot(CPU)), lambda report: None)
    engine = zero.initialize(model=nn.Linear(2, 2), config={
        "train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})[0]
    (tmp_path / "link").symlink_to("s")
    engine.save_checkpoint(tmp_path / "link")
    assert not dropped.has_pending_save and elsewhere.has_pending_save
    assert (tmp_path / "s" / "latest").read_text().strip() == "global_step0"
    assert tag_names(tmp_path / "s") == ["global_step0", "global_step9"]
    elsewhere.abandon()


def test_the_error_of_another_ones_save_is_told_there_and_not_here(tmp_path: Path) -> None:
    earlier = AsyncSaver(SOLO, owner="earlier")
    with mock.patch.object(RankFiles, "write", side_effect=StorageError("No space left")):
        earlier.start(save_of(tmp_path, 9, torch.zeros(8), HostSnapshot(CPU)), pytest.fail)
        wait([earlier._job])
    engine = zero.initialize(model=nn.Linear(2, 2), config={
        "train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})[0]
    engine.save_checkpoint(tmp_path)
    assert tag_names(tmp_path) == ["global_step0"]
    with pytest.raises(StorageError, match="No space left"):
        earlier.poll(())
    earlier.wait_for_save()


def dropped_on_ranks(rank: int, world: int, root: Path) -> list[str]:
    """Rank 0 says the folder; the last rank writes the first save later than the others."""
    def made() -> Any:
        return zero.initialize(model=nn.Linear(4, 4), config={
            "train_batch_size": world, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2}})[0]

    with slow_writes(0.3 * rank):
        made().save_checkpoint(root / str(rank) if rank else root, "first", in_background=True)
        made().save_checkpoint(root, "second")
    return [(root / "latest").read_text().strip(), *tag_names(root)]


def test_ranks_complete_together_what_one_of_their_engines_left_under_way(tmp_path: Path) -> None:
    assert run_ranks(dropped_on_ranks, 2, tmp_path) == [["second", "first", "second"]] * 2


def test_an_abandoned_save_never_comes(tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    saver = AsyncSaver(SOLO)
    with held_back() as go:
        saver.start(save_of(tmp_path, 2, torch.zeros(8), HostSnapshot(CPU)), lambda report: None)
        saver.abandon()
        go.set()
    saver.wait_for_save()
    saver._finish_at_exit()
    assert tag_names(tmp_path) == ["global_step1"]
    save_solo(tmp_path, 3)
    assert open_checkpoint(tmp_path).tag == "global_step3"


def test_one_that_is_abandoned_too_late_is_complete(tmp_path: Path) -> None:
    """Nothing comes after `abandon`: its folder may be another run's by then."""
    saver, began, go = AsyncSaver(SOLO), threading.Event(), threading.Event()
    commit = writer.commit_tag

    def slowly(*args: Any) -> Any:
        began.set()
        assert go.wait(60)
        return commit(*args)

    with mock.patch.object(writer, "commit_tag", slowly):
        saver.start(save_of(tmp_path, 1, torch.zeros(8), HostSnapshot(CPU)), lambda report: None)
        saver._advance()
        assert began.wait(60)
        threading.Timer(0.1, go.set).start()
        assert saver.abandon() and tag_names(tmp_path) == ["global_step1"]


def test_a_save_of_the_same_name_may_follow_an_abandoned_one_that_still_writes(tmp_path: Path) -> None:
    write, saver, calls = RankFiles.write, AsyncSaver(SOLO), iter(range(2))
    began, go, done = threading.Event(), threading.Event(), threading.Event()

    def at_once(*args: Any) -> Any:
        if next(calls):
            go.set()
            assert done.wait(60)
            return write(*args)
        began.set()
        assert go.wait(60)
        try:
            return write(*args)
        finally:
            done.set()

    with mock.patch.object(RankFiles, "write", at_once):
        saver.start(save_of(tmp_path, 1, torch.zeros(8), HostSnapshot(CPU)), lambda report: None)
        assert began.wait(60) and not saver.abandon()
        save_of(tmp_path, 1, torch.ones(8), HostSnapshot(CPU)).finish()
    assert weight(tmp_path, 1, 8) == [1.0] * 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_the_copy_holds_any_mix_of_types_and_shapes_and_is_used_again(dtype: torch.dtype) -> None:
    copy = HostSnapshot(CPU)
    sources = [torch.ones(3, dtype=torch.uint8), torch.rand(2, 5).to(dtype), torch.empty(0, 4),
               torch.tensor(7, dtype=torch.int64), torch.rand(1001)]
    first = copy.copy_tensors([FileTensor(str(i), x.dtype, tuple(x.shape), x.detach) for i, x in enumerate(sources)])
    assert all(torch.equal(item.load(), x) and item.load().shape == x.shape
               for item, x in zip(first, sources, strict=True))
    where = copy._buffer.data_ptr()
    copy.copy_tensors([FileTensor("x", torch.float32, (500,), lambda: torch.zeros(500))])
    assert copy._buffer.data_ptr() == where


# ---- one after the other -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["cpu", "accelerator"])
def test_a_step_asks_nobody_about_the_save_under_way(side: str, tmp_path: Path) -> None:
    """How far the ranks are travels with the sums of a step, and is known when the step is."""
    with accelerator_side(side == "accelerator"), held_back() as go:
        engine = engine_around(nn.Linear(4, 4), configure(bf16=True), Groups())

        def step() -> None:
            engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean())
            engine.step()

        engine.save_checkpoint(tmp_path, "t", in_background=True)
        with mock.patch.object(PendingSave, "finish_phase", side_effect=AssertionError):
            step(), step()
        assert engine.is_saving
        go.set()
        for _ in range(20):
            wait([engine._background_save._job])
            step()
        assert not engine.is_saving and open_checkpoint(tmp_path, "t").tag == "t"


def flags(root: Path, name: str, *more: object) -> list[object]:
    return [*TINY, "--train-data", root / "corpus", "--train-iters", 6, "--save-interval", 2, "--save", root / name,
            "--load", root / name, "--metrics-file", root / f"{name}.jsonl", *more]


def slowly(rank: int, world: int, argv: list[object], seconds: float) -> str:
    """A run whose rank `world - 1` needs that long to write."""
    with slow_writes(seconds if rank == world - 1 else 0):
        return train(argv)


@pytest.mark.parametrize(("world", "layout", "seconds"), [
    (1, [], 0.0), (2, ["--model-parallel-size", 2], 0.3), pytest.param(1, [], 0.3, marks=pytest.mark.slow),
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


def preempted(rank: int, world: int, argv: list[object]) -> str:
    """A run that is asked to stop in step 3, while the save of step 2 is under way."""
    step = Trainer.train_step

    def signalled(trainer: Trainer, *args: Any) -> Any:
        if rank == 0 and trainer.engine.global_steps == 2:
            assert trainer.engine.is_saving
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *args)

    with mock.patch.object(Trainer, "train_step", signalled):
        return slowly(rank, world, argv, 0.3)


@pytest.mark.parametrize("world", [1, 2])
def test_preemption_completes_the_save_under_way_and_then_its_own(world: int, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    said = run_ranks(preempted, world, flags(tmp_path, "s", "--async-save"))[0]
    assert re.findall(r"(saved \w+|preempted at step 3)", said) == [
        "saved global_step2", "saved global_step3", "preempted at step 3"]
    assert open_quietly(tmp_path / "s").tag == "global_step3"


# ---- errors ------------------------------------------------------------------------------------------------------


def failing(rank: int, world: int, argv: list[object], culprit: int) -> str:
    """A run in which rank `culprit` cannot write its part of global_step4; the thread is done when it is asked."""
    write, progress = RankFiles.write, AsyncSaver.__dict__["progress"]

    def full(files: RankFiles, staging: Path) -> Any:
        if rank == culprit and "global_step4" in staging.name:
            with mock.patch.object(safetensors_io.ChecksummedWriter,
                                   "write",
                                   side_effect=OSError(errno.ENOSPC, "No space left")):
                return write(files, staging)
        return write(files, staging)

    def patient(saver: AsyncSaver) -> tuple[float, ...]:
        wait([saver._job] if saver.has_pending_save else [])
        return progress.fget(saver)

    with mock.patch.object(RankFiles, "write", full), mock.patch.object(AsyncSaver, "progress", property(patient)):
        try:
            return train(argv)
        except TrainerError as error:
            return f"{error.code}: {error}"


@pytest.mark.parametrize(("world", "culprit"), [(2, 1), pytest.param(1, 0, marks=pytest.mark.slow),
                                                pytest.param(2, 0, marks=pytest.mark.slow)])
def test_an_error_of_the_writing_ends_every_rank_at_the_next_step_with_code_7(world: int, culprit: int,
                                                                              tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    (said,) = set(run_ranks(failing, world, flags(tmp_path, "s", "--async-save"), culprit))
    assert said.startswith(f"7: --save: cannot write {tmp_path}/s/.staging-global_step4-") and \
        f"/rank{culprit}.safetensors: No space left" in said
    assert [step["iteration"] for step in steps(tmp_path / "s.jsonl")] == [1, 2, 3, 4]  # it fell in step 5
    assert sorted(os.listdir(tmp_path / "s")) == [".lock", "global_step2", "latest", "zero_to_fp32.py"]
    verify_tag(tmp_path / "s", "global_step2")
    train_again = run_ranks(train_all, world, [flags(tmp_path, "s", "--async-save")])[0]
    assert "loaded weights and optimizer of global_step2" in train_again[0]


def broken_training(rank: int, world: int, argv: list[object], kind: type[BaseException], culprit: int | None) -> str:
    """A run whose step 3 fails, on rank `culprit` or all, while the save of step 2 is under way."""
    step = Trainer.train_step
    said: list[str] = []

    def breaks(trainer: Trainer, *args: Any) -> Any:
        if trainer.engine.global_steps == 2:
            trainer.log.print_line = said.append  # type: ignore[method-assign]
            raise kind("broken") if culprit in (None, rank) else PeerError("lost")
        return step(trainer, *args)

    with mock.patch.object(Trainer, "train_step", breaks):
        try:
            return slowly(rank, world, argv, 0.3)
        except (TrainerError, KeyboardInterrupt) as error:
            return f"{type(error).__name__} {''.join(said)}"


def test_an_error_of_every_rank_completes_the_save_under_way(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    for world, kind in ((1, PeerError), (2, NumericsError)):
        root = tmp_path / f"s{world}"
        said = run_ranks(broken_training, world, flags(tmp_path, root.name, "--async-save"), kind, None)
        assert {text.partition(" saved ")[0].strip() for text in said} == {kind.__name__}
        assert open_quietly(root).tag == "global_step2"


def test_an_error_of_one_rank_tells_that_the_save_under_way_is_lost_and_waits_for_nobody(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    said = run_ranks(broken_training, 2, flags(tmp_path, "s", "--async-save"), StorageError, 1, timeout=20)
    assert said[0] == "PeerError  the save under way is not complete; the tag before it is the newest"


def test_a_second_ctrl_c_waits_for_no_save_and_nothing_of_it_comes_later(tmp_path: Path) -> None:
    """The folder is given back: another run may save there before this process ends."""
    write_corpus(tmp_path / "corpus")
    said = broken_training(0, 1, flags(tmp_path, "s", "--async-save"), KeyboardInterrupt, None)
    assert said == "KeyboardInterrupt  the save under way is not complete; the tag before it is the newest"
    assert not async_save._PENDING_SAVES and tag_names(tmp_path / "s") == []


# ---- the end of the program ----------------------------------------------------------------------------------------

ENDS = """
import os, sys, threading, time
import torch
from torch import nn
from megatron import zero
from megatron.checkpoint import safetensors_io
from megatron.checkpoint.writer import RankFiles

safetensors_io.WRITE_BLOCK_BYTES = 4096  # of several blocks each but the first waits for a thread
write = RankFiles.write
def slowly(*args):
    time.sleep(1)
    return write(*args)

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
RankFiles.write = slowly
engine.save_checkpoint(sys.argv[1], in_background=True)
"""
GOOD = {"ends": "", "sys.exit(0)": "sys.exit(0)", "del": "del engine, step"}
LOST = " global_step2 of {folder}, which was being written in the background, is not complete"
BAD = {"an error": ("raise ValueError if rank == 1 else SystemExit(0)", 5, f"warning:{LOST}"),
       "the group is gone": ("torch.distributed.destroy_process_group()", 2, f"error:{LOST}"),
       "one rank trains on": ("[step() for _ in range(100 * rank)]", 2, "rank 0 is at the end of its program, with a")}
SLOW = pytest.mark.slow


def ended(root: Path, ranks: int, last_line: str) -> subprocess.CompletedProcess[str]:
    script = root / "script.py"
    script.write_text(ENDS + last_line)
    launcher = ["-m", "megatron.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run([sys.executable, *launcher, str(script), str(root / "s")], cwd=ROOT, text=True,
                          capture_output=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "how"), [(2, "ends"), (1, "del"), *(
    pytest.param(ranks, how, marks=SLOW) for ranks, how in ((1, "sys.exit(0)"), (2, "del"), (2, "sys.exit(0)")))])
def test_a_program_that_ends_completes_its_save(ranks: int, how: str, tmp_path: Path) -> None:
    done = ended(tmp_path, ranks, GOOD[how])
    assert (done.returncode, done.stderr) == (0, "")
    assert tag_names(tmp_path / "s") == ["global_step1", "global_step2"]
    verify_tag(tmp_path / "s", "global_step2")


@pytest.mark.parametrize("how", ["an error", *(pytest.param(how, marks=SLOW) for how in list(BAD)[1:])])
def test_what_cannot_be_completed_is_said(how: str, tmp_path: Path) -> None:
    last_line, code, said = BAD[how]
    done = ended(tmp_path, 2, last_line)
    assert done.returncode == code and said.format(folder=tmp_path / "s") in done.stderr, done.stderr
    assert tag_names(tmp_path / "s") == ["global_step1"]
    verify_tag(tmp_path / "s", "global_step1")


def test_a_disk_that_is_full_at_the_end_is_an_error(tmp_path: Path) -> None:
    done = ended(
        tmp_path, 1, "def slowly(*args): raise OSError(28, 'No space left')\nRankFiles.write = slowly\n"
        "engine.finish_save(); engine.save_checkpoint(sys.argv[1], 'more', in_background=True)")
    assert done.returncode == 7 and "error: more of " in done.stderr and "No space left" in done.stderr
