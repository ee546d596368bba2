"""Asynchronous save: copy the state to the host, then write it from a thread. The protocol is writer.py's.

    start           snapshot this rank's share and start the first job in a thread              all ranks
    poll            after each step: if all ranks have done their job, start the next            all ranks
    wait_for_save   the same, but wait for the thread                                            all ranks

`progress` rides on the step's all-reduce, so no step waits for a save. A job's error on one rank is raised on all ranks
at the next poll. At most one save per engine; a program that exits normally completes its save first. Memory: one
(pinned) host copy of this rank's share, reused.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.safetensors_io import FileTensor
from megatron.checkpoint.writer import SaveJob, SaveReport, SaveSteps, advance_save
from megatron.distributed import exit_codes
from megatron.errors import ConfigError, PeerError, TrainerError
from mpu.groups import Group

COPY_ALIGNMENT = 64
"""Of each tensor in the copy: views need their own width, copies like a cache line."""


class HostSnapshot:
    """One buffer on the host, as large as the largest state it has held."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy_tensors(self, items: list[FileTensor]) -> list[FileTensor]:
        """The items with their present data, which is good until the next call."""
        sizes = [-(-item.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT for item in items]
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._on_cuda)
        held, start = [], 0
        for item, size in zip(items, sizes, strict=True):
            copy = self._buffer[start:start + item.nbytes].view(item.dtype).view(item.shape)
            copy.copy_(item.load().view(item.shape), non_blocking=True)
            held.append(replace(item, load=partial(torch.Tensor.detach, copy)))
            start += size
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()
        return held


class AsyncSaver:
    """At most one save under way. Every rank of `world` makes the same calls in the same order."""

    def __init__(self,
                 world: Group,
                 before_collective: Callable[[str], None] = lambda where: None,
                 owner: str = "") -> None:
        """`meet` is called before ranks agree on something, with the name of the place. `owner` is whose saves these
        are, for all ranks: drawn for this engine, not the id of the run that it goes on with."""
        self.world, self.owner, self.root = world, owner, Path()
        self._before_collective, self._pid, self._name = before_collective, os.getpid(), ""
        self._save: tuple[SaveSteps, Callable[[SaveReport], None]] | None = None
        self._job: Future[Any] = Future()
        self._is_committing = False  # the job is the last one
        self._deferred_error: TrainerError | None = None

    @property
    def has_pending_save(self) -> bool:
        """A save is under way; equal on all ranks."""
        return self._save is not None

    def belongs_to(self, world: Group) -> bool:
        """These ranks can complete what it has under way."""
        names = (self.world.name, self.world.control_name)  # of another process group with the same ranks they differ
        return (self.world, names) == (world, (world.name, world.control_name)) and not world.is_destroyed and \
            self._pid == os.getpid()

    def start(self, steps: SaveSteps, on_complete: Callable[[SaveReport], None], root: Path = Path(),
              tag: str = "a checkpoint") -> None:
        """Begin a save of this tag into `root`; `then` is called when it is complete."""
        assert not self.has_pending_save, "wait for the save under way first"
        self._job, self.root, self._name = _run_in_thread(next(steps)), root, f"{tag} of {root}"
        self._is_committing = False
        self._set_pending(steps, on_complete)

    def _set_pending(self, steps: SaveSteps, on_complete: Callable[[SaveReport], None]) -> None:
        self._save = steps, on_complete
        _PENDING_SAVES.append(self)
        atexit.register(self._finish_at_exit)  # later than the process group's, and so called sooner

    def _take_pending(self) -> tuple[SaveSteps, Callable[[SaveReport], None]]:
        """It is not under way any more."""
        assert self._save is not None
        taken, self._save = self._save, None
        _PENDING_SAVES.remove(self)
        atexit.unregister(self._finish_at_exit)
        return taken

    @property
    def progress(self) -> tuple[float, ...]:
        """Has this rank's job failed, and is it done? Empty while there is none."""
        if not self.has_pending_save:
            return ()
        done = self._job.done()
        return float(done and self._job.exception() is not None), float(done)

    def poll(self, progress: Sequence[float]) -> None:
        """Continue if all ranks can, or if one has failed; otherwise return at once. `progress` is the sum of theirs,
        when it was asked for; a save that has ended since then, or gone on, takes no harm."""
        self._raise_deferred_error()
        if self.has_pending_save and progress and (progress[0] or progress[1] == self.world.size):
            self._advance()

    def wait_for_save(self) -> None:
        """Return when no save is under way."""
        self._raise_deferred_error()
        while self.has_pending_save:
            self._advance()

    def finish_for_other_engine(self) -> None:
        """An error is this one's: it is raised by the next call here, or told at the end of the program."""
        try:
            self.wait_for_save()
        except PeerError:
            raise
        except TrainerError as error:
            self._deferred_error = error
            atexit.register(self._finish_at_exit)

    def _raise_deferred_error(self) -> None:
        if self._deferred_error is not None:
            error, self._deferred_error = self._deferred_error, None
            atexit.unregister(self._finish_at_exit)
            raise error

    def _advance(self) -> None:
        """Wait for this rank's job, agree, and start the next one or end the save."""
        self._before_collective("a save in the background")
        steps, then = self._take_pending()  # an error below ends the save
        try:
            self._job = _run_in_thread(advance_save(steps, self._job.result, self.world))
        except StopIteration as end:
            then(end.value)
        else:
            self._is_committing = True
            self._set_pending(steps, then)

    def abandon(self) -> bool:
        """The save under way is not to be completed: the older tags stay the newest. Its last job makes it one, and is
        waited for where it is at work: is the save complete? Sends nothing."""
        if not self.has_pending_save:
            return False
        steps, _ = self._take_pending()
        self._job.add_done_callback(lambda job: steps.close())  # its folder is held as long as somebody writes there
        return self._is_committing and self._job.exception() is None

    def _finish_at_exit(self) -> None:
        if os.getpid() != self._pid:  # a fork of it
            return
        uncaught = getattr(sys, "last_value", None)  # what the program ends by
        if isinstance(uncaught, KeyboardInterrupt if self.world.is_solo else BaseException):
            print(f"warning: {self._name}, which was being written in the background, is not complete: an error came "
                  "before; a load takes the one before it", file=sys.stderr)
            return
        try:
            if self.world.is_destroyed:
                raise ConfigError("the process group was destroyed before; call engine.finish_save() sooner")
            self._before_collective("the end of its program, with a save to complete")
            self.wait_for_save()
        except BaseException as error:  # nobody is left to raise it to
            failure = exit_codes.exit_reason_of(error)
            exit_codes.write_error(f"{self._name}, which was being written in the background, is not complete: "
                                   f"{failure.text}")
            exit_codes.exit_now(failure.code)


_PENDING_SAVES: list[AsyncSaver] = []
"""Of the process."""


def pending_saves_in(root: Path) -> list[str]:
    """Whose saves this process has under way in the same folder."""
    return [save.owner for save in _PENDING_SAVES if _is_same_folder(save.root, root)]


def wait_for_earlier_saves(owners: Sequence[str], world: Group) -> None:
    """Wait for what these ranks have under way of them. Collective."""
    saves = {save.owner: save for save in _PENDING_SAVES if save.belongs_to(world)}
    for owner in owners:
        if owner in saves:
            saves[owner].finish_for_other_engine()


def _is_same_folder(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _run_in_thread(job: SaveJob) -> Future[Any]:
    """Do the job in a thread that does not keep a process alive which leaves after a failure."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=work, name="save", daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and starts no thread any more
        work()
    return future
