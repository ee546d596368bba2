"""The section `autotuning`: how `python -m megatron.tune` looks for the fastest settings (megatron/tune)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, require, setting

_AUTOTUNING = "autotuning."


@dataclass(frozen=True, kw_only=True)
class AutotuningConfig:
    """The search for the fastest settings of a machine, by `python -m megatron.tune` (docs/tune.md). Training itself
    tunes nothing."""

    autotuning: bool = setting(False, "accepted; python -m megatron.tune with the same flags is what tunes",
                               json=_AUTOTUNING + "enabled")
    autotuning_fast: bool = setting(
        True, "leave sizes of buckets as they are (--no-autotuning-fast: try some)", json=_AUTOTUNING + "fast")
    autotuning_results_dir: str = setting(
        "autotuning_results", "folder of the trials and of what came of them", json=_AUTOTUNING + "results_dir")
    autotuning_exps_dir: str = setting(
        "autotuning_exps", "folder of what each trial wrote", json=_AUTOTUNING + "exps_dir")
    autotuning_overwrite: bool = setting(
        False, "begin anew where there are trials already, instead of going on",
        json=JsonKey(_AUTOTUNING + "overwrite", help="DeepSpeed's default is true"))
    autotuning_metric: Literal["throughput", "latency", "flops"] = setting(
        "throughput", "what the results are told in; the batch of a step is given, so that their order is the same",
        json=_AUTOTUNING + "metric")
    autotuning_start_profile_step: int = setting(3, "the first step of a trial that counts, from 1",
                                                 json=_AUTOTUNING + "start_profile_step")
    autotuning_end_profile_step: int = setting(5, "the last one, after which the trial ends",
                                               json=_AUTOTUNING + "end_profile_step")
    autotuning_tuner_type: Literal["model_based", "gridsearch", "random"] = setting(
        "model_based", "what is tried next: what looks fastest by prediction and trials; the predicted order; any",
        json=JsonKey(_AUTOTUNING + "tuner_type", help="DeepSpeed's default is gridsearch"))
    autotuning_tuner_early_stopping: int = setting(
        12, "end after so many trials that were no faster; 0: do not",
        json=JsonKey(_AUTOTUNING + "tuner_early_stopping", help="DeepSpeed's default is 5"))
    autotuning_tuner_num_trials: int = setting(50, "trials at most", json=_AUTOTUNING + "tuner_num_trials")
    autotuning_num_tuning_micro_batch_sizes: int = setting(
        5, "micro-batches that are tried of each choice of the rest, those of the best predicted time",
        json=JsonKey(_AUTOTUNING + "num_tuning_micro_batch_sizes", help="DeepSpeed's default is 3"))
    autotuning_max_train_batch_size: int | None = setting(
        None, "samples of a step, where --global-batch-size does not say (default: those of the flags)",
        json=_AUTOTUNING + "max_train_batch_size")
    autotuning_mp_size: int | None = setting(
        None, "tensor parallel size (default: all that divide ranks and model are tried)",
        json=JsonKey(_AUTOTUNING + "mp_size", help="DeepSpeed's default is 1"))

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "autotuning_start_profile_step autotuning_tuner_num_trials "
                                     "autotuning_num_tuning_micro_batch_sizes", 1)
        problems.require_range(self, "autotuning_max_train_batch_size autotuning_mp_size", 1)
        problems.require_range(self, "autotuning_tuner_early_stopping", 0)
        problems.raise_if_any()
        require(self.autotuning_end_profile_step >= self.autotuning_start_profile_step,
                f"--autotuning-end-profile-step {self.autotuning_end_profile_step} is before "
                f"--autotuning-start-profile-step {self.autotuning_start_profile_step}")

    def notes(self) -> list[str]:
        return [" note: --autotuning tunes nothing here: python -m megatron.tune with these flags does"] * \
            self.autotuning
