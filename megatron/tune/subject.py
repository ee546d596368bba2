"""What trials belong to: all that is not tuned, the machine with its torch, and the steps that count."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from megatron.config.setting import flag_name
from megatron.config.tree import AutotuningConfig, Config, LogConfig, SaveConfig
from megatron.plan.footprint import PlannedRun
from megatron.plan.kept_rates import rates_key
from megatron.tune.space import samples_per_step


def trial_key(requested: PlannedRun) -> dict[str, Any]:
    tuning = requested.config.autotuning
    settings = {flag_name(name): value for section in _untuned_settings(requested).as_dict().values()
                for name, value in section.items()}
    return {"settings": json.loads(json.dumps(settings)), "samples": samples_per_step(requested),
            "steps": [tuning.autotuning_start_profile_step, tuning.autotuning_end_profile_step],
            **rates_key(requested, requested.ranks)}


def _untuned_settings(requested: PlannedRun) -> Config:
    config, zero = requested.config, requested.config.zero
    gathered = 1 if zero.allgather_bucket_size == zero.reduce_bucket_size else zero.allgather_bucket_size
    return replace(
        config, save=SaveConfig(), log=LogConfig(), autotuning=AutotuningConfig(),
        parallel=replace(config.parallel, model_parallel_size=1), zero=replace(
            zero, zero_stage=0, reduce_bucket_size=1, allgather_bucket_size=gathered),
        recompute=replace(config.recompute, checkpoint_activations=False),
        offload=replace(config.offload, offload_optimizer_device="none", offload_param_device="none"),
        train=replace(config.train, batch_size=1, global_batch_size=samples_per_step(requested), train_iters=1))
