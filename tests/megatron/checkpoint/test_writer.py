"""A save that cannot be finished fails on every rank with the same line, and leaves what was there as it was."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.checkpoint import safetensors_io, writer
from megatron.checkpoint.manifest import TensorEntry
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.safetensors_io import SafetensorsReader
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.checkpoint.writer import LazyData, TensorPiece
from megatron.errors import CheckpointError, NumericsError, StorageError, TrainerError
from mpu.groups import SOLO, Group, build
from mpu.split import Partition
from tests.distributed import run_ranks
from tests.megatron.checkpoint import made
from tests.megatron.checkpoint.made import KINDS, SHAPES, Grid, save_grid, save_solo


class FullDisk:
    """Operations on a path that holds `where` fail from the `call`-th on, as on a full disk."""

    def __init__(self, call: int, where: str = "") -> None:
        self.left, self.where = call, where

    def patch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(first: Any, *args: Any, **kwargs: Any) -> Any:
            name = str(getattr(getattr(first, "file", None), "name", first))
            if self.where in name:
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(first, *args, **kwargs)
        return wrapped


def patched(disk: FullDisk) -> Any:
    return mock.patch.multiple(safetensors_io.ChecksummedWriter,
                               write=disk.patch(safetensors_io.ChecksummedWriter.write))


def check_untouched(root: Path) -> None:
    assert sorted(os.listdir(root)) == ["global_step1", "latest", "zero_to_fp32.py"]
    verify_tag(root, "global_step1")
    assert open_checkpoint(root, print_line=pytest.fail).tag == "global_step1"


@pytest.mark.parametrize("where", ["rank0", "rank1", "rank3.json", "shared.json", "manifest.json"])
def test_a_full_disk_fails_every_rank_with_one_line(tmp_path: Path, where: str) -> None:
    save_grid(tmp_path, Grid(2, 2), step=1)
    with patched(FullDisk(0, where)):
        results = save_grid(tmp_path, Grid(2, 2), step=2)
    assert [type(result) for result in results] == [StorageError] * 4
    (message,) = {str(result) for result in results}
    assert message.startswith(f"--save: cannot write {tmp_path}/.staging-global_step2-made/{where}")
    assert "No space left on device; " in message and " bytes needed, " in message and "\n" not in message
    check_untouched(tmp_path)


def test_without_room_for_all_ranks_no_byte_is_written(tmp_path: Path) -> None:
    """The pieces of the four ranks together decide: each alone would fit."""
    save_grid(tmp_path, Grid(2, 2), step=1)
    needed = sum(prod(shape) * 4 for shape, _ in SHAPES.values()) * len(KINDS)
    for free, fits in ((needed // 2, False), (2 * needed, True)):
        disk = mock.Mock(total=1 << 40, free=free)
        with mock.patch.object(shutil, "disk_usage", lambda path, disk=disk: disk), \
                mock.patch.object(safetensors_io, "ChecksummedWriter", wraps=safetensors_io.ChecksummedWriter) as sink:
            results = save_grid(tmp_path, Grid(2, 2), step=2)
        assert sink.called == fits
        if not fits:
            assert [type(result) for result in results] == [StorageError] * 4
            (message,) = {str(result) for result in results}
            assert re.search(f"No space left on device; [0-9]+ bytes needed, {free} free", message)
            assert int(message.split(" bytes needed")[0].split()[-1]) >= needed
            check_untouched(tmp_path)
    verify_tag(tmp_path, "global_step2")


@pytest.mark.parametrize("operation", ["mkdir", "rename", "fsync"])
def test_a_failing_call_of_the_commit_loses_nothing(tmp_path: Path, operation: str) -> None:
    for call in range(50):
        root = tmp_path / str(call)
        save_solo(root, 1)
        disk = FullDisk(call)
        with mock.patch.object(os, operation, disk.patch(getattr(os, operation))):
            try:
                save_solo(root, 2)
                break
            except StorageError as error:
                assert "No space left" in str(error)
        verify_tag(root, "global_step1")
        newest = tag_names(root)[-1]
        verify_tag(root, newest)
        left = [name for name in os.listdir(root) if name.startswith(".")]
        assert not left or (left, newest) == ([".latest-pending"], "global_step2")
        assert open_checkpoint(root, print_line=lambda line: None).tag == newest
    assert call >= 1


def save_on_rank(rank: int, world_size: int, root: str, full: int) -> str:
    """Save with a disk that is full for rank `full` only (-1: none)."""
    world = build().world
    piece = TensorPiece("w", "weight", (4,), Partition(0), rank, world_size, 0, torch.full((4,), float(rank)))
    disk = FullDisk(0 if rank == full else 10**9)
    try:
        with patched(disk):
            writer.save(root, f"global_step{full + 2}", pieces=[piece], rank_state={"rank": rank}, shared_state={},
                        config={}, layout={"tp": world_size, "dp": 1}, world=world, run_id="job", iteration=full + 2)
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_real_ranks_save_together_and_fail_together(tmp_path: Path) -> None:
    assert run_ranks(save_on_rank, 2, str(tmp_path), -1, timeout=20) == ["saved", "saved"]
    for full in (0, 1):
        first, second = run_ranks(save_on_rank, 2, str(tmp_path), full, timeout=20)
        assert first == second and first.startswith("StorageError: ") and f"/rank{full}.safetensors" in first
    check_untouched(tmp_path)
    out = torch.empty(8)
    open_checkpoint(tmp_path).read("weight", "w", shape=(8,), partition=None, tp_rank=0, tp_size=1, offset=0, out=out)
    assert out.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def save_one(root: Path, data: torch.Tensor | LazyData, **changes: Any) -> None:
    piece = TensorPiece("w", "weight", (4,), None, 0, 1, 0, data)
    options: dict[str, Any] = dict(pieces=[piece], rank_state={}, shared_state={}, config={}, layout={"tp": 1, "dp": 1},
                                   world=SOLO, run_id="run", iteration=2)
    writer.save(root, "global_step2", **{**options, **changes})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_non_finite_value_is_never_committed(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    save_solo(tmp_path, 1)
    with pytest.raises(NumericsError, match="weight 'w' holds a non-finite value"):
        save_one(tmp_path, torch.tensor([1, bad, 1, 1], dtype=dtype))
    check_untouched(tmp_path)


def test_finite_values_whose_sum_overflows_are_saved(tmp_path: Path) -> None:
    save_one(tmp_path, torch.full((4,), 3e38))
    verify_tag(tmp_path, "global_step2")


def test_a_tensor_that_is_not_whole_is_not_committed(tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    with pytest.raises(CheckpointError, match="'w': rank 0 should write 4 elements from element 0 on of 4, and has 3 "):
        save_one(tmp_path, torch.zeros(3))
    check_untouched(tmp_path)


@pytest.mark.parametrize("value", [object(), torch.zeros(2, dtype=torch.complex64)], ids=["object", "complex"])
def test_a_state_that_is_no_json_is_refused_by_its_path(tmp_path: Path, value: object) -> None:
    save_solo(tmp_path, 1)
    with pytest.raises(CheckpointError, match="state shared/client/0/x: "):
        save_one(tmp_path, torch.zeros(4), shared_state={"client": [{"x": value}]})
    check_untouched(tmp_path)


def test_states_come_back_equal(tmp_path: Path) -> None:
    state = {"a": [1, (2.5, None)], "b": {"text": "é\n", "on": True}, "big": 1 << 100, "t": torch.arange(3)}
    save_one(tmp_path, torch.zeros(4), shared_state=state)
    found = open_checkpoint(tmp_path).shared_state
    assert torch.equal(found.pop("t"), state["t"])
    assert found == {"a": [1, (2.5, None)], "b": {"text": "é\n", "on": True}, "big": 1 << 100}


def test_deferred_data_is_fetched_once_when_written(tmp_path: Path) -> None:
    fetched: list[int] = []
    save_one(tmp_path, LazyData(4, torch.float32, lambda: fetched.append(1) or torch.arange(4.0)))
    assert fetched == [1]
    assert open_checkpoint(tmp_path)._file_holding(0, "weight/w/0/0").tensor("weight/w/0/0").tolist() == [0, 1, 2, 3]


def test_large_ranks_write_several_files(tmp_path: Path) -> None:
    with mock.patch.object(safetensors_io, "MAX_FILE_BYTES", 200):
        save_grid(tmp_path, Grid(1, 2))
    names = set(verify_tag(tmp_path, "global_step1"))
    assert {"rank0.safetensors", "rank0-1.safetensors", "rank1-1.safetensors"} <= names
    state = open_checkpoint(tmp_path).rank_state(1)
    assert state is not None and state["stream"].tolist() == list(range(1, 9))


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path) -> None:
    log: list[str] = []

    def fsync(descriptor: int) -> None:
        log.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path)))

    def rename(source: Any, target: Any, real: Any = os.rename) -> None:
        log.append(f"rename {Path(target).name}")
        real(source, target)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "rename", rename):
        save_one(tmp_path / "new", torch.zeros(4))
    staging = "/new/.staging-global_step2-run"
    files = [f"{staging}/{name}" for name in
             ("rank0.safetensors", "shared.json", "config.json", "rank0.json", "manifest.json")]
    assert log[:7] == ["", *files, staging]
    # In between, at the first save of a folder: zero_to_fp32.py. Then what `latest` will say, and only then the tag.
    assert [re.sub(r"\.\d+\..*tmp", "", line) for line in log[9:13]] == \
        ["/new/..latest-pending", "/new", "rename global_step2", "/new"]


def test_a_replicated_tensor_is_written_once(tmp_path: Path) -> None:
    save_grid(tmp_path, Grid(4, 1))
    holders = {
        rank
        for rank in range(4)
        for key in SafetensorsReader(tmp_path / "global_step1" / f"rank{rank}.safetensors", "").tensors
        if "norm.weight" in key
    }
    assert holders == {0}


def test_ranks_that_have_other_tensors_in_mind_do_not_save(tmp_path: Path) -> None:
    real, asked = made.tensors, iter(range(100))

    def other(grid: Grid) -> list[TensorEntry]:
        """Of another type on one of the ranks."""
        dtype = "F16" if next(asked) else "F32"
        return [replace(tensor, dtype=dtype) for tensor in real(grid)]

    with mock.patch.object(made, "tensors", other):
        results = save_grid(tmp_path, Grid(1, 2))
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "disagree about what tensors there are to save" in str(results[0])
    assert not tag_names(tmp_path)


def test_a_rank_that_lacks_a_piece_is_named(tmp_path: Path) -> None:
    real = made.runs

    def fewer(*args: Any) -> list[TensorPiece]:
        return [piece for piece in real(*args) if args[3] == 0 or piece.name != "fc.weight"]

    with mock.patch.object(made, "runs", fewer):
        results = save_grid(tmp_path, Grid(1, 2))
    assert {str(result) for result in results} == {
        "exp_avg 'fc.weight': rank 1 should write 160 elements from element 0 on of 160, and has no elements"}
    assert not tag_names(tmp_path)


def test_a_group_of_one_needs_no_process_group(tmp_path: Path) -> None:
    save_one(tmp_path, torch.zeros(4), world=Group(0, 1, (0,)))
    verify_tag(tmp_path, "global_step2")
