"""The same run in another way: at another ZeRO stage, with its state elsewhere, with other recomputation.

A configuration may forbid some: each way is checked as a run that was started so would be. Not here: what a way needs
(memory.py), and which are worth a look (remedies.py, cheapest.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron.config.problems import error_sentences
from megatron.config.tree import Config
from megatron.errors import ConfigError
from megatron.plan.footprint import Homes, Run

SOME_FOLDER = "DIR"


def other_way(run: Run, homes: Homes | None = None, **sections: Any) -> Run:
    """The run with these sections of its configuration, and these homes; ConfigError says what forbids it."""
    changed = replace(run, config=replace(run.config, **sections), homes=homes or run.homes)
    _as_started(changed)
    return changed


def with_stage(run: Run, stage: int, homes: Homes | None = None) -> Run:
    return other_way(run, homes, zero=replace(run.config.zero, zero_stage=stage))


def allowed(way: Callable[[], Run]) -> Iterator[Run]:
    """The run that this makes, where nothing forbids it."""
    with suppress(ConfigError):
        yield way()


def why_not(run: Run, stage: int, homes: Homes) -> str:
    """What forbids this way, in short; "" where nothing does."""
    try:
        with_stage(run, stage, homes)
    except ConfigError as error:
        return run.config.translate(error_sentences(error)[0]).partition(": ")[0]
    return ""


def _as_started(run: Run) -> Config:
    """Its homes are beside the configuration in a plan (footprint.py); here they are in it again."""
    offload, homes = run.config.offload, run.homes
    return replace(run.config, offload=replace(
        offload, offload_optimizer_device=homes.optimizer, offload_param_device=homes.params,
        offload_optimizer_nvme_path=offload.offload_optimizer_nvme_path or SOME_FOLDER,
        offload_param_nvme_path=offload.offload_param_nvme_path or SOME_FOLDER))
