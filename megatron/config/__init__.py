"""The configuration of a run: frozen dataclasses, decided before anything slow is imported. No torch.

Begin with schema.py (how a field is declared), then tree.py (the whole Config). Sections are in *_config.py, flags in
cli.py, DeepSpeed's JSON in ds_json.py.
"""

from megatron.config.tree import (PRESETS, SECTIONS, AutotuningConfig, Config, DataConfig, LayerDropConfig, LogConfig,
                                  ModelConfig, OffloadConfig, OptimConfig, ParallelConfig, PrecisionConfig,
                                  ProfileConfig, QuantizeConfig, RecomputeConfig, SaveConfig, ScheduleConfig,
                                  TrainConfig, ZeroConfig, build_config, data_parallel_size, flag_name, require)

__all__ = [
    "PRESETS", "SECTIONS", "AutotuningConfig", "Config", "DataConfig", "LayerDropConfig", "LogConfig", "ModelConfig",
    "OffloadConfig", "OptimConfig", "ParallelConfig", "PrecisionConfig", "ProfileConfig", "QuantizeConfig",
    "RecomputeConfig", "SaveConfig", "ScheduleConfig", "TrainConfig", "ZeroConfig", "build_config",
    "data_parallel_size", "flag_name", "require",
]
