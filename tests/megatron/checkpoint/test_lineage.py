"""Random histories of a save root against a slow reference that remembers every commit and its parent: saves, some in
the background or with --keep-last, loads of older tags, restarts, kills, a second run, an edited or missing `latest`,
and a clock that jumps. Which tag comes next is what the reference says, and never one of an abandoned branch."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.checkpoint.cli import main
from megatron.checkpoint.commit import Keep
from megatron.checkpoint.manifest import Lineage, iteration_of_tag
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import (latest_tag, commit_records, read_tag_manifest,
                                      tag_names)
from megatron.zero.api.engine import Engine
from tests.megatron.checkpoint.faults import Killed, dying_at
from tests.megatron.checkpoint.made import load_candidates, save_solo

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}


@dataclass
class Reference:
    """Commits by number, the oldest first; nothing is ever forgotten."""

    parents: list[int | None] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    there: dict[str, int] = field(default_factory=dict)
    """Tag -> the commit that it holds."""
    latest: str | None = None

    def commit(self, parent: int | None, tag: str, step: int, run: int, latest: bool) -> int:
        for values, value in ((self.parents, parent), (self.tags, tag), (self.steps, step), (self.runs, run)):
            values.append(value)
        self.there[tag] = len(self.tags) - 1
        self.latest = tag if latest else self.latest
        return self.there[tag]

    def line(self, commit: int) -> list[int]:
        """Of what is there: this commit and its ancestors, the newest first."""
        found: list[int] = []
        walked: int | None = commit
        while walked is not None:
            found += [walked] if self.there.get(self.tags[walked]) == walked else []
            walked = self.parents[walked]
        return found

    def candidates(self) -> list[str]:
        first = max(self.there.values()) if self.latest is None else self.there[self.latest]
        return [self.tags[commit] for commit in self.line(first)]

    def pruned(self, saved: int, last: int) -> list[str]:
        steps = [commit for commit in self.line(saved) if iteration_of_tag(self.tags[commit]) is not None]
        kept = steps[:last][-1] if len(steps) >= last else -1
        return [tag for tag, commit in self.there.items() if iteration_of_tag(tag) is not None and commit < kept
                and tag != self.latest and self.runs[commit] == self.runs[saved]
                and self.steps[commit] <= self.steps[saved]]


class Story:
    """What happens to a save root, and to the reference beside it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random, self.reference = root, random.Random(seed), Reference()
        self.clock, self.names, self.runs = 1_700_000_000 * 10**9, itertools.count(), itertools.count()
        self.start(fresh=True)

    def start(self, fresh: bool = False) -> None:
        """A process: a run of its own, or one that resumes."""
        self.engine: Engine = zero.initialize(model=nn.Linear(2, 1), config=CONFIG)[0]
        self.at: int | None = None
        self.run = next(self.runs)
        if not fresh and self.reference.there:
            self.load(self.reference.candidates()[0], None)

    def load(self, tag: str, name: str | None) -> None:
        path, state = self.engine.load_checkpoint(self.root, name)
        assert path == str(self.root / tag) and state is not None
        self.at = self.reference.there[tag]
        self.run = self.reference.runs[self.at]
        assert state["id"] == self.at_id(tag)

    def at_id(self, tag: str) -> Any:
        return open_checkpoint(self.root, tag).shared_state["client_state"]["id"]

    def save(self, dies_at: int = 10**9) -> None:
        for _ in range(self.random.randrange(1, 4)):
            self.engine.backward(self.engine(torch.ones(1, 2)).sum())
            self.engine.step()
        own = self.random.choice((None, None, None, "best"))
        latest, name, keep = self.random.random() < 0.9, next(self.names), self.random.choice((None, None, 1, 2, 3))
        step = self.engine.global_steps
        tag, before = own or f"global_step{step}", dict(self.reference.there)
        try:
            with dying_at(self.root, dies_at):
                self.engine.save_checkpoint(self.root, own, {"id": name}, latest, keep=Keep(keep),
                                            in_background=self.random.random() < 0.3 and dies_at > 10**6)
            self.engine.finish_save()
        except Killed:
            pass
        is_there = tag in tag_names(self.root) and self.at_id(tag) == name
        assert is_there or dies_at < 10**6
        if is_there:
            self.at = self.reference.commit(self.at, tag, step, self.run, latest)
            doomed = [] if keep is None else self.reference.pruned(self.at, keep)
            gone = before.keys() - set(tag_names(self.root))
            assert gone == set(doomed) if dies_at > 10**6 else gone <= set(doomed), (gone, doomed)
            for tag in gone:
                del self.reference.there[tag]
        else:
            assert before.keys() == set(tag_names(self.root))

    def happen(self) -> str:
        if not self.reference.there:
            self.save()
            return "the first save"
        what = self.random.choices(("save", "back", "restart", "kill", "clock", "latest", "missing", "other run"),
                                   (8, 3, 1, 2, 3, 1, 1, 1))[0]
        some = self.random.choice(sorted(self.reference.there))
        if what == "save":
            self.save()
        elif what == "back":
            self.load(some, some)
        elif what in ("restart", "other run"):
            self.start(fresh=what != "restart")
        elif what == "kill":
            self.save(dies_at=self.random.randrange(25))
            self.start()
        elif what == "clock":
            self.clock += self.random.randrange(-10**18, 10**18)
        elif what == "latest":
            (self.root / "latest").write_text(f"{some}\n")
            self.reference.latest = some
        else:
            (self.root / "latest").unlink(missing_ok=True)
            self.reference.latest = None
        return what

    def check(self) -> None:
        expected = self.reference
        assert [record.tag for record in commit_records(self.root)] == sorted(
            expected.there, key=lambda tag: expected.there[tag])
        assert latest_tag(self.root) == expected.latest
        assert load_candidates(self.root) == expected.candidates()
        for tag, commit in expected.there.items():
            history, parent = read_tag_manifest(self.root, tag).history, expected.parents[commit]
            assert (history[-1].tag if history else None) == (None if parent is None else expected.tags[parent])


