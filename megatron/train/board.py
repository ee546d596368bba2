"""The curves of a run for tensorboard, with what it takes to compare runs: the configuration as text, and as
hyper-parameters for the HPARAMS tab.

All scalars of a step are one event, which a thread of tensorboard's writes: a step pays microseconds. Not here: when
a step is written (log.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.storage import escape_to_one_line
from megatron.train.metrics import StepMetrics
from megatron.zero.api.curves import TensorboardWriter

STEP_SCALARS = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "step_ms", "tokens_per_s", "tflops", "mfu")
GIB = 2**30


def step_scalars(metrics: StepMetrics) -> dict[str, float]:
    """By the names that they have on a board; without what is not known."""
    values = {**{key: getattr(metrics, key) for key in STEP_SCALARS}, "memory_gib": metrics.max_memory_bytes / GIB,
              **metrics.nvme_values(), **metrics.layer_drop_values()}
    return {f"train/{key}": value for key, value in values.items() if value is not None}


def evaluation_scalars(name: str, loss: float, text_metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/lm_loss": loss, **{f"{name}/{key}": value for key, value in text_metrics.items()}}


class TensorboardLogger:
    """A folder of events; a resumed run appends to it."""

    def __init__(self, folder: str) -> None:
        self._writer = TensorboardWriter("--tensorboard-dir", folder)

    def log_config(self, sections: Mapping[str, Mapping[str, Any]], run_header: str, iteration: int) -> None:
        from torch.utils.tensorboard.summary import hparams

        values = {f"{section}.{key}": value for section, fields in sections.items() for key, value in fields.items()}
        rows = "\n".join(f"| {name} | {escape_to_one_line(value).replace('|', '&#124;')} |"
                         for name, value in values.items())
        text = f"{run_header}\n\n| | |\n|---|---|\n{rows}"
        given = {name: value if isinstance(value, (bool, int, float, str)) else str(value)
                 for name, value in values.items() if value is not None}
        with self._writer.storage_errors():
            self._writer.writer.add_text("configuration", text, iteration)
            for summary in hparams(given, {"train/lm_loss": 0, "validation/lm_loss": 0}):
                self._writer.events.add_summary(summary)

    def log_step(self, metrics: StepMetrics, tokens: int) -> None:
        """`tokens` is what the run has consumed: the second axis of the loss."""
        self._add_scalars(step_scalars(metrics), metrics.iteration)
        self._add_scalars({"train/lm_loss_by_tokens": metrics.lm_loss}, tokens)

    def log_evaluation(self, name: str, iteration: int, loss: float, tokens: int, text_metrics: Mapping[str,
                                                                                                        float]) -> None:
        self._add_scalars(evaluation_scalars(name, loss, text_metrics), iteration)
        self._add_scalars({f"{name}/lm_loss_by_tokens": loss}, tokens)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()

    def _add_scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        with self._writer.storage_errors():
            self._writer.events.add_summary(Summary(value=scalars), step)
