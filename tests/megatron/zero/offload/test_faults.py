"""A drive that fails ends the run with its name and exit code 7, before it is trained on; two jobs do not meet."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError, StorageError
from megatron.zero.api.engine import Engine
from megatron.zero.offload.direct_io import DirectIoFile
from tests.distributed import run_ranks
from tests.megatron.zero.offload.swap_files import content_of, open_swap_files
from tests.megatron.zero.offload.test_equal import alike, batches, outcome, train
from tests.megatron.zero.offload.test_use import built, configured


def on_drive(folder: Path, **cell: Any) -> Engine:
    engine = built(configured(folder, **cell))
    train(engine.core, batches(2))
    return engine


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("kind", ["optimizer", "param"])
def test_a_flipped_bit_ends_the_run(tmp_path: Path, kind: str) -> None:
    """In the middle of the file of the largest bucket: not what is in the buffers."""
    engine = on_drive(tmp_path)
    engine.core.engine_storage.wait_for_writes()
    storage = engine.core.engine_storage.optimizer if kind == "optimizer" else engine.core.engine_storage.params
    victim = max(storage._files, key=lambda file: content_of(file).stat().st_size)
    flip(content_of(victim), content_of(victim).stat().st_size // 2)
    with pytest.raises(StorageError, match=f"{victim.description}.* is not what was written"):
        train(engine.core, batches(1))
    assert StorageError.code == 7
    if kind == "param":  # nobody gets whole weights of it any more
        with pytest.raises(StorageError):
            engine.destroy()
    else:
        engine.destroy()
    assert not open_swap_files(tmp_path)


def test_two_files_exchanged_end_the_run(tmp_path: Path) -> None:
    engine = on_drive(tmp_path)
    engine.core.engine_storage.wait_for_writes()
    one, other = [content_of(file) for file in engine.core.engine_storage.optimizer._files
                  if "blocks" in file.description]
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    with pytest.raises(StorageError, match="is not what was written"):
        train(engine.core, batches(1))
    engine.destroy()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_drive_ends_the_run_and_nothing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                code: int) -> None:
    """Found at the latest where the bytes are wanted again; a step that wrote a part of its state is no base."""
    engine = on_drive(tmp_path)
    engine.core.engine_storage.wait_for_writes()
    write = DirectIoFile.write

    def fail(file: DirectIoFile, data: memoryview, at: int) -> None:
        if at:
            raise OSError(code, os.strerror(code))
        write(file, data, at)

    monkeypatch.setattr(DirectIoFile, "write", fail)
    with pytest.raises(StorageError, match="cannot write tile"):
        train(engine.core, batches(2))
    monkeypatch.undo()
    with pytest.raises((StorageError, ConfigError)):
        train(engine.core, batches(2))
    with pytest.raises((StorageError, ConfigError)):
        engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved" / "latest").exists()
    with suppress(StorageError):  # of weights that are lost
        engine.destroy()
    assert not open_swap_files(tmp_path)


def test_jobs_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    rows = batches(6)
    engines = [built(configured(tmp_path)) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    for row in rows[:3].split(1):
        for engine, seen in zip(engines, losses, strict=True):
            seen += train(engine.core, row)
    engines[0].destroy()
    both = [losses[0], losses[1] + train(engines[1].core, rows[3:])]
    engines[1].destroy()
    alone = built(configured(None))
    expected = train(alone.core, rows)
    assert both == [expected[:6], expected] and not open_swap_files(tmp_path)


def killed(rank: int, world: int, folder: Path) -> None:
    on_drive(folder)
    os._exit(9)


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_ranks(killed, 1, tmp_path)
    assert not list(tmp_path.iterdir())
    assert run_ranks(again, 1, tmp_path) == [True]


def again(rank: int, world: int, folder: Path) -> bool:
    engine, plain = built(configured(folder)), built(configured(None))
    same = alike(outcome(engine.core, batches(3)), outcome(plain.core, batches(3)))
    engine.destroy()
    return same


def test_a_step_that_is_skipped_touches_nothing(tmp_path: Path) -> None:
    engine = built(configured(tmp_path, fp16=True, initial_loss_scale=2.0 ** 40, zero_stage=2))
    engine.core.engine_storage.wait_for_writes()
    before = engine.core.engine_storage.optimizer.stats.written_bytes  # type: ignore[attr-defined]
    train(engine.core, batches(3))
    assert engine.core.counters.skipped_steps == 3
    assert engine.core.engine_storage.optimizer.stats.written_bytes == before  # type: ignore[attr-defined]
    assert torch.isfinite(engine.module.wte.weight).all()
    engine.destroy()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Put a number in, and that read from now on, and no other one, ends with an error."""
    read, left = DirectIoFile.read, [-1]

    def fail(file: DirectIoFile, into: memoryview, at: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read(file, into, at)

    monkeypatch.setattr(DirectIoFile, "read", fail)
    yield left


def test_weights_that_could_not_be_read_are_not_there(tmp_path: Path, failing: list[int]) -> None:
    """Each read of a forward fails once; the forward after it is right, and what is lent is as well."""
    engine, rows = on_drive(tmp_path), batches(1)[0]
    with torch.no_grad():
        expected = engine(rows[:, :-1], rows[:, 1:])
        for number in range(1, 8):
            failing[0] = number
            try:
                engine(rows[:, :-1], rows[:, 1:])
            except StorageError:
                assert not all(bucket.is_unsharded for bucket in engine.core.buckets)
            failing[0] = -1
            assert torch.equal(engine(rows[:, :-1], rows[:, 1:]), expected)
    engine.destroy()
