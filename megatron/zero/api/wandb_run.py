"""A run of Weights & Biases, with errors that name the flag or key it comes from.

The package is imported where such a run is asked for, and nowhere else. Whether it talks to a server is its own matter:
WANDB_MODE=offline writes to ./wandb, for `wandb sync` later. Not here: which scalars there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.config.log import check_wandb
from megatron.errors import ConfigError


class WandbProject(NamedTuple):
    """Where a run is filed."""

    name: str
    group: str | None = None
    team: str | None = None


class WandbRun:
    def __init__(self, flag: str, project: WandbProject, step_metric: str) -> None:
        """The horizontal axis of its charts is the scalar of that name."""
        check_wandb(flag)
        import wandb

        try:
            self._run = wandb.init(project=project.name, group=project.group, entity=project.team)
        except (wandb.errors.Error, OSError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"{flag} {project.name}: wandb cannot start: {why}; log in with `wandb login`, or set "
                              "WANDB_MODE=offline to write to a folder") from error
        self._has_failed = False
        self._run.define_metric("*", step_metric=step_metric)

    def configure(self, settings: Mapping[str, Any]) -> None:
        """They are shown beside its charts."""
        self._warn_on_failure(lambda: self._run.config.update(dict(settings), allow_val_change=True))

    def log(self, scalars: Mapping[str, float]) -> None:
        self._warn_on_failure(lambda: self._run.log(dict(scalars)))

    def close(self, *, failed: bool = False) -> None:
        """Return when all of it has arrived, where it goes to a server."""
        self._warn_on_failure(lambda: self._run.finish(exit_code=int(failed)))

    def _warn_on_failure(self, action: Callable[[], Any]) -> None:
        """Its service may end before the run does, which is not worth ending a job of many ranks."""
        if self._has_failed:
            return
        try:
            action()
        except Exception as error:
            self._has_failed = True
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"warning: wandb takes no more scalars ({why}); training goes on without it", file=sys.stderr,
                  flush=True)
