"""Files in the style of those that people publish: what they rely on works, or is refused for the true reason.

Each is small and of our own making; together they cover the reasons for which published files were refused.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron.config.ds_json import build_ds_config, read_ds_json
from megatron.errors import ConfigError

BASE: dict[str, Any] = {"train_batch_size": 8, "gradient_clipping": 1.0}
ADAM = {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}

ACCEPTED: dict[str, dict[str, Any]] = {
    "one cycle": {"optimizer": ADAM, "scheduler": {"type": "OneCycle", "params": {
        "cycle_first_step_size": 1000, "cycle_first_stair_count": 500, "cycle_second_step_size": 1000,
        "cycle_second_stair_count": 500, "decay_step_size": 1000, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3,
        "decay_lr_rate": 0.001, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0}}},
    "range test": {"optimizer": ADAM, "scheduler": {"type": "LRRangeTest", "params": {
        "lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 200, "lr_range_test_step_rate": 5,
        "lr_range_test_staircase": False}}},
    "stage 3 of auto": {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
                        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9,
                                              "stage3_prefetch_bucket_size": "auto"}, "bf16": {"enabled": "auto"}},
    "all switched off": {name: {"enabled": False} for name in (
        "wandb", "comet", "csv_monitor", "tensorboard", "flops_profiler", "comms_logger", "elasticity", "autotuning",
        "progressive_layer_drop", "amp", "hybrid_engine", "compression_training", "curriculum_learning")},
    "offload by its own Adam": {
        "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-4, "adam_w_mode": True, "weight_decay": 0.1}},
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 3, "offload_optimizer": {
            "device": "cpu", "pin_memory": False, "ratio": 1.0, "super_offload": False, "cpuadam_cores_perc": 0.8}}},
    "infinity": {
        "optimizer": ADAM,
        "zero_optimization": {
            "stage": 3, "sub_group_size": 1e9, "overlap_comm": True, "contiguous_gradients": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4,
                                  "fast_init": False, "pipeline_read": True, "pipeline_write": True},
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5,
                              "buffer_size": 1e8, "max_in_cpu": 1e9}},
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
                "overlap_events": True, "use_gds": False}},
    "homes switched off": {"optimizer": ADAM, "zero_optimization": {
        "stage": 1, "cpu_offload": False, "offload_optimizer": {"device": "none"}, "offload_param": None}},
    "1-bit Lamb": {"optimizer": {"type": "OneBitLamb", "params": {
        "lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "freeze_step": 1000, "max_coeff": 0.3,
        "min_coeff": 0.01, "cuda_aware": False, "comm_backend_name": "nccl", "coeff_beta": 0.9, "factor_max": 4.0,
        "factor_min": 0.5, "factor_threshold": 0.1}}, "gradient_clipping": 1.0, "fp16": FP16},
    "Muon": {"optimizer": {"type": "Muon", "params": {
        "lr": 2e-5, "momentum": 0.95, "weight_decay": 0.01, "muon_lr": 2e-5, "adam_lr": 2e-6, "betas": [0.9, 0.999],
        "ns_method": "gram"}}, "bf16": {"enabled": True}, "zero_optimization": {
            "stage": 3, "save_muon_momentum_buffer_in_memory": True}},
    "layer drop with BERT": {
        "train_micro_batch_size_per_gpu": 4, "steps_per_print": 100, "prescale_gradients": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01, "bias_correction": True}},
        "wall_clock_breakdown": False, "fp16": {"enabled": True, "loss_scale": 0},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
    "what changes no result": {
        "optimizer": ADAM, "aio": {"use_gds": True}, "graph_harvesting": True, "seq_parallel_comm_data_type": "bf16",
        "use_data_before_expert_parallelism": True, "checkpoint": {"parallel_write": {"pipeline_stage": True}},
        "zero_optimization": {"stage": 3, "stage3_model_persistence_threshold": 1e6,
                              "pipeline_loading_checkpoint": True, "leaf_module": {"classes": ["Experts"]},
                              "offload_optimizer": {"device": "cpu", "super_offload": True}}},
    "quantisation that is off": {"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": False}, "different_groups": {
            "wq1": {"params": {"start_bits": 1, "target_bits": 1, "quantization_period": 0}, "modules": ["attention"]},
            "wq2": {"params": {"start_bits": 12, "target_bits": 4}, "modules": ["output"]}}}}},
    "quantisation whose bits do not fall": {"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True, "schedule_offset": 0}, "different_groups": {
            "wq1": {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0}, "modules": ["*"]}}}}},
    "MoQ with eigenvalues": {"quantize_training": {
        "enabled": True, "quantize_verbose": True, "quantizer_kernel": True, "quantize_type": "symmetric",
        "quantize_bits": {"start_bits": 12, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 10, "schedule_offset": 0}, "quantize_groups": 8,
        "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
        "eigenvalue": {"enabled": True, "verbose": True, "max_iter": 50, "tol": 1e-2, "stability": 0,
                       "gas_boundary_resolution": 1, "layer_name": "bert.encoder.layer", "layer_num": 12}}},
    "deprecated": {"optimizer": ADAM, "fp32_allreduce": True, "zero_optimization": True, "allgather_size": 5e8},
}

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "other bits for some modules": ({"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True}, "different_groups": {"wq1": {
            "params": {"start_bits": 8, "target_bits": 4}, "modules": ["attention.self"]}}}}},
        ["weight_quantization.different_groups is", 'and with modules ["*"], as all weights have the same bits']),
    "1-bit Lamb without its type": ({"optimizer": {"type": "Lamb", "params": {"coeff_beta": 0.9, "factor_max": 4,
                                                                              "freeze_step": 5}}},
                                    ["params.coeff_beta", "params.factor_max", "params.freeze_step", "3 errors"]),
    "more than the state": ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
                            ["offload_optimizer.ratio is 1.5: expected a number >= 0 and <= 1"]),
    "a part of the state, and late": ({"zero_optimization": {"stage": 3, "offload_optimizer": {
        "device": "cpu", "ratio": 0.3, "delayed_param_update": True}}},
        ["delayed_param_update", "leave one of them out"]),
    "autotuning that ends before it begins": (
        {"autotuning": {"enabled": True, "start_profile_step": 3, "end_profile_step": 2}},
        ["autotuning.end_profile_step 2 is before autotuning.start_profile_step 3"]),
    "layer drop beyond its range": ({"progressive_layer_drop": {"enabled": True, "theta": 1.5, "gamma": -1}}, [
        "progressive_layer_drop.theta is 1.5: expected a number > 0 and <= 1",
        "progressive_layer_drop.gamma is -1", "2 errors"]),
    "quantised to more bits": ({"quantize_training": {"enabled": True, "quantize_bits": {
        "start_bits": 8, "target_bits": 12}}},
        ["quantize_bits.target_bits 12 is above quantize_training.quantize_bits.start_bits 8"]),
    "quantised by two sections that differ": (
        {"quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 12, "target_bits": 4},
                               "quantize_schedule": {"quantize_period": 10}},
         "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {
             "wq.1": {"params": {"start_bits": 16, "target_bits": 8, "quantization_period": 400}}}}}},
        [f"quantize_training.{one} and compression_training.weight_quantization.different_groups.wq.1.params.{other} "
         "disagree on --quantize-" for one, other in (
             ("quantize_bits.start_bits 12", "start_bits 16"), ("quantize_bits.target_bits 4", "target_bits 8"),
             ("quantize_schedule.quantize_period 10", "quantization_period 400"))]),
    "a group whose bits rise": ({"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True}, "different_groups": {"wq1": {"params": {
            "start_bits": 4, "target_bits": 8}}}}}},
        ["different_groups.wq1.params.target_bits 8 is above compression_training.weight_quantization."
         "different_groups.wq1.params.start_bits 4"]),
    "a chain": ({"fp16": {"enabled": True, "auto_cast": "yes"}, "zero_optimization": {"stage": "2", "overlap": True},
                 "amp": {"enabled": True}, "gradient_accumulation": 4, "steps_per_print": -1}, ["6 errors"]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_published_style_that_can_be_honoured_is_accepted(name: str) -> None:
    build_ds_config({**BASE, **ACCEPTED[name]})


def test_what_a_group_of_weights_does_not_say_is_left_to_other_keys_and_to_flags() -> None:
    tree = {**BASE, "quantize_training": {"enabled": True, "quantize_schedule": {"quantize_period": 400}},
            "compression_training": {"weight_quantization": {
                "shared_parameters": {"enabled": True}, "different_groups": {"wq1": {"params": {"target_bits": 4}}}}}}
    quantize = build_ds_config(tree, flags={"quantize_start_bits": 12}).quantize
    assert (quantize.quantize_start_bits, quantize.quantize_target_bits, quantize.quantize_period) == (12, 4, 400)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_style_that_cannot_is_refused_for_every_reason_at_once(name: str) -> None:
    tree, reasons = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        build_ds_config({**BASE, **tree})
    for reason in reasons:
        assert reason in str(caught.value)


def test_reasons_hold_for_any_model() -> None:
    from megatron.config.ds_keys import DS_KEYS

    for path, row in DS_KEYS.items():
        reason = getattr(row, "reason", "")
        assert not re.search(r"token (numbers|table)|transformer block|stream of samples", reason), path


def test_the_devices_of_a_file_are_ignored_with_a_note() -> None:
    assert "set CUDA_VISIBLE_DEVICES in the environment" in read_ds_json({"cuda_visible_devices": [0]}).notices[0]
