"""Asynchronous save: copy the state to the host, then write it from a thread. The phases are writer.py's.

    start           run the first phase in a thread                                      all ranks
    poll            after each step: if all ranks have done the phase, start the next    all ranks
    wait_for_save   the same, but wait for the thread                                    all ranks

An error on one rank is raised on all ranks at the next poll. A program that exits normally completes its save first.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.safetensors_io import FileTensor
from megatron.checkpoint.writer import PendingSave, SavePhase, SaveReport
from megatron.distributed import exit_codes
from megatron.errors import ConfigError, PeerError, TrainerError
from mpu.groups import Group

COPY_ALIGNMENT = 64  # alignment in bytes of each tensor in the copy: one cache line


class HostSnapshot:
    """A (pinned) host buffer, as large as the largest state copied so far."""

    # Reused, as pinning memory is slow.
    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy_tensors(self, items: list[FileTensor]) -> list[FileTensor]:
        """`items` with their current data, valid until the next call."""
        sizes = [-(-item.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT for item in items]
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._on_cuda)
        copies, start = [], 0
        for item, size in zip(items, sizes, strict=True):
            copy = self._buffer[start:start + item.nbytes].view(item.dtype).view(item.shape)
            copy.copy_(item.load().view(item.shape), non_blocking=True)
            copies.append(replace(item, load=partial(torch.Tensor.detach, copy)))
            start += size
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()  # one wait for all copies
        return copies


class AsyncSaver:
    """Runs at most one save at a time. Every rank of `world` makes the same calls in the same order."""

    def __init__(self, world: Group, before_collective: Callable[[str], None] = lambda where: None,
                 owner: str = "") -> None:
        """`before_collective` is called with a description before ranks communicate. `owner` identifies the engine
        whose saves these are, equal on all ranks; not the run id, which a resumed engine shares."""
        self.world, self.owner, self._before_collective, self._pid = world, owner, before_collective, os.getpid()
        self._save: tuple[PendingSave, Callable[[SaveReport], None]] | None = None
        self._job: Future[int] = Future()
        self._name = ""  # name of the last save, for messages
        self._deferred_error: TrainerError | None = None

    @property
    def has_pending_save(self) -> bool:
        """Whether a save is in progress; equal on all ranks."""
        return self._save is not None

    def start(self, save: PendingSave, on_complete: Callable[[SaveReport], None]) -> None:
        """Run the next phase of `save` in a thread; `on_complete` is called when the save is complete."""
        self._job, self._save = _run_in_thread(save.run_phase), (save, on_complete)
        self._name = f"{save.manifest.tag} of {save.root}"
        _PENDING_SAVES.append(self)
        atexit.register(self._finish_at_exit)  # registered after the process group's callback, and so called before it

    @property
    def progress(self) -> tuple[float, ...]:
        """(this rank's job failed, it is done) as 0.0 or 1.0; () without a save."""
        # These numbers ride on the all-reduce of a step, so no step waits for a save.
        if self._save is None:
            return ()
        done = self._job.done()
        return float(done and self._job.exception() is not None), float(done)

    def _take_pending(self) -> tuple[PendingSave, Callable[[SaveReport], None]]:
        """Clear and return the pending save."""
        assert self._save is not None
        taken, self._save = self._save, None
        _PENDING_SAVES.remove(self)
        atexit.unregister(self._finish_at_exit)
        return taken

    def poll(self, progress: Sequence[float]) -> None:
        """Advance the save if all ranks' jobs are done or one has failed; otherwise return at once. `progress` is the
        sum over the ranks at an earlier time; a save that has advanced since is handled."""
        self._raise_deferred_error()
        if self._save is not None and progress and (progress[0] or progress[1] == self.world.size):
            self._advance()

    def wait_for_save(self) -> None:
        """Return when no save is under way."""
        self._raise_deferred_error()
        while self._save is not None:
            self._advance()

    def _raise_deferred_error(self) -> None:
        if self._deferred_error is not None:
            error, self._deferred_error = self._deferred_error, None
            atexit.unregister(self._finish_at_exit)
            raise error

    def _advance(self) -> None:
        """Wait for this rank's phase, agree with the other ranks, then start the next phase or end the save.
        Collective."""
        self._before_collective("a save in the background")
        save, on_complete = self._take_pending()  # an error below leaves no save pending
        report = save.finish_phase(self._job.result)
        if report is None:
            self.start(save, on_complete)
        else:
            on_complete(report)

    def abandon(self) -> bool:
        """Abandon the pending save; older tags stay the newest. A commit in progress is waited for: returns whether it
        completed. No communication."""
        if self._save is None:
            return False
        save, _ = self._take_pending()
        self._job.add_done_callback(lambda job: save.close())  # the staging folder stays locked until the job ends
        return save.phase is SavePhase.COMMIT and self._job.exception() is None

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


_PENDING_SAVES: list[AsyncSaver] = []  # pending saves of this process


def pending_saves_in(root: Path) -> list[str]:
    """Owners of this process's pending saves into `root`."""
    owners = []
    for save in _PENDING_SAVES:
        with suppress(OSError):  # a folder is missing
            if save._save is not None and os.path.samefile(save._save[0].root, root):
                owners.append(save.owner)
    return owners


def wait_for_earlier_saves(owners: Sequence[str], world: Group) -> None:
    """Complete the pending saves of these owners, if `world` can: same ranks, process group and process. Collective."""
    def identity(group: Group) -> tuple[object, ...]:
        return group, group.name, group.control_name  # a recreated group with the same ranks has other names

    saves = {save.owner: save for save in _PENDING_SAVES
             if identity(save.world) == identity(world) and not world.is_destroyed and save._pid == os.getpid()}
    for saver in (saves[owner] for owner in owners if owner in saves):
        try:
            saver.wait_for_save()
        except PeerError:
            raise
        except TrainerError as error:  # of another engine's save: deferred to that saver's next call, or to exit
            saver._deferred_error = error
            atexit.register(saver._finish_at_exit)


# Not an executor: its threads delay an exit after a failure.
def _run_in_thread(job: Callable[[], int]) -> Future[int]:
    future: Future[int] = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=work, name="save", daemon=True).start()
    except RuntimeError:  # no new threads during interpreter shutdown
        work()
    return future
