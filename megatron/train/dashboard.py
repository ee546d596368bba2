"""The curves of a run on Weights & Biases, under the names that they have in tensorboard.

Its runs end with the process: to go on with the same one after a resume, set WANDB_RUN_ID and WANDB_RESUME=allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.train.board import evaluation_scalars, step_scalars
from megatron.train.metrics import StepMetrics
from megatron.zero.api.wandb_run import WandbProject, WandbRun


class WandbLogger:
    def __init__(self, project: WandbProject) -> None:
        self._run = WandbRun("--wandb-project", project, step_metric="iteration")

    def log_config(self, sections: Mapping[str, Mapping[str, Any]], run_header: str, iteration: int) -> None:
        self._run.configure(sections)

    def log_step(self, metrics: StepMetrics, tokens: int) -> None:
        self._run.log({"iteration": metrics.iteration, "tokens": tokens, **step_scalars(metrics)})

    def log_evaluation(self, name: str, iteration: int, loss: float, tokens: int, text_metrics: Mapping[str,
                                                                                                        float]) -> None:
        self._run.log({"iteration": iteration, "tokens": tokens, **evaluation_scalars(name, loss, text_metrics)})

    def close(self, *, failed: bool = False) -> None:
        self._run.close(failed=failed)
