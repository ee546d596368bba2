"""Killed or failing at any file-changing call of a two-rank save, a run loses nothing that was committed, and the same
command goes on to the same text. The program is pretrain_gpt2.py.

A *fault* hits the main thread of one rank (the *victim*) from the moment it begins to save a certain step until the
save, pruning included, is over: strace makes the k-th call of a kind fail, or its process die at it. Without a fault
the calls are only written down: a rehearsal, which shows where the file-changing calls of a save are.
Two saves are met: one that deletes an older tag afterwards (--keep-last), and one that replaces a tag of its name.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.manifest import iteration_of_tag
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.distributed import exit_codes
from megatron.errors import CheckpointError
from megatron.train.loop import TrainState
from megatron.train.resume import RunCheckpoints
from tests.distributed import RankError, run_ranks
from tests.megatron.helpers import records, total_digest, train, train_all, write_corpus

STEP, STEPS = 3, 4
"""The save under fire, and the last step."""

# ---- faults ----------------------------------------------------------------------------------------------------------

CALLS = "openat,write,fsync,close,rename,mkdir,unlink,unlinkat,rmdir,ftruncate"
"""What a save changes files by; a test below holds that nothing else occurs."""


@dataclass(frozen=True)
class Fault:
    """What happens to which call: `how` in strace's words (signal=KILL, error=EIO), or None to write the calls down."""

    victim: int
    call: str = ""
    when: int = 0
    how: str | None = None

    def __str__(self) -> str:
        return f"rank {self.victim}, {self.call} {self.when}: {self.how}"


def strace_works() -> str | None:
    """Why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            tracer = subprocess.Popen(["strace", "-p", str(child.pid)], stderr=subprocess.PIPE, text=True)
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            tracer.terminate()
            tracer.communicate()
        finally:
            child.kill()
    return None if "attached" in said else f"strace cannot attach: {said.strip()}"


@contextmanager
def traced(fault: Fault, log: Path) -> Iterator[None]:
    """The calling thread under strace."""
    inject = ["-e", f"inject={fault.call}:{fault.how}:when={fault.when}"] if fault.how else []
    command = ["strace", "-p", str(os.getpid()), "-y", "-s", "0", "-o", str(log), "-e", f"trace={CALLS}", *inject]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    assert "attached" in tracer.stderr.readline()
    try:
        yield
    finally:
        tracer.terminate()
        tracer.communicate()


@contextmanager
def armed(rank: int, fault: Fault, step: int, log: Path) -> Iterator[None]:
    """Let the fault be during the save of `step`."""
    saving = RunCheckpoints._save

    def save(checkpoints: RunCheckpoints, engine: Any, say: Any, state: TrainState) -> None:
        with traced(fault, log) if rank == fault.victim and state.iteration == step else nullcontext():
            saving(checkpoints, engine, say, state)

    with patch.object(RunCheckpoints, "_save", save):
        yield


def save_under(rank: int, world: int, argv: Sequence[object], fault: Fault, step: int, log: Path,
               flushes: bool = True) -> tuple[int, str]:
    """A run whose save of `step` meets the fault: what its process would exit with, and its error line. Without
    `flushes` the writer is a wrong one, which `out_of_order` must catch."""
    unflushed = patch.object(os, "fsync", lambda descriptor: None)
    with armed(rank, fault, step, log), nullcontext() if flushes else unflushed:
        try:
            train(argv)
            return 0, ""
        except BaseException as error:
            failure = exit_codes.exit_reason_of(error)
            return failure.code, failure.text


# ---- what strace wrote down --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call that changed something under the save root: the `when`-th of its kind."""

    name: str
    when: int
    text: str


def calls(log: Path, root: Path) -> list[Call]:
    """The file-changing calls of a rehearsal, in order."""
    seen: Counter[str] = Counter()
    found = []
    for line in log.read_text().splitlines():
        match = re.match(r"(\w+)\(", line)
        if match is None:
            continue  # a signal, the end of the process
        seen[match[1]] += 1
        if str(root) in line and (match[1] != "openat" or "O_CREAT" in line):
            found.append(Call(match[1], seen[match[1]], line))
    return found


