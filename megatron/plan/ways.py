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
from megatron.plan.footprint import PlannedRun, StatePlacement

PLACEHOLDER_FOLDER = "DIR"


def with_changes(run: PlannedRun, placement: StatePlacement | None = None, **sections: Any) -> PlannedRun:
    """The run with these sections of its configuration, and these homes; ConfigError says what forbids it."""
    changed = replace(run, config=replace(run.config, **sections), placement=placement or run.placement)
    _check_legal(changed)
    return changed


def with_stage(run: PlannedRun, stage: int, placement: StatePlacement | None = None) -> PlannedRun:
    return with_changes(run, placement, zero=replace(run.config.zero, zero_stage=stage))


def if_legal(make_run: Callable[[], PlannedRun]) -> Iterator[PlannedRun]:
    """The run that this makes, where nothing forbids it."""
    with suppress(ConfigError):
        yield make_run()


def why_illegal(run: PlannedRun, stage: int, placement: StatePlacement) -> str:
    """What forbids this way, in short; "" where nothing does."""
    try:
        with_stage(run, stage, placement)
    except ConfigError as error:
        return run.config.translate(error_sentences(error)[0]).partition(": ")[0]
    return ""


def _check_legal(run: PlannedRun) -> Config:
    """Its homes are beside the configuration in a plan (footprint.py); here they are in it again."""
    offload, placement = run.config.offload, run.placement
    return replace(run.config, offload=replace(
        offload, offload_optimizer_device=placement.optimizer, offload_param_device=placement.params,
        offload_optimizer_nvme_path=offload.offload_optimizer_nvme_path or PLACEHOLDER_FOLDER,
        offload_param_nvme_path=offload.offload_param_nvme_path or PLACEHOLDER_FOLDER))
