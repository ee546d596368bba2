"""What a run is, decided once and frozen, before anything heavy is imported: no torch, no files but the named JSON.

    setting.py      how a field is declared: default, help, flag aliases, JSON keys
    problems.py     errors, collected: one run names all of them; words.py: the names of settings in them
    model.py, data.py, parallel.py, optim.py, schedule.py, precision.py, zero.py, offload.py, recompute.py,
    layer_drop.py, quantize.py, train.py, save.py, log.py, profile.py,
    autotuning.py    one section each
    optimizers.py   the optimizers and their parameters; presets.py
    tree.py         the whole Config, and checks across sections
    idle.py         settings that were given and come to nothing
    flags.py        the command line; help.py, foreign.py: what it says to people and to other programs' flags
    hf_shape.py     the shape of a model in a Hugging Face folder
    ds_file.py      DeepSpeed's JSON: ds_keys.py (table), ds_reader.py (walk), ds_together.py,
                    loose_json.py (grammar), kinds.py (values)
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