def out_of_order(log: Path, root: Path) -> list[str]:
    """What is not surely on the disk at the moment that it counts. A file or folder counts from its rename on: by then
    it and all in it have been flushed; the rename itself is flushed afterwards."""
    dirty: dict[str, str] = {}
    complaints = []
    for call in calls(log, root):
        path = re.search(r'["<]([^">]*' + re.escape(str(root)) + r'[^">]*)[">]', call.text)
        assert path is not None, call
        where, folder = path[1], str(Path(path[1]).parent)
        if call.name == "write":
            dirty[where] = "its bytes"
        elif call.name == "openat":
            dirty[folder] = f"the name {Path(where).name}"
        elif call.name == "fsync":
            dirty.pop(where, None)
        elif call.name == "rename":
            complaints += [f"{name}: {what}" for name, what in dirty.items() if f"{name}/".startswith(f"{where}/")]
            dirty[folder] = f"the rename of {Path(where).name}"
    return complaints + [f"{name}: {what}" for name, what in dirty.items() if "rename" in what]


# ---- runs that meet them ---------------------------------------------------------------------------------------------

OBSTACLE = strace_works()
needs_strace = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@dataclass(frozen=True)
class Story:
    """A run of which all is known: its metrics lines, and the digest of each of its tags."""

    folder: Path
    flags: list[object]
    metrics: list[dict[str, object]]
    digests: dict[int, str]

    def trial(self, scene: str) -> Trial:
        """A fresh save root in which step 2 is the newest ("prune"), or step 3 is there already ("replace")."""
        root = Path(tempfile.mkdtemp(dir=self.folder)) / "s"
        for step in (1, 2) if scene == "prune" else (1, 2, STEP):
            shutil.copytree(self.folder / "whole" / f"global_step{step}", root / f"global_step{step}")
        (root / "latest").write_text(f"global_step{2 if scene == 'prune' else STEP}\n")
        source = root if scene == "prune" else self.folder / "two"
        common = [*self.flags, "--save", root, "--metrics-file", root.parent / "m"]
        keep = ["--keep-last", 2] if scene == "prune" else []
        return Trial(self, root, scene, [*common, *keep, "--load", source], [*common, *keep, "--load", root])


@dataclass(frozen=True)
class Trial:
    """One save root, the command that meets the fault, and the one that goes on."""

    story: Story
    root: Path
    scene: str
    first: list[object]
    again: list[object]

    @property
    def log(self) -> Path:
        return self.root.parent / "strace"

    def meet(self, fault: Fault, flushes: bool = True) -> list[tuple[int, str]] | None:
        """(exit code, error line) of each rank; None when the victim died."""
        try:
            return run_ranks(save_under, 2, self.first, fault, STEP, self.log, flushes, timeout=120)
        except RankError as error:
            assert f"rank {fault.victim} of 2 died with exit code -" in str(error), (str(fault), str(error))
            return None

    def lost(self) -> list[str]:
        """What is wrong with the tags after the fault; empty when nothing was lost."""
        names = tag_names(self.root)
        steps = [iteration_of_tag(name) for name in names]
        expected = 2 if self.scene == "prune" else STEP
        wrong = [] if steps and max(map(int, steps)) >= expected else [f"newest of {names} is before {expected}"]
        for name, step in zip(names, steps):
            try:
                verify_tag(self.root, name)
                if total_digest(self.root, name) != self.story.digests[step]:
                    wrong.append(f"{name} is another state")
            except CheckpointError as error:
                wrong.append(str(error))
        left = [name for name in os.listdir(self.root) if name.startswith(".staging")]
        return wrong + ([f"left {left}"] if len(left) > 1 else [])

    def check_end(self) -> None:
        """After going on: the same text, the same last state, nothing left over."""
        last = {record["iteration"]: record for record in records(self.root.parent / "m")}
        assert list(last.values()) == self.story.metrics[STEP - 1:], self.root
        assert total_digest(self.root) == self.story.digests[STEPS]
        assert not [name for name in os.listdir(self.root) if name.startswith((".staging", ".aside", ".trash"))]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("kill")
    flags: list[object] = ["--preset", "tiny", "--train-data", write_corpus(folder / "corpus"), "--train-iters", STEPS,
                           "--zero-stage", 1, "--batch-size", 2, "--save-interval", 1, "--num-workers", 0,
                           "--eval-interval", 0, "--log-interval", 0, "--sample-tokens", 0]
    whole = folder / "whole"
    run_ranks(train_all, 2, [[*flags, "--save", whole, "--metrics-file", folder / "m"]])
    shutil.copytree(whole / "global_step2", folder / "two" / "global_step2")
    (folder / "two" / "latest").write_text("global_step2\n")
    digests = {step: total_digest(whole, f"global_step{step}") for step in range(1, STEPS + 1)}
    return Story(folder, flags, records(folder / "m"), digests)


