"""From which saves a save continues: the branch it is on, its number, and its history. No clock takes part. No torch.

An engine saves on one *branch*, whose name it draws when it is made and again when it loads a checkpoint. The *number*
of a commit is one more than that of any tag in the save root, and than that of its *parent*, the save that it follows.
Its *history* holds the last save that it continues from on each branch, the parent at the end. So a save states all its
ancestors itself: it does not matter which of them are still there.

Formats 1 to 4 record none of this. Their saves precede all others, in the order of the times that they recorded (format
1: of their steps); earlier ones of the same run and of at most the same step count as ancestors.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.checkpoint.strict import StrictRecord


class Ancestor(NamedTuple):
    """A save, as the history of a later one names it. Formats 1 to 4: branch "", and the time instead of the number."""

    branch: str
    commit: int
    tag: str


History = tuple[Ancestor, ...]


@dataclass(frozen=True)
class CommitRecord:
    """What orders the saves of a root and relates them."""

    tag: str
    iteration: int
    run_id: str
    saved_at: int = 0
    branch: str = ""
    commit: int = 0
    history: History = ()

    @property
    def as_ancestor(self) -> Ancestor:
        return Ancestor(self.branch, self.commit if self.branch else self.saved_at, self.tag)

    @property
    def commit_order(self) -> tuple[int, int, int, str]:
        """Sorts the saves of a root as they were committed."""
        return self.commit, 0 if self.branch else self.saved_at, self.iteration, self.tag

    def descends_from(self, other: CommitRecord) -> bool:
        """`other` is an ancestor of this save, or this save itself."""
        branch, commit, _ = other.as_ancestor
        return (other.iteration <= self.iteration and (branch != "" or other.run_id == self.run_id)
                and any(branch == known.branch and commit <= known.commit
                        for known in (*self.history, self.as_ancestor)))


class Lineage:
    """What the next save of an engine continues from; the lineage of rank 0 is the one recorded."""

    def __init__(self, parent: CommitRecord | None = None) -> None:
        """`parent`: what was loaded; None at the start of a run."""
        self.branch, self.history = secrets.token_hex(8), () if parent is None else parent.history
        if parent is not None:
            self.set_parent(parent)

    def set_parent(self, parent: CommitRecord) -> None:
        """From here on the next save continues from this one."""
        earlier = (known for known in self.history if known.branch != parent.branch)
        self.history = *earlier, parent.as_ancestor

    def next_commit_number(self, last: int) -> int:
        """Of the next commit into a root whose last one has the number `last`."""
        return 1 + max([last, *(known.commit for known in self.history if known.branch)])


def parse_lineage(record: StrictRecord) -> tuple[str, History]:
    """The branch and the history that a manifest, or the part of rank 0, states."""
    branch, history = record.take_field("branch", str), []
    for value in record.take_field("history", list):
        entry = StrictRecord(value, f"{record.where}: history[]")
        history.append(
            Ancestor(entry.take_field("branch", str), entry.take_count("commit", 10**18), entry.take_field("tag", str)))
        entry.check_all_taken()
    return branch, tuple(history)


def lineage_to_json(branch: str, history: History) -> dict[str, Any]:
    return {"history": [known._asdict() for known in history], "branch": branch}
