"""A save that cannot be finished fails on every rank with the same line, and leaves what was there as it was; so does
any error of one rank alone."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from data.storage import DataError, StorageFault, UsageError
from megatron.checkpoint import safetensors_io
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.reshard import TPSlice
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.checkpoint.writer import AsyncSaver, TensorSource
from megatron.distributed import exit_codes
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import (CODES_BY_NAME, CheckpointError, ConfigError, NumericsError, RankOutOfMemory, StorageError,
                             TrainerError, exit_code)
from mpu.groups import build
from mpu.split import ParallelError, Partition
from tests.distributed import RankError, on_ranks, run_ranks
from tests.megatron.checkpoint import made
from tests.megatron.checkpoint.faults import before_each, failing
from tests.megatron.checkpoint.made import KINDS, SHAPES, Grid, open_quietly, save_grid, save_solo, weight, whole
from tests.megatron.helpers import TINY, train, write_corpus


def check_untouched(root: Path) -> None:
    assert sorted(os.listdir(root)) == ["global_step1", "latest", "zero_to_fp32.py"]
    verify_tag(root, "global_step1")
    assert open_quietly(root).tag == "global_step1"


@pytest.mark.parametrize("where", ["rank0.safetensors", "rank1.safetensors", "rank3.json", "shared.json",
                                   "manifest.json"])
def test_a_full_disk_fails_every_rank_with_one_line(tmp_path: Path, where: str) -> None:
    save_grid(tmp_path, Grid(2, 2), step=1)
    with failing(tmp_path, errno.ENOSPC, lambda operation, path: path.endswith(where), ["write"]):
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
    with mock.patch.object(shutil, "disk_usage", lambda path: mock.Mock(total=1 << 40, free=needed // 2)), \
            failing(tmp_path, errno.EIO, lambda operation, path: True, ["write"]):
        results = save_grid(tmp_path, Grid(2, 2), step=2)
    assert [type(result) for result in results] == [StorageError] * 4
    (message,) = {str(result) for result in results}
    found = re.search(f"No space left on device; ([0-9]+) bytes needed, {needed // 2} free", message)
    assert found is not None and int(found[1]) >= needed
    check_untouched(tmp_path)
    with mock.patch.object(shutil, "disk_usage", lambda path: mock.Mock(total=1 << 40, free=2 * needed)):
        save_grid(tmp_path, Grid(2, 2), step=2)
    verify_tag(tmp_path, "global_step2")


STAGED = r"\.staging-global_step2[^/]*"


@pytest.mark.parametrize(("call", "where", "number", "named"), [
    ("fsync", f"{STAGED}/rank0.safetensors$", errno.EIO, "rank0.safetensors"),
    ("open", f"{STAGED}/rank0.json$", errno.EDQUOT, "rank0.json"),
    ("fsync", f"{STAGED}$", errno.EIO, "global_step2"), ("mkdir", f"{STAGED}$", errno.EROFS, "global_step2"),
    ("rename", f"{STAGED}$", errno.EIO, "global_step2"), ("listdir", "/root$", errno.EIO, "{}"),
    ("replace", r"/\.latest\.\d[^/]*$", errno.EIO, "{}/latest"),
    ("open", r"/\.latest\.\d", errno.EROFS, "{}/latest"),
    ("fsync", r"\.latest-pending\.[^/]*$", errno.EDQUOT, "{}/.latest-pending"),
    ("fsync", r"/\.zero_to_fp32\.py\.", errno.ENOSPC, "{}/zero_to_fp32.py"),
])
def test_a_drive_that_fails_is_one_line_with_the_file_and_costs_nothing(call: str, where: str, number: int, named: str,
                                                                        tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_solo(root, 1)
    (root / "zero_to_fp32.py").write_text("of an earlier version")
    with failing(root, number, lambda operation, path: re.search(where, path) is not None, [call]), \
            pytest.raises(StorageError) as caught:
        save_solo(root, 2)
    said = str(caught.value)
    assert said.startswith("--save: ") and named.format(root) in said and "\n" not in said
    assert os.strerror(number) in said
    for tag in tag_names(root):
        verify_tag(root, tag)
    assert tag_names(root)[0] == "global_step1" and open_checkpoint(root).tag == tag


# ---- what is not saved ----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    **{f"{bad} in {dtype}": (NumericsError, "weight 'w' holds a non-finite value",
                             {"data": torch.tensor([1, bad, 1, 1], dtype=dtype)})
       for bad, dtype in ((torch.nan, torch.float32), (torch.inf, torch.float16), (-torch.inf, torch.bfloat16))},
    "a layout of more ranks": (CheckpointError, "a layout of 2 ranks .* is saved by 1", {"layout": {"tp": 1, "dp": 2}}),
    "a state of objects": (CheckpointError, "state shared/client/0/x: ",
                           {"shared_state": {"client": [{"x": object()}]}}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name_and_costs_nothing(what: str, tmp_path: Path) -> None:
    error, words, given = REFUSED[what]
    save_solo(tmp_path, 1)
    with pytest.raises(error, match=words):
        save_solo(tmp_path, 2, **given)
    check_untouched(tmp_path)


def test_finite_values_whose_sum_overflows_are_saved(tmp_path: Path) -> None:
    save_solo(tmp_path, 2, data=torch.full((4,), 3e38))
    verify_tag(tmp_path, "global_step2")


def test_ranks_that_have_other_tensors_in_mind_do_not_save(tmp_path: Path) -> None:
    real, asked = made.sources, iter(range(100))

    def other(*args: Any) -> list[TensorSource]:
        """Of another type on one of the ranks."""
        dtype = "F16" if next(asked) else "F32"
        return [replace(source, entry=replace(source.entry, dtype=dtype)) for source in real(*args)]

    with mock.patch.object(made, "sources", other):
        results = save_grid(tmp_path, Grid(1, 2))
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "disagree about what tensors there are to save" in str(results[0])
    assert not tag_names(tmp_path)


# ---- what is written ------------------------------------------------------------------------------------------------

def test_deferred_data_is_fetched_once_when_written(tmp_path: Path) -> None:
    fetched: list[int] = []
    source = replace(whole("w", torch.zeros(4)), load=lambda *piece: fetched.append(1) or torch.arange(4.0))
    save_solo(tmp_path, 2, tensors=[source])
    assert fetched == [1] and weight(tmp_path, "global_step2", 4) == [0, 1, 2, 3]


def test_large_ranks_write_several_files(tmp_path: Path) -> None:
    with mock.patch.object(safetensors_io, "MAX_FILE_BYTES", 200):
        save_grid(tmp_path, Grid(1, 2))
    _, names = verify_tag(tmp_path, "global_step1")
    assert {"rank0.safetensors", "rank0-1.safetensors", "rank1-1.safetensors"} <= {*names}
    state = open_checkpoint(tmp_path).rank_state(1)
    assert state is not None and state["stream"].tolist() == list(range(1, 9))


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path) -> None:
    log: list[str] = []

    def note(operation: str, path: str) -> None:
        log.append(path.removeprefix(str(tmp_path)) if operation == "fsync" else f"rename {Path(path).name}")

    with before_each(tmp_path, note, ["fsync", "rename"]):
        save_solo(tmp_path / "new", 2)
    staging = "/new/.staging-global_step2-solo"
    files = [f"{staging}/{name}" for name in
             ("rank0.safetensors", "shared.json", "rank0.json", "manifest.json")]
    assert log[:6] == ["", *files, staging]
    # In between, at the first save of a folder: zero_to_fp32.py. Then what `latest` will say, and only then the tag.
    assert [re.sub(r"\.\d+\..*tmp", "", line) for line in log[8:12]] == \
        ["/new/..latest-pending", "/new", "rename .staging-global_step2-solo", "/new"]


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_files_have_the_rights_that_the_umask_leaves(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save_solo(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o666 & ~mask}


def test_a_replicated_tensor_is_written_once(tmp_path: Path) -> None:
    save_grid(tmp_path, Grid(4, 1))
    files = [load_file(tmp_path / "global_step1" / f"rank{rank}.safetensors") for rank in range(4)]
    assert [any("norm.weight" in key for key in file) for file in files] == [True, False, False, False]


# ---- lack of memory on one rank of two, anywhere in a save -----------------------------------------------------------

LACKS = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
SHORTAGES: dict[str, tuple[int, Any, str, Exception]] = {  # (its rank, what raises which error there)
    "map": (1, mmap, "mmap", LACKS), "folder": (0, os, "mkdir", LACKS), "rename": (0, os, "rename", LACKS),
    "write": (1, os, "write", LACKS), "object": (1, os, "fsync", MemoryError()),
    "copy": (1, torch, "empty", torch.OutOfMemoryError("CUDA out of memory. Tried 8 GiB")),
    "tensor": (1, torch, "full", RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't "
                                              "allocate memory: you tried to allocate 8 bytes.\nmore of it"))}


def each_shortage(rank: int, world_size: int, folder: Path) -> list[tuple[int, str, bool]]:
    """What a save of two ranks, after a good one, ends with."""
    world, found = build().world, []
    source = TensorSource.of("weight", "w", torch.float32, TPSlice((4,), Partition(0), rank, world_size),
                             lambda offset, count: torch.full((count,), float(rank)))
    for kind, (victim, owner, name, error) in SHORTAGES.items():
        hold = partial(AsyncSaver(world).copy_tensors, torch.device("cpu")) if kind == "copy" else None
        save = partial(save_solo, folder / kind, tensors=[source], layout={"tp": world_size, "dp": 1}, world=world,
                       data=torch.ones(1), lineage=None)
        save(1)
        with mock.patch.object(owner, name, side_effect=error) if rank == victim else nullcontext(), \
                pytest.raises(TrainerError) as caught:
            save(2, hold=hold)
        failure = exit_codes.exit_reason_of(caught.value)
        found.append((failure.code, failure.text, failure.is_peer_loss))
    return found


def test_lack_of_memory_on_one_rank_is_told_as_memory_on_both_and_costs_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(each_shortage, 2, tmp_path)
    assert first == second
    for (kind, (victim, *_)), (code, text, is_peer_loss) in zip(SHORTAGES.items(), first, strict=True):
        assert (code, is_peer_loss) == (5, False), (kind, text)
        assert text.startswith(f"rank {victim} is out of memory, while saving global_step2: "), (kind, text)
        assert "cannot write" not in text and "--save" not in text and "\n" not in text
        assert open_quietly(tmp_path / kind).tag == "global_step1"


# ---- every kind of error of one rank ---------------------------------------------------------------------------------

ERRORS: list[type[Exception]] = [CheckpointError, ConfigError, DataError, RankOutOfMemory, NumericsError, ParallelError,
                                 StorageError, StorageFault, UsageError]


class DerivedError(ConfigError):
    """Shared as its base class."""


def raised(action: Callable[[], object]) -> tuple[str, str, int | None]:
    try:
        action()
    except (TrainerError, DataError, StorageFault, ParallelError) as error:
        return type(error).__name__, str(error), exit_code(error)
    return "", "", None


def fails(rank: int, kind: type[Exception]) -> int:
    if rank != 0:
        raise kind(f"rank {rank} cannot")
    return rank


@on_ranks(3)
def test_every_error_that_has_an_exit_code_is_the_first_failing_ranks_on_all(rank: int, world: int) -> None:
    assert CODES_BY_NAME.keys() <= {kind.__name__ for kind in ERRORS}
    group = build(1).world
    for kind in (*ERRORS, DerivedError):
        found = raised(partial(all_succeed_or_raise, partial(fails, rank, kind), group))
        shared = ConfigError if kind is DerivedError else kind
        assert found == (shared.__name__, "rank 1 cannot", exit_code(shared()))


def test_a_bug_is_shared_with_nobody() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_ranks(a_bug, 2)
    assert isinstance(caught.value.error, KeyError)


def a_bug(rank: int, world: int) -> None:
    all_succeed_or_raise(partial(fails, rank, KeyError), build(1).world)


def training(rank: int, world: int, corpora: list[Path]) -> tuple[str, str, int | None]:
    return raised(lambda: train([*TINY, "--train-data", corpora[rank], "--train-iters", 1]))


def test_a_corpus_that_is_damaged_on_one_rank_ends_training_on_all(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        write_corpus(tmp_path / name)
    index = tmp_path / "bad.idx"
    index.write_bytes(index.read_bytes()[:-8])
    found = run_ranks(training, 2, [tmp_path / "good", tmp_path / "bad"])
    assert found == [found[0]] * 2 and found[0][0] == "DataError" and found[0][2] == 3 and str(index) in found[0][1]
