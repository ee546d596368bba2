"""Save a checkpoint in three phases: every rank writes the pieces it owns, rank 0 commits.

Which elements of a tensor a rank writes, its *piece*, follows from the manifest. After each phase all ranks agree
(megatron/distributed/consistency.py): if one rank fails, all raise its error and no tag is touched.

    agree     what each rank writes, copied first if it is written later; rank 0 makes the staging folder    collective
    write     rank k: rank<k>.safetensors (more files beyond 4 GB), then rank<k>.json                        local
    commit    rank 0: manifest.json, fsync, rename; old tags are deleted                                     local

`save` runs the phases one after the other. An `AsyncSaver` runs `write` and `commit` in a thread, and the ranks agree
after a later step. A program that exits normally completes its save first.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch

from data.storage import crc32
from megatron.checkpoint.commit import (STAGING_PREFIX, TRASH_PREFIX, Keep, commit_tag, delete_old_tags,
                                        exclusive_access, explain_disk_errors, open_staging_folder)
from megatron.checkpoint.file_formats import seal_record
from megatron.checkpoint.json_state import encode_state
from megatron.checkpoint.manifest import (FORMAT, MANIFEST, SHARED_STATE_FILE, FileEntry, Lineage, Manifest,
                                          TensorEntry, lineage_to_json, provenance_of, rank_manifest_name,
                                          read_manifest_end)
from megatron.checkpoint.reshard import DPSharding, TPSlice
from megatron.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES, FileTensor, file_parts, split_files, write_file
from megatron.checkpoint.tags import (format_file_names, link_target_outside, print_to_stderr, read_tag_manifest,
                                      unknown_files)
from megatron.distributed import exit_codes
from megatron.distributed.consistency import all_succeed_or_raise, explain_out_of_memory, on_rank_0, sum_over_ranks
from megatron.errors import CheckpointError, ConfigError, NumericsError, StorageError
from mpu.groups import Group

COPY_ALIGNMENT = 64  # alignment in bytes of each tensor in a host copy: one cache line


@dataclass(frozen=True)
class TensorSource:
    """A tensor to save, equal on all ranks but for what `load` returns."""

    entry: TensorEntry
    # load(offset, count) -> [count], on any device: elements from `offset` on of this rank's flattened local tensor. It
    # is called when they are written, so that a rank never holds all of what comes from NVMe, for example.
    load: Callable[[int, int], torch.Tensor]

    @classmethod
    def of(cls, kind: str, name: str, dtype: torch.dtype, local: TPSlice, load: Callable[[int, int], torch.Tensor],
           dp_sharding: DPSharding | None = None) -> TensorSource:
        """`local` is what a tensor-parallel rank holds. Without `dp_sharding` the first data-parallel rank writes it.
        """
        whole = DPSharding(0, prod(local.shape))
        return cls(TensorEntry(kind, name, DTYPE_NAMES[dtype], local.sharding, dp_sharding or whole), load)

    def load_finite(self, offset: int, count: int) -> torch.Tensor:
        """`load`; NumericsError if the data is not finite, so that no such checkpoint is committed."""
        data = self.load(offset, count)
        # A sum is fast and finds any non-finite element, but may overflow itself: then check each element.
        if data.is_floating_point() and not data.sum().isfinite() and not data.isfinite().all():
            raise NumericsError(f"{self.entry.kind} {self.entry.name!r} holds a non-finite value; not saved")
        return data


@dataclass(frozen=True)
class SaveReport:
    """What was saved: bytes of all ranks, seconds on this one."""

    tag: str
    bytes: int
    seconds: float


@dataclass
class SavePlan:
    """A save on which all ranks have agreed."""

    root: Path
    world: Group
    manifest: Manifest
    lineage: Lineage
    keep: Keep = Keep()  # which older tags stay
    latest: bool = True  # False: the tag is loaded only by name
    on_complete: Callable[[SaveReport], None] = lambda report: None  # called after the commit, on all ranks
    begin: float = field(default_factory=time.perf_counter)
    tensors: list[FileTensor] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)  # other files: name -> content
    rank_manifest: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0  # of the tensors and texts of this rank
    written: int = 0  # bytes of all ranks, counted after each phase
    staging: Path = Path()
    staging_lock: ExitStack = field(default_factory=ExitStack)  # held by rank 0


def save(root: str | Path, tag: str, *, world: Group, **content: Any) -> SaveReport:
    """Save at once, with the arguments of `agree`: on return the checkpoint is complete and durable. Collective."""
    return finish(agree(root, tag, world=world, **content))


def finish(plan: SavePlan) -> SaveReport:
    """Run the remaining phases in this thread. Collective."""
    finish_phase(plan, lambda: write(plan))
    report = finish_phase(plan, lambda: commit(plan))
    plan.on_complete(report)
    return report


def finish_phase(plan: SavePlan, result: Callable[[], int]) -> SaveReport:
    """Agree that every rank has done its part, whose bytes or error `result` returns or raises; returns what is saved
    so far. An error of any rank ends the save on every rank. Collective."""
    try:
        plan.written += sum_over_ranks(all_succeed_or_raise(result, plan.world), plan.world)
    except BaseException as error:
        # After an interrupt the next save deletes the staging folder.
        if isinstance(error, Exception) and plan.world.rank == 0:
            shutil.rmtree(plan.staging, ignore_errors=True)
        plan.staging_lock.close()
        raise
    return SaveReport(plan.manifest.tag, plan.written, time.perf_counter() - plan.begin)


# ---- the phases -----------------------------------------------------------------------------------------------------

def agree(root: str | Path, tag: str, *, tensors: Iterable[TensorSource], rank_state: Mapping[str, Any],
          shared_state: Mapping[str, Any], config: Mapping[str, Any], layout: Mapping[str, Any], world: Group,
          run_id: str, iteration: int, hold: Callable[[list[FileTensor]], list[FileTensor]] | None = None,
          lineage: Lineage | None = None, **options: Any) -> SavePlan:
    """Plan the checkpoint `tag` under `root`. Collective.

    `rank_state` is per rank (random streams); `shared_state` and `config` are those of rank 0. States are nested dicts
    of JSON values and tensors. `layout` holds at least "tp" and "dp": rank k of `world` has tensor-parallel rank k % tp
    and data-parallel rank k // tp. `hold` copies the data for an asynchronous save. The save continues `lineage`; None
    starts a branch. `options`: keep, latest and on_complete of the SavePlan."""
    lineage, sources = lineage or Lineage(), list(tensors)
    entries = sorted((source.entry for source in sources), key=lambda entry: (entry.kind, entry.name))
    manifest = Manifest(tag, iteration, run_id, lineage.branch, history=lineage.history, layout=layout, config=config,
                        tensors=tuple(entries))
    # One id for all files of this save, and the same tensors on all ranks.
    checksum = f"{crc32(json.dumps(manifest.tensors_as_json()).encode()):08x}"
    save_id, checksum_of_rank_0 = on_rank_0(lambda: [f"{secrets.token_hex(8)}-{manifest.digest()}", checksum], world)
    plan = SavePlan(Path(root), world, replace(manifest, save_id=save_id), lineage, **options)

    def collect() -> None:
        with explain_out_of_memory(world, f"saving {tag}"):
            manifest.check()
            if world.size != manifest.world_size:
                raise CheckpointError(
                    f"a layout of {manifest.world_size} ranks ({dict(layout)}) is saved by {world.size}")
            if checksum != checksum_of_rank_0:
                raise CheckpointError(f"rank {world.rank} and rank 0 disagree about what tensors there are to save, or "
                                      "how they are cut")
            collect_files(plan, sources, rank_state, shared_state)
            # Copies are made here, before training goes on; a rank without memory for them ends the save on all.
            plan.tensors = plan.tensors if hold is None else hold(plan.tensors)

    def open_staging() -> str:
        with explain_out_of_memory(world, f"saving {tag}"):
            return str(plan.staging_lock.enter_context(open_staging_folder(plan.root, tag, run_id, needed)))

    all_succeed_or_raise(collect, world)
    needed = sum_over_ranks(plan.nbytes, world)  # all ranks write into one file system, so the sum must fit
    plan.staging = Path(on_rank_0(open_staging, world))
    return plan


def collect_files(plan: SavePlan, sources: Iterable[TensorSource], rank_state: Mapping[str, Any],
                  shared_state: Mapping[str, Any]) -> None:
    """Plan what this rank writes; tensors of the states go into the same files as the pieces."""
    manifest, rank = plan.manifest, plan.world.rank
    origin = provenance_of(manifest, rank)
    plan.rank_manifest = {"format": FORMAT, "origin": origin, "files": {},
                          "state": encode_state(rank_state, f"rank{rank}", plan.tensors)}
    if rank == 0:
        plan.rank_manifest["lineage"] = lineage_to_json(manifest)  # a copy, in case the manifest is damaged
        shared = {"origin": origin, "state": encode_state(shared_state, "shared", plan.tensors)}
        plan.texts[SHARED_STATE_FILE] = json.dumps(shared, indent=1).encode() + b"\n"
    for source in sources:
        if (piece := manifest.piece_of_rank(source.entry, rank)) is not None:
            key, offset, count = piece
            load = partial(source.load_finite, offset, count)
            plan.tensors.append(FileTensor(key, DTYPES[source.entry.dtype], (count,), load))
    plan.nbytes = sum(item.nbytes for item in plan.tensors) + sum(map(len, plan.texts.values()))


def write(plan: SavePlan) -> int:
    """Write the files of this rank, its manifest last; returns the bytes. No communication."""
    files, rank = dict[str, FileEntry](), plan.world.rank
    metadata = {name: str(value) for name, value in plan.rank_manifest["origin"].items()}
    contents: dict[str, Iterable[bytes | memoryview]] = {}
    for index, batch in enumerate(split_files(plan.tensors)):
        name = f"rank{rank}-{index}.safetensors" if index else f"rank{rank}.safetensors"
        contents[name] = file_parts(batch, metadata)
    contents |= {name: [text] for name, text in plan.texts.items()}
    with explain_out_of_memory(plan.world, f"saving {plan.manifest.tag}"):
        for name, parts in contents.items():
            with explain_disk_errors(plan.staging / name, plan.nbytes):
                files[name] = write_file(plan.staging / name, parts)
        name = rank_manifest_name(rank)
        text = seal_record({**plan.rank_manifest, "files": {file: asdict(entry) for file, entry in files.items()}})
        with explain_disk_errors(plan.staging / name, len(text)):
            write_file(plan.staging / name, [text])
    return sum(entry.size for entry in files.values()) + len(text)


def commit(plan: SavePlan) -> int:
    """On rank 0: write the manifest, rename the staging folder to the tag, delete old tags; returns the manifest's
    bytes. No communication."""
    if plan.world.rank > 0:
        return 0
    root, tag = plan.root, plan.manifest.tag
    with explain_out_of_memory(plan.world, f"saving {tag}"), explain_disk_errors(root / tag, 0), exclusive_access(root):
        if os.path.lexists(root / tag):
            print_to_stderr(_replacement_note(root, tag))
        now = max(time.time_ns() // 1000, 0)  # the clock may be before 1970
        # Above every number in this folder and in the history: a copied tag keeps its place in the order.
        earlier = [read_manifest_end(root / name)[0] for name in os.listdir(root)
                   if not name.startswith((STAGING_PREFIX, TRASH_PREFIX))
                   and link_target_outside(root / name, root) is None]
        earlier += [known.commit for known in plan.manifest.history]
        made = replace(plan.manifest, nbytes=plan.written, saved_at=now, commit=1 + max(earlier, default=0))
        data = made.to_bytes()
        with explain_disk_errors(plan.staging / MANIFEST, len(data)):
            write_file(plan.staging / MANIFEST, [data])  # the last file written
        commit_tag(plan.staging, root, tag, plan.latest)
        plan.lineage.parent = made
        try:
            delete_old_tags(root, plan.keep, made)
        except (CheckpointError, StorageError) as error:  # this save is complete
            print_to_stderr(f"warning: {tag} is saved; older tags that --keep-last would delete are left: {error}")
    plan.staging_lock.close()
    return len(data)


def _replacement_note(root: Path, tag: str) -> str:
    """A note on the tag of this name that the save replaces."""
    if (root / tag).is_symlink():
        return f"replacing {root / tag}, a link; what it leads to stays as it is"
    others = unknown_files(root / tag)
    lost = f", and what no save wrote with it: {format_file_names(others)}" if others else ""
    try:
        saved_at = read_tag_manifest(root, tag).saved_at
    except CheckpointError:
        return f"replacing {root / tag}, which is damaged{lost}"
    when = f" of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(saved_at / 1e6))}" if saved_at else ""
    return f"replacing {root / tag}: an earlier save{when} of the same name{lost}"


# ---- in the background ----------------------------------------------------------------------------------------------

class AsyncSaver:
    """Runs at most one save at a time in a process. Every rank of `world` makes the same calls in the same order. An
    error on one rank is raised on all ranks at the next `poll`."""

    pending: ClassVar[AsyncSaver | None] = None  # the one of this process whose save is in progress

    def __init__(self, world: Group, before_collective: Callable[[str], None] = lambda where: None) -> None:
        """`before_collective` is called with a description before ranks communicate."""
        self.world, self._before_collective, self._pid = world, before_collective, os.getpid()
        self.plan: SavePlan | None = None  # the save in progress: None on all ranks or on none
        self._phase: Callable[[SavePlan], int] = write  # the one that runs
        self._job: Future[int] = Future()
        self._name = ""  # name of the last save, for messages
        self._copies = torch.empty(0, dtype=torch.uint8)

    def copy_tensors(self, device: torch.device, items: list[FileTensor]) -> list[FileTensor]:
        """`items` with their current data, copied from `device` to host memory, valid until the next call."""
        # One buffer, pinned for a GPU, as large as the largest state so far: pinning memory is slow.
        on_cuda = device.type == "cuda"
        sizes = [-(-item.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT for item in items]
        if self._copies.numel() < sum(sizes):
            self._copies = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            self._copies = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_cuda)
        copies, start = [], 0
        for item, size in zip(items, sizes, strict=True):
            copy = self._copies[start:start + item.nbytes].view(item.dtype).view(item.shape)
            copy.copy_(item.load().view(item.shape), non_blocking=True)
            copies.append(replace(item, load=partial(torch.Tensor.detach, copy)))
            start += size
        if on_cuda:
            torch.cuda.current_stream().synchronize()  # the copies (each `load` has waited for its finiteness)
        return copies

    def start(self, plan: SavePlan, phase: Callable[[SavePlan], int] = write) -> None:
        """Run the phase in a thread; `_advance` starts the next."""
        job = Future[int]()

        def work() -> None:
            try:
                job.set_result(phase(plan))
            except BaseException as error:
                job.set_exception(error)

        try:
            # Not an executor: its threads delay an exit after a failure.
            threading.Thread(target=work, name="save", daemon=True).start()
        except RuntimeError:  # no new threads during interpreter shutdown
            work()
        self.plan, self._phase, self._job = plan, phase, job
        self._name, AsyncSaver.pending = f"{plan.manifest.tag} of {plan.root}", self
        atexit.register(self._finish_at_exit)  # registered after the process group's callback, and so called before it

    @property
    def progress(self) -> tuple[float, ...]:
        """(this rank's job failed, it is done) as 0.0 or 1.0; () without a save."""
        # These numbers ride on the all-reduce of a step, so no step waits for a save.
        if self.plan is None:
            return ()
        done = self._job.done()
        return float(done and self._job.exception() is not None), float(done)

    def poll(self, progress: Sequence[float]) -> None:
        """Advance the save if all ranks' jobs are done or one has failed; otherwise return at once. `progress` is the
        sum over the ranks at an earlier time; a save that has advanced since is handled."""
        if self.plan is not None and progress and (progress[0] or progress[1] == self.world.size):
            self._advance()

    def wait_for_save(self) -> None:
        """Return when no save of this process is under way, also of another engine. Collective."""
        while AsyncSaver.pending is not None:
            AsyncSaver.pending._advance()

    def _advance(self) -> None:
        """Wait for this rank's phase, agree with the other ranks, then start the next phase or end the save.
        Collective."""
        self._before_collective("a save in the background")
        plan = self._take_plan()  # an error below leaves no save pending
        report = finish_phase(plan, self._job.result)
        if self._phase is write:
            self.start(plan, commit)
        else:
            plan.on_complete(report)

    def _take_plan(self) -> SavePlan:
        """The plan of the pending save, which is pending no more."""
        assert self.plan is not None
        plan, self.plan, AsyncSaver.pending = self.plan, None, None
        atexit.unregister(self._finish_at_exit)
        return plan

    def abandon(self) -> bool:
        """Abandon the pending save. Returns whether its commit, if that was in progress, has completed: it is waited
        for; otherwise older tags stay the newest. No communication."""
        if self.plan is None:
            return False
        plan = self._take_plan()
        self._job.add_done_callback(lambda job: plan.staging_lock.close())  # locked until the job ends
        return self._phase is commit and self._job.exception() is None  # waits for the job

    def _finish_at_exit(self) -> None:
        if os.getpid() != self._pid:  # in a forked child
            return
        uncaught = getattr(sys, "last_value", None)  # the uncaught exception of the program
        if isinstance(uncaught, KeyboardInterrupt if self.world.is_solo else BaseException):
            print(f"warning: {self._name}, which was being written in the background, is not complete: an error came "
                  "before; a load takes the one before it", file=sys.stderr)
            return
        try:
            if self.world.is_destroyed:
                raise ConfigError("the process group was destroyed before; call engine.finish_save() sooner")
            self._before_collective("the end of its program, with a save to complete")
            self.wait_for_save()
        except BaseException as error:  # at exit the error can only be printed
            failure = exit_codes.exit_reason_of(error)
            exit_codes.exit_with_error(f"{self._name}, which was being written in the background, is not complete: "
                                       f"{failure.text}", failure.code)
