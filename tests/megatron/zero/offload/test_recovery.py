"""A drive that fails ends the run with its name and exit code 7, before it is trained on. After a fault that passes a
load makes the state whole. Jobs in one folder do not meet, and a dropped engine is gone."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import zero
from megatron.errors import ConfigError, StorageError
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero.api.engine import Engine
from megatron.zero.offload.direct_io import DirectIoFile
from megatron.zero.partitioned_param import Placeholder, param_owner
from megatron.zero.utils import safe_set_full_optimizer_state
from mpu import groups
from tests.megatron.zero.offload.swap_files import content_of, open_swap_files
from tests.megatron.zero.offload.test_equal import alike, batches, outcome, train
from tests.megatron.zero.offload.test_use import configured
from tests.megatron.zero.run import built


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


def breaks(patch: pytest.MonkeyPatch, call: str, code: int, *, stays: bool) -> list[int]:
    """Put a number in, and that read or write from now on ends with an error, and all that follow where it stays; -1:
    none does."""
    real, left = getattr(DirectIoFile, call), [-1]

    def fail(file: DirectIoFile, data: memoryview, at: int) -> None:
        left[0] -= not stays or left[0] > 0
        if left[0] == 0:
            raise OSError(code, os.strerror(code))
        real(file, data, at)

    patch.setattr(DirectIoFile, call, fail)
    return left


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return breaks(monkeypatch, "read", errno.EIO, stays=False)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All writes from one on."""
    return breaks(monkeypatch, "write", errno.ENOSPC, stays=True)


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


# ---- recovery -------------------------------------------------------------------------------------------------------


def saved_engine(folder: Path, **cell: bool) -> tuple[Engine, torch.Tensor, list[object]]:
    """One that has trained and saved to `folder / "saved"`; more batches, and what another makes of them from there."""
    (folder / "drive").mkdir()
    rows = batches(5)
    engine, other = (built(configured(folder / "drive", **cell)) for _ in range(2))
    train(engine.core, rows[:2])
    engine.save_checkpoint(folder / "saved")
    other.load_checkpoint(folder / "saved")
    expected = outcome(other.core, rows[2:])
    other.destroy()
    return engine, rows[2:], expected


@pytest.mark.parametrize("bf16", [False, True])
def test_once_a_full_drive_has_room_again_a_load_makes_everything_whole(tmp_path: Path, full: list[int],
                                                                        bf16: bool) -> None:
    engine, rows, expected = saved_engine(tmp_path, bf16=bf16)

    def load() -> None:
        engine.load_checkpoint(tmp_path / "saved")
        engine.core.engine_storage.wait_for_writes()

    def train_on() -> None:
        for _ in range(9):
            train(engine.core, rows[:1])

    for number, act in ((1, train_on), (20, train_on), (3, load)):
        full[0] = number
        for go_on in (act, lambda: train(engine.core, rows[:1]), lambda: engine.save_checkpoint(tmp_path / "bad")):
            with pytest.raises((StorageError, ConfigError)):
                go_on()
        assert not (tmp_path / "bad" / "latest").exists()
        full[0] = -1
        load()
        assert alike(outcome(engine.core, rows), expected)
    engine.destroy()


def edit(engine: Engine) -> None:
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        for parameter in engine.module.parameters():
            parameter.add_(1)


def put_moments(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        safe_set_full_optimizer_state(parameter, torch.ones(zero.partitioned_param.full_shape(parameter)), "exp_avg")


@pytest.mark.parametrize("change", [edit, put_moments])
def test_what_is_changed_by_hand_half_way_is_no_base(tmp_path: Path, failing: list[int],
                                                     change: Callable[[Engine], None]) -> None:
    engine, rows, expected = saved_engine(tmp_path)
    failing[0] = -1
    change(engine)
    reads, broken = -1 - failing[0], []
    engine.load_checkpoint(tmp_path / "saved")
    for number in (2, reads // 2, reads):
        failing[0] = number
        with pytest.raises(StorageError):
            change(engine)
        failing[0] = -1
        broken.append(engine.core.state.unfinished_change)
        if broken[-1] is not None:  # otherwise nothing had been written of what is changed at a time
            for go_on in (lambda: train(engine.core, rows[:1]), lambda: engine.save_checkpoint(tmp_path / "bad")):
                with pytest.raises(ConfigError, match="ended half way.*load"):
                    go_on()
        engine.load_checkpoint(tmp_path / "saved")
        assert alike(outcome(engine.core, rows), expected)
    assert any(broken)
    engine.destroy()


@pytest.mark.parametrize("number", [1, 4])
def test_an_engine_that_cannot_be_built_leaves_the_drive_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               number: int) -> None:
    """Also while the error is alive; its model is not taken for one that has values."""
    config, left = configured(tmp_path), [number]
    grid = groups.build(1)
    model = build_model(config, grid)

    def fail(*arguments: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        try:
            build_engine(config, model, grid, torch.device("cpu"))
        except StorageError as error:
            assert "cannot make a file" in str(error) or "cannot write there" in str(error)
            assert not open_swap_files(tmp_path)
        else:
            raise AssertionError("the drive was full")
    gc.collect()
    if any(isinstance(parameter, Placeholder) and param_owner(parameter) is None for parameter in model.parameters()):
        with pytest.raises(ConfigError, match="engine could not be built.*build the model again"):
            build_engine(config, model, grid, torch.device("cpu"))
    built(config).destroy()
    assert not open_swap_files(tmp_path)