@pytest.mark.parametrize(("seeds", "length"), [(range(5), 10),
                                               pytest.param(range(1000, 1040), 25, marks=pytest.mark.slow)])
def test_the_next_tag_is_that_of_the_reference(seeds: range, length: int, tmp_path: Path) -> None:
    for seed in seeds:
        story, told = Story(tmp_path / str(seed), seed), list[str]()
        with mock.patch.object(time, "time_ns", lambda story=story: story.clock):
            for _ in range(length):
                told.append(story.happen())
                try:
                    story.check()
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, after {', '.join(told)}: {error}") from error


def test_an_engine_that_saves_into_two_folders_numbers_its_saves_in_both(tmp_path: Path) -> None:
    """A tag copied from the one into the other is where it belongs in the history."""
    lineage = Lineage()
    for step, folder in ((5, "a"), (2, "b"), (7, "a")):
        save_solo(tmp_path / folder, step, lineage=lineage)
    (tmp_path / "b" / "global_step2").rename(tmp_path / "a" / "global_step2")
    assert load_candidates(tmp_path / "a") == ["global_step7", "global_step2", "global_step5"], "by commit, not by step"


def test_list_shows_parents_and_other_branches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, after in ((2, None), (4, None), (6, None), (4, "global_step2"), (7, None)):
        save_solo(tmp_path, step, after=after)
    assert main(["list", str(tmp_path)]) == 0
    ends = [line.partition(" bytes")[2] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["", "  after global_step2", "  after global_step4 (not in this folder)  other branch",
                    "  after global_step4  latest"]
    assert main(["list", f"{tmp_path}:global_step7"]) == 0
    assert capsys.readouterr().out.endswith(" bytes  after global_step4  latest\n")
