"""What trials belong to: all that is not tuned, the machine with its torch, and the steps that count."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from megatron.config.setting import flag_name
from megatron.config.tree import AutotuningConfig, Config, LogConfig, SaveConfig
from megatron.plan.footprint import Run
from megatron.plan.kept_rates import facts
from megatron.tune.space import samples_of


def subject_of(asked: Run) -> dict[str, Any]:
    tuning = asked.config.autotuning
    settings = {flag_name(name): value for section in _without_what_is_tuned(asked).as_dict().values()
                for name, value in section.items()}
    return {"settings": json.loads(json.dumps(settings)), "samples": samples_of(asked),
            "steps": [tuning.autotuning_start_profile_step, tuning.autotuning_end_profile_step],
            **facts(asked, asked.ranks)}


def _without_what_is_tuned(asked: Run) -> Config:
    config, zero = asked.config, asked.config.zero
    gathered = 1 if zero.allgather_bucket_size == zero.reduce_bucket_size else zero.allgather_bucket_size
    return replace(
        config, save=SaveConfig(), log=LogConfig(), autotuning=AutotuningConfig(),
        parallel=replace(config.parallel, model_parallel_size=1), zero=replace(
            zero, zero_stage=0, reduce_bucket_size=1, allgather_bucket_size=gathered),
        recompute=replace(config.recompute, checkpoint_activations=False),
        offload=replace(config.offload, offload_optimizer_device="none", offload_param_device="none"),
        train=replace(config.train, batch_size=1, global_batch_size=samples_of(asked), train_iters=1))
