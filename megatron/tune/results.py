"""The trials of a search on disk: one JSON line each, written when a trial is over, so that a search that was killed
goes on with the next.

The first line says what they belong to (subject.py): trials of anything else are not mixed with these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data.lock import hold_writer_lock
from data.storage import make_folder, prefix_storage_errors, write_errors_for
from megatron.errors import ConfigError
from megatron.tune.search import Outcome
from megatron.tune.space import Choice

FILE = "trials.jsonl"
FLAG = "--autotuning-results-dir"

MOST_TOLD = 8
"""Differences between two runs that an error names."""


@contextmanager
def results_of(folder: str, subject: Mapping[str, Any], *, overwrite: bool) -> Iterator[Results]:
    """For one search at a time: a second one is refused."""
    with prefix_storage_errors(FLAG):
        make_folder(folder)
    with ExitStack() as stack:
        with prefix_storage_errors(FLAG):
            stack.enter_context(hold_writer_lock(Path(folder) / FILE))
        yield Results(folder, subject, overwrite=overwrite)


class Results:
    """Open for the trials of `subject`."""

    def __init__(self, folder: str, subject: Mapping[str, Any], *, overwrite: bool) -> None:
        self.folder, self._path = Path(folder), Path(folder) / FILE
        self.trials: dict[Choice, Outcome] = {}
        """In the order in which they were made."""
        lines = [] if overwrite or not self._path.exists() else self._whole_lines()
        if not lines:
            self._write(json.dumps({"subject": dict(subject)}), mode="w")
            return
        head, *rest = [json.loads(line) for line in lines]
        if not isinstance(head.get("subject", {}), dict):
            raise self._no_trial()
        if others := [*_differing(head.get("subject", {}), subject)]:
            more = [f"and {len(others) - MOST_TOLD} more"] * (len(others) > MOST_TOLD)
            raise ConfigError(f"{FLAG} {folder} has trials of another run or machine "
                              f"({'; '.join([*others[:MOST_TOLD], *more])}): name another folder, or begin anew with "
                              "--autotuning-overwrite")
        for record in rest:
            try:
                outcome = Outcome(**record["outcome"])
                self.trials[Choice(**record["choice"])] = replace(outcome, times=tuple(outcome.times))
            except (KeyError, TypeError) as error:
                raise self._no_trial() from error

    def add(self, choice: Choice, outcome: Outcome, predicted: float) -> None:
        """In the place of what was known of this choice."""
        self.trials[choice] = outcome
        self._write(json.dumps({"trial": list(self.trials).index(choice) + 1, "choice": choice.as_dict(),
                                "predicted": predicted, "outcome": asdict(outcome)}), mode="a")

    def forget(self, choices: Sequence[Choice]) -> None:
        """Trials that say nothing of their choices."""
        for choice in choices:
            del self.trials[choice]
        told = [choice.as_dict() for choice in choices]
        self._replace([line for line in self._whole_lines() if json.loads(line).get("choice") not in told])

    def _whole_lines(self) -> list[str]:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        whole = text[:text.rfind("\n") + 1].splitlines()
        try:
            is_right = all(isinstance(json.loads(line), dict) for line in whole)
        except ValueError as error:
            raise self._no_trial() from error
        if not is_right:
            raise self._no_trial()
        if not text.endswith("\n"):  # without what a kill has cut
            self._replace(whole)
        return whole

    def _no_trial(self) -> ConfigError:
        return ConfigError(f"{self._path} holds a line that is no record of a trial: begin anew with "
                           "--autotuning-overwrite")

    def _replace(self, lines: Sequence[str]) -> None:
        with prefix_storage_errors(FLAG), write_errors_for(self._path):
            fresh = self._path.with_suffix(".new")
            fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(fresh, self._path)

    def _write(self, *lines: str, mode: str) -> None:
        with prefix_storage_errors(FLAG), write_errors_for(self._path), open(self._path, mode,
                                                                             encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*there, *here}):
        before, now = there.get(name), here.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differing(before, now)
        elif before != now:
            yield f"other {name}" if name == "settings" else f"{name} {_word(before)} there, {_word(now)} here"


def _word(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value)
