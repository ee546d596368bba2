"""Killed or failing at any file-changing call of a two-rank save, a run loses nothing that was committed, and the same
command goes on to the same text. The faults are the kernel's (faults.py); the program is pretrain_gpt2.py.

Two saves are met: one that deletes an older tag afterwards (--keep-last), and one that replaces a tag of its name.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.checkpoint.manifest import iteration_of_tag
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.errors import CheckpointError
from tests.distributed import RankError, run_ranks
from tests.megatron.checkpoint.faults import CALLS, Call, Death, Fault, calls, out_of_order, save_under, strace_works
from tests.megatron.helpers import ROOT, records, total_digest, train_all, write_corpus

STEP, STEPS = 3, 4
"""The save under fire, and the last step."""

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

    def meet(self, fault: Fault | Death, control: str | None = None) -> list[tuple[int, str]] | None:
        """(exit code, error line) of each rank; None when the victim died."""
        try:
            return run_ranks(save_under, 2, self.first, fault, STEP, self.log, control, timeout=120)
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


def sweep(story: Story, chosen: Iterable[tuple[str, Fault | Death]]) -> int:
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
    assert trial.meet(Fault(0), "no fsync") == [(0, "")] * 2
    complaints = " ".join(out_of_order(trial.log, trial.root))
    assert all(f"{name}: its bytes" in complaints for name in ("rank0.safetensors", "manifest.json"))
    assert "the rename" in complaints


ERRORS = {"EIO": ("openat", "write", "fsync", "close", "rename", "mkdir"),
          "ENOSPC": ("openat", "write", "fsync", "rename", "mkdir")}


def faults(rehearsals: Rehearsals, hows: Mapping[str, Iterable[str]]) -> list[tuple[str, Fault]]:
    """Each way of failing, at every file-changing call that can fail so, of either save and either rank."""
    return [(scene, Fault(victim, call.name, call.when, how)) for (scene, victim), (_, made) in rehearsals.items()
            for call in made for how, names in hows.items() if call.name in names]


def byte_deaths(story: Story, count: int) -> list[tuple[str, Death]]:
    """Deaths at a byte of a file, the first and the last of each file included."""
    draw = random.Random(5)
    files = verify_tag(story.folder / "whole", f"global_step{STEP}")
    sizes = {name: entry.size for name, entry in files.items()}
    sizes["manifest.json"] = (story.folder / "whole" / f"global_step{STEP}" / "manifest.json").stat().st_size
    edges = [(name, at) for name, size in sizes.items() for at in (0, size - 1)]
    drawn = [(name, draw.randrange(sizes[name])) for name in draw.choices(list(sizes), k=count)]
    return [(draw.choice(["prune", "replace"]), Death(int(name.startswith("rank1")), name, at))
            for name, at in (edges + drawn)[:count]]


def test_a_few_deaths_and_errors_of_a_save_lose_nothing(story: Story, rehearsals: Rehearsals) -> None:
    """A sample of the sweeps below."""
    first, second = (rehearsals["replace", victim][1] for victim in (0, 1))
    # Calls that nothing but a save makes, so that their number is that of the rehearsal: sockets are closed, too.
    renames = [call for call in first if call.name == "rename"]
    flushes = [call for call in second if call.name == "fsync"]
    chosen = [(0, renames[1], "signal=KILL"), (1, flushes[-1], "signal=KILL"),
              (1, second[1], "error=ENOSPC"), (0, renames[1], "error=EIO")]
    sample = [("replace", Fault(victim, call.name, call.when, how)) for victim, call, how in chosen]
    assert sweep(story, [*sample, ("prune", Death(1, "rank1.safetensors", 70_000))]) == 3


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


@pytest.mark.slow
def test_dead_at_200_random_bytes_nothing_is_lost(story: Story) -> None:
    assert sweep(story, byte_deaths(story, 200)) == 200


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize(("control", "scene"), [("in place", "prune"), ("delete first", "replace")])
def test_a_wrong_writer_is_caught_by_the_same_sweep(story: Story, control: str, scene: str) -> None:
    rehearsed = story.trial(scene)
    assert rehearsed.meet(Fault(0), control) == [(0, "")] * 2
    lost = []
    for call in calls(rehearsed.log, rehearsed.root):
        if call.name in ("rename", "unlinkat", "rmdir", "fsync"):
            trial = story.trial(scene)
            trial.meet(Fault(0, call.name, call.when, "signal=KILL"), control)
            lost += trial.lost()
    assert lost


VICTIM = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.megatron.checkpoint.faults import Fault, armed
from megatron.distributed.exit_codes import run
from pretrain_gpt2 import main
victim, call, when, how, step, log = sys.argv[1:7]
del sys.argv[1:7]
with armed(int(os.environ["RANK"]), Fault(int(victim), call, int(when), how), int(step), Path(log)):
    sys.exit(run(main))
"""


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "call", "how", "code", "words"), [
    (1, "fsync", "signal=KILL", 5, ["rank 1", "signal 9"]), (0, "rename", "signal=KILL", 5, ["rank 0", "signal 9"]),
    (1, "fsync", "error=EIO", 7, ["rank1.safetensors", "Input/output error", "bytes needed"]),
    (0, "rename", "error=ENOSPC", 7, ["zero_to_fp32.py", "No space left on device"])])
def test_a_launched_job_ends_with_one_line_and_goes_on(story: Story, victim: int, call: str, how: str, code: int,
                                                       words: list[str]) -> None:
    trial = story.trial("prune")
    script = trial.root.parent / "victim.py"
    script.write_text(VICTIM)
    launch = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2"]
    fault = [victim, call, 1, how, STEP, trial.log]
    done = subprocess.run([*launch, *map(str, [script, *fault, *trial.first])], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = done.stderr.splitlines()
    assert (done.returncode, [line.startswith("error: ") for line in lines]) == (code, [True]), done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert trial.lost() == []
    go_on([trial])
