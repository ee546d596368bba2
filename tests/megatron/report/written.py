"""Metrics files as a trainer writes them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {"config": True, "start": 0, "began": "2026-01-02T03:04:05+00:00", "world_size": 2,
                          "values": {"train": {"train_iters": 100}, "model": {"max_position_embeddings": 8},
                                     "data": {"seq_length": None}, "schedule": {"lr": 0.1}}}


def start(step: int, **schedule: Any) -> dict[str, Any]:
    values = {**CONFIG["values"], "schedule": {"lr": 0.1, **schedule}}
    return {**CONFIG, "start": step, "values": values}


def step(iteration: int, **more: Any) -> dict[str, Any]:
    return {"iteration": iteration, "lm_loss": 5.0, "grad_norm": 1.5, "learning_rate": 0.1, "loss_scale": 1.0,
            "skipped": False, "consumed_samples": 4 * iteration, "samples_digest": "0" * 64, "step_ms": 500.0,
            "tokens_per_s": 64.0, "tflops": 0.1, "mfu": None, "max_memory_bytes": 2**30, **more}


def evaluation(iteration: int, loss: float, split: str = "validation") -> dict[str, Any]:
    return {"eval": True, "split": split, "iteration": iteration, "lm_loss": loss, "ppl": 1.0}


def save(iteration: int) -> dict[str, Any]:
    return {"save": True, "step": iteration, "tag": f"global_step{iteration}", "bytes": 10, "seconds": 0.1}


def write(path: Path, *records: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return path