Rehearsals = dict[tuple[str, int], tuple[Trial, list[Call]]]
"""(scene, rank) -> the trial, and the file-changing calls of that rank."""


@pytest.fixture(scope="module")
def rehearsals(story: Story) -> Rehearsals:
    if OBSTACLE is not None:
        pytest.skip(OBSTACLE)
    made = {}
    for scene, victim in itertools.product(("prune", "replace"), (0, 1)):
        trial = story.trial(scene)
        assert trial.meet(Fault(victim)) == [(0, "")] * 2
        made[scene, victim] = trial, calls(trial.log, trial.root)
    return made


def go_on(trials: Iterable[Trial]) -> None:
    """Start each command again, all in one job, and look at what came of it."""
    trials = list(trials)
    run_ranks(train_all, 2, [trial.again for trial in trials], timeout=60 + 5 * len(trials))
    for trial in trials:
        trial.check_end()
        shutil.rmtree(trial.root.parent)


def sweep(story: Story, chosen: Iterable[tuple[str, Fault]]) -> int:
    """Meet each fault, find nothing lost, and go on; how many died."""
    trials, deaths = [], 0
    for scene, fault in chosen:
        trial = story.trial(scene)
        ended = trial.meet(fault)
        assert trial.lost() == [], fault
        if ended is not None:  # an error: every rank says the same, and leaves with the code of storage
            assert len(set(ended)) == 1 and ended[0][0] in (0, 7), (str(fault), ended)
        deaths += ended is None
        trials.append(trial)
        if len(trials) == 20:
            go_on(trials)
            trials = []
    go_on(trials)
    return deaths


def test_a_save_flushes_every_file_before_the_tag_has_its_name(rehearsals: Rehearsals) -> None:
    for trial, made in rehearsals.values():
        assert {"openat", "write", "fsync", "close"} <= {call.name for call in made} <= set(CALLS.split(","))
        assert out_of_order(trial.log, trial.root) == []
        trial.check_end()


@needs_strace
def test_a_writer_that_does_not_flush_is_caught(story: Story) -> None:
    trial = story.trial("prune")
    assert trial.meet(Fault(0), flushes=False) == [(0, "")] * 2
    complaints = " ".join(out_of_order(trial.log, trial.root))
    assert all(f"{name}: its bytes" in complaints for name in ("rank0.safetensors", "manifest.json"))
    assert "the rename" in complaints


ERRORS = {"EIO": ("openat", "write", "fsync", "close", "rename", "mkdir"),
          "ENOSPC": ("openat", "write", "fsync", "rename", "mkdir")}


def faults(rehearsals: Rehearsals, hows: Mapping[str, Iterable[str]]) -> list[tuple[str, Fault]]:
    """Each way of failing, at every file-changing call that can fail so, of either save and either rank."""
    return [(scene, Fault(victim, call.name, call.when, how)) for (scene, victim), (_, made) in rehearsals.items()
            for call in made for how, names in hows.items() if call.name in names]


def test_a_few_deaths_and_errors_of_a_save_lose_nothing(story: Story, rehearsals: Rehearsals) -> None:
    """A sample of the sweeps below."""
    first, second = (rehearsals["replace", victim][1] for victim in (0, 1))
    # Calls that nothing but a save makes, so that their number is that of the rehearsal: sockets are closed, too.
    renames = [call for call in first if call.name == "rename"]
    flushes = [call for call in second if call.name == "fsync"]
    chosen = [(0, renames[1], "signal=KILL"), (1, flushes[-1], "signal=KILL"),
              (1, second[1], "error=ENOSPC"), (0, renames[1], "error=EIO")]
    sample = [("replace", Fault(victim, call.name, call.when, how)) for victim, call, how in chosen]
    assert sweep(story, sample) == 2


@pytest.mark.slow
def test_killed_at_any_file_changing_call_nothing_is_lost(story: Story, rehearsals: Rehearsals) -> None:
    chosen = faults(rehearsals, {"signal=KILL": CALLS.split(",")})
    assert len(chosen) > 100
    # The main thread also talks to its peer, so a count can differ from the rehearsal's; nearly all must have struck.
    assert sweep(story, chosen) >= 0.95 * len(chosen)


@pytest.mark.slow
def test_an_error_of_the_disk_at_any_call_loses_nothing_and_ends_every_rank_alike(story: Story,
                                                                                  rehearsals: Rehearsals) -> None:
    assert sweep(story, faults(rehearsals, {f"error={name}": names for name, names in ERRORS.items()})) == 0
