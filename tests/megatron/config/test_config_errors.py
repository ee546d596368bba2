"""Every independent reason of a file is told, once and at once; what follows from another is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import parse_args
from megatron.config.ds_json import build_ds_config
from megatron.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
ONE_BIT = {"type": "OneBitAdam", "params": {"freeze_step": 400}}
BATCHES = {"train_batch_size": 16, "gradient_accumulation_steps": 3}

# What a file says, flags, and how each of its errors begins.
REASONS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "a key, the batch and two settings together": (
        {"gradient_cliping": 1.0, **BATCHES, "zero_optimization": {"stage": 0, **ON_HOST}}, {},
        ["unknown key gradient_cliping", "train_batch_size 16",
         "zero_optimization.offload_optimizer.device cpu needs zero_optimization.stage 1, 2 or 3, not 0"]),
    "every stage of the reading": (
        {"amp": {"enabled": True}, "fp16": {"enabled": True}, **BATCHES, "optimizer": ONE_BIT,
         "zero_optimization": {"stage": 2}, "steps_per_print": -1},
        {"fp16": False, "attention_dropout": 2.0},
        ["amp is not supported", "steps_per_print is -1", "--fp16 is off, but fp16.enabled", "train_batch_size 16",
         "--attention-dropout is 2.0", "optimizer.type onebit_adam needs zero_optimization.stage 0 or 1, not 2"]),
    "two of one setting": (
        {"optimizer": ONE_BIT, "zero_optimization": {"stage": 2, **ON_HOST}}, {},
        ["optimizer.type onebit_adam needs zero_optimization.stage 0 or 1",
         "optimizer.type onebit_adam and zero_optimization.offload_optimizer.device cpu exclude"]),
    "both of a section whose checks come one by one": (
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False, "eps": -1}}}, {},
        ["optimizer.params.eps is -1", "optimizer.params.adam_w_mode false contradicts optimizer.type adamw"]),
    "flags and a file": (
        {"zero_optimization": {"stage": 9, "reduce_bucket_size": 0}, "gradient_clipping": "x"}, {"lr": -1.0},
        ['gradient_clipping is "x"', "--lr is -1.0", "zero_optimization.reduce_bucket_size is 0",
         "zero_optimization.stage is 9"]),
    "keys that only together are wrong, of a file and of flags": (
        {"fp16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {"bf16": True},
        ["fp16.enabled and --bf16 exclude each other",
         "zero_optimization.offload_optimizer.device nvme needs zero_optimization.offload_optimizer.nvme_path"]),
    "two batch sizes": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, {"batch_size": 4, "global_batch_size": 16},
        ["--global-batch-size is 16, but train_batch_size", "--batch-size is 4, but train_micro_batch_size_per_gpu"]),
}

# The same, where further checks would complain of what is only the consequence of the first error.
CONSEQUENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a stage that is none": ({"zero_optimization": {"stage": "two", **ON_HOST}}, {},
                             'zero_optimization.stage is "two"'),
    "a stage that is misspelt": ({"zero_optimization": {"stge": 3, "offload_param": {"device": "cpu"}}}, {},
                                 "unknown key zero_optimization.stge"),
    "a stage elsewhere": ({"stage": 3, "zero_optimization": ON_HOST}, {}, "unknown key stage"),
    "a stage that flags contradict": ({"zero_optimization": {"stage": 0, **ON_HOST}}, {"zero_stage": 3},
                                      "--zero-stage is 3, but zero_optimization.stage"),
    "a batch that is no number": ({"train_batch_size": "x", "train_micro_batch_size_per_gpu": 3,
                                   "gradient_accumulation_steps": 2}, {}, 'train_batch_size is "x"'),
    "an optimizer that is not there": ({"optimizer": {"type": "MuAdam", "params": {"freeze_step": 3, "momentum": 0}},
                                        "zero_optimization": {"stage": 2}}, {}, 'optimizer.type "MuAdam"'),
    "an optimizer whose type is misspelt": ({"optimizer": {"tpye": "Lion", "params": {"freeze_step": 3}}}, {},
                                            "unknown key optimizer.tpye"),
    "a schedule without an end": ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "x"}}}, {},
                                  'scheduler.params.total_num_steps is "x"'),
    "a cycle whose peak is no number": (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": "x"}}}, {},
        'scheduler.params.cycle_max_lr is "x"'),
    "ranks that cannot be arranged": ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, {
        "model_parallel_size": 3, "num_attention_heads": 4}, "2 ranks cannot be arranged"),
    "fp16 that is not on": ({"fp16": {"enabled": "x", "loss_scale": 0, "min_loss_scale": -1}}, {},
                            'fp16.enabled is "x"'),
}


def reasons(call: Callable[[], object]) -> list[str]:
    """What each of its errors says."""
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.code == 2
    first, *numbered = re.split(r"\n  \(\d+\) ", str(caught.value))
    return numbered or [first.removeprefix("config: ")]


def test_every_reason_is_told_once_and_what_follows_from_it_is_not_told() -> None:
    consequences = {name: (tree, flags, [expected]) for name, (tree, flags, expected) in CONSEQUENCES.items()}
    for name, (tree, flags, expected) in {**REASONS, **consequences}.items():
        told = reasons(lambda: build_ds_config(tree, flags=flags, world_size=2))
        assert len(told) == len(expected), (name, told)
        for sentence, beginning in zip(told, expected):
            assert sentence.startswith(beginning), name


def test_flags_and_what_is_checked_after_them_end_in_the_same_list(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": ONE_BIT, "zero_optimization": {"stage": 2}}))
    argv = ["--cpu-optimizer", "--offload-optimizer-device", "none", "--train-iters", "100"]
    needs, late, home = reasons(lambda: parse_args([*argv, "--deepspeed_config", str(path)]))
    assert needs.startswith("optimizer.type onebit_adam needs zero_optimization.stage 0 or 1, not 2")
    assert home.startswith("optimizer.params.freeze_step 400 is not below --train-iters 100")
    assert late.startswith("--cpu-optimizer keeps the optimizer's state on the host, but --offload-optimizer-device is")


def test_the_program_ends_with_a_line_for_each_reason(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(REASONS["a key, the batch and two settings together"][0]))
    done = subprocess.run([sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "pretrain_gpt2.py",
                           "--mock-data", "--deepspeed_config", path],
                          cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    head, *lines = done.stderr.splitlines()
    assert done.returncode == 2 and head == f"error: {path}: 3 errors:"
    assert [line[:6] for line in lines] == ["  (1) ", "  (2) ", "  (3) "]


def test_what_belongs_to_an_optimizer_in_doubt_is_not_judged_by_another() -> None:
    for flags in ("onebit_lamb --optimizer-params coeff_beta=0.9", "onebit_adam --onebit-freeze-step auto"):
        (told,) = reasons(lambda: parse_args(["--no-adam-w-mode", "--optimizer", *flags.split()]))
        assert told.startswith("--no-adam-w-mode and --optimizer ")
