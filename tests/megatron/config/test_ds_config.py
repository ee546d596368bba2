"""Every key of a DeepSpeed-style file has its effect, or says why it has none; nothing is passed over in silence."""

from __future__ import annotations

import base64
import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.config.tree import Config, OptimConfig
from megatron.config.cli import parse_args
from megatron.config.ds_json import build_ds_config
from megatron.config.ds_keys import DS_KEYS, DS_OBJECTS, FixedValue, IgnoredKey, RenamedKey, UnsupportedSection
from megatron.config.schema import JsonKey
from megatron.errors import ConfigError
from megatron.zero.api.torch_interfaces import build_lr_schedule

ROOT = Path(__file__).resolve().parents[3]


def nested(path: str, value: Any) -> dict[str, Any]:
    head, dot, tail = path.partition(".")
    return {head: nested(tail, value) if dot else value}


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def flat(config: Config) -> dict[str, Any]:
    return {name: value for section in config.as_dict().values() for name, value in section.items()}


def changes(config: Config) -> dict[str, Any]:
    """The fields that are not at their default."""
    plain = flat(Config())
    return {name: value for name, value in flat(config).items() if value != plain[name]}


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_ds_config(*args, **kwargs)
    return str(caught.value)


WARMUP = {"scheduler": {"type": "WarmupDecayLR",
                        "params": {"warmup_type": "linear", "warmup_num_steps": 10, "total_num_steps": 100}}}
COSINE = merged(WARMUP, {"scheduler": {"type": "WarmupCosineLR"}})
CYCLE = {"scheduler": {"type": "OneCycle", "params": {
    "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 100}}}
RANGE = {"scheduler": {"type": "LRRangeTest"}}
TRIANGLE = {"lr_decay_style": "one-cycle", "lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 100, "lr_decay_iters": 200,
            "cycle_momentum": True}
GROWTH = {"lr_decay_style": "range-test", "lr": 1e-3, "min_lr": 1e-3, "lr_decay_iters": 2000, "cycle_decay": 1.0}
DECAY = {"lr_decay_style": "linear", "lr_warmup_iters": 10, "lr_decay_iters": 100}
ADAM = {"optimizer": {"type": "Adam"}}
FP16 = {"fp16": {"enabled": True}}


def typed(name: str) -> dict[str, Any]:
    return {"optimizer": {"type": name}}


# parameter -> (a type that takes it, which optimizer that is, a value)
OWN = {"dampening": ("SGD", "sgd", 0.5), "nesterov": ("SGD", "sgd", True), "amsgrad": ("FusedAdam", "adam", True),
       "max_coeff": ("FusedLamb", "lamb", 0.3), "min_coeff": ("Lamb", "lamb", 0.1),
       "bias_correction": ("Adam", "adam", False), "eps_inside_sqrt": ("Lamb", "lamb", True),
       "lr_decay": ("DeepSpeedCPUAdagrad", "adagrad", 0.1), "initial_accumulator_value": ("Adagrad", "adagrad", 0.1),
       "alpha": ("RMSprop", "rmsprop", 0.9), "centered": ("RMSprop", "rmsprop", True),
       "momentum_decay": ("NAdam", "nadam", 0.01), "decoupled_weight_decay": ("RAdam", "radam", True),
       "rho": ("Adadelta", "adadelta", 0.8), "lambd": ("ASGD", "asgd", 0.1), "t0": ("ASGD", "asgd", 10.0),
       "etas": ("Rprop", "rprop", [0.4, 1.1]), "step_sizes": ("Rprop", "rprop", [1e-5, 1.0]),
       "coeff_beta": ("OneBitLamb", "onebit_lamb", 0.8), "factor_max": ("OneBitLamb", "onebit_lamb", 3.0),
       "factor_min": ("OneBitLamb", "onebit_lamb", 0.4), "factor_threshold": ("OneBitLamb", "onebit_lamb", 0.2),
       "ns_steps": ("Muon", "muon", 3), "adjust_lr_fn": ("Muon", "muon", "match_rms_adamw"),
       "split_qkv": ("Muon", "muon", False), "muon_lr": ("Muon", "muon", 0.02), "adam_lr": ("muon", "muon", 3e-4)}


def own_case(name: str) -> tuple[Any, Any, dict[str, Any]]:
    kind, optimizer, value = OWN[name]
    found = {"optimizer": optimizer, "optimizer_params": [f"{name}={json.dumps(value)}"]}
    found |= {"sgd_momentum": 0.0} if optimizer == "sgd" else {}
    return value, {key: value for key, value in found.items() if value != "adam"}, typed(kind)


ONE_BIT, FREEZE_STEP = typed("OneBitAdam"), "optimizer.params.freeze_step"
BOARD = {"tensorboard": {"enabled": True, "output_path": "out", "job_name": "job"}}
TABLES = {"csv_monitor": {"enabled": True, "output_path": "out", "job_name": "job"}}
WANDB = {"wandb": {"enabled": True, "project": "gpt"}}
ZERO, PARAM, HOME, KEEP = ("zero_optimization.", "zero_optimization.offload_param.",
                           "zero_optimization.offload_optimizer.", "activation_checkpointing.")
DROP, TUNING, BITS = "progressive_layer_drop.", "autotuning.", "quantize_training."
GROUPS = "compression_training.weight_quantization.different_groups"
QUANTISED = {"quantize_training": {"enabled": True}}


def groups_of(params: dict[str, int], **more: Any) -> dict[str, Any]:
    """Weights that are rounded, with one group."""
    return {"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True}, "different_groups": {"wq1": {"params": params, **more}}}}}


STAGE_2, STAGE_3 = ({"zero_optimization": {"stage": stage}} for stage in (2, 3))


def rows(*kinds: type) -> list[str]:
    return [path for path, row in DS_KEYS.items() if isinstance(row, kinds)]


# path -> (value in, fields out, what must be beside it)
SPECIAL: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "train_batch_size": (32, {"global_batch_size": 32, "batch_size": 32}, {}),
    "train_micro_batch_size_per_gpu": (2, {"batch_size": 2, "global_batch_size": 2}, {}),
    "gradient_accumulation_steps": (3, {"global_batch_size": 12}, {}),
    "fp32_allreduce": (True, {"communication_data_type": "fp32"}, {}),
    "zero_optimization.mics_shard_size": (4, {"zero_shard_group_size": 4}, {}),
    "allgather_size": (5e5, {"allgather_bucket_size": 500_000}, {}),
    "fp16.loss_scale": (128, {"fp16": True, "loss_scale": 128}, FP16),
    "fp16.initial_scale_power": (10, {"fp16": True, "initial_loss_scale": 1024.0}, FP16),
    "fp16.loss_scale_window": (50, {"fp16": True, "loss_scale_window": 50}, FP16),
    "fp16.hysteresis": (3, {"fp16": True, "hysteresis": 3}, FP16),
    "fp16.min_loss_scale": (4, {"fp16": True, "min_scale": 4}, FP16),
    "bfloat16.enabled": (True, {"bf16": True}, {}),
    "optimizer.type": ("deepspeedcpulion", {"optimizer": "lion"}, {}),
    "optimizer.params.adam_w_mode": (False, {"adam_w_mode": False}, ADAM),
    "fp16.auto_cast": (True, {"fp16": True, "auto_cast": True}, FP16),
    "optimizer.params.momentum": (0.5, {"optimizer": "sgd", "sgd_momentum": 0.5}, typed("SGD")),
    **{f"optimizer.params.{name}": own_case(name) for name in OWN},
    "optimizer.params.freeze_step": (400, {"optimizer": "onebit_adam", "onebit_freeze_step": "400"}, ONE_BIT),
    "optimizer.params.lr": (1e-3, {"lr": 1e-3}, ADAM),
    "optimizer.params.betas": ([0.8, 0.95], {"adam_beta1": 0.8, "adam_beta2": 0.95}, ADAM),
    "optimizer.params.eps": (1e-6, {"adam_eps": 1e-6}, ADAM),
    "optimizer.params.weight_decay": (0.1, {"weight_decay": 0.1}, ADAM),
    "optimizer.params.max_grad_norm": (0.5, {"clip_grad": 0.5}, ADAM),
    "scheduler.type": ("WarmupDecayLR", DECAY, WARMUP),
    "scheduler.params.warmup_max_lr": (1e-3, {"lr": 1e-3, **DECAY}, WARMUP),
    "scheduler.params.warmup_num_steps": (20, {**DECAY, "lr_warmup_iters": 20}, WARMUP),
    "scheduler.params.warmup_type": ("log", {**DECAY, "warmup_type": "log"}, WARMUP),
    "scheduler.params.total_num_steps": (50, {**DECAY, "lr_decay_iters": 50}, WARMUP),
    "scheduler.params.cycle_min_lr": (1e-5, {**TRIANGLE, "min_lr": 1e-5}, CYCLE),
    "scheduler.params.cycle_max_lr": (1e-2, {**TRIANGLE, "lr": 1e-2}, CYCLE),
    "scheduler.params.cycle_first_step_size": (
        25, {**TRIANGLE, "lr_warmup_iters": 25, "lr_decay_iters": 50}, CYCLE),
    "scheduler.params.cycle_second_step_size": (300, {**TRIANGLE, "lr_decay_iters": 400}, CYCLE),
    "scheduler.params.decay_step_size": (
        50, {**TRIANGLE, "cycle_decay": 0.01}, merged(CYCLE, nested("scheduler.params.decay_lr_rate", 0.5))),
    "scheduler.params.decay_lr_rate": (
        1, {**TRIANGLE, "cycle_decay": 0.1}, merged(CYCLE, nested("scheduler.params.decay_step_size", 10))),
    "scheduler.params.decay_mom_rate": (
        1, {**TRIANGLE, "cycle_mom_growth": 0.1}, merged(CYCLE, nested("scheduler.params.decay_step_size", 10))),
    "scheduler.params.cycle_momentum": (
        False, {name: value for name, value in TRIANGLE.items() if name != "cycle_momentum"}, CYCLE),
    "scheduler.params.cycle_min_mom": (0.7, {**TRIANGLE, "cycle_min_mom": 0.7}, CYCLE),
    "scheduler.params.cycle_max_mom": (0.99, {**TRIANGLE, "cycle_max_mom": 0.99}, CYCLE),
    "scheduler.params.lr_range_test_min_lr": (1e-5, {**GROWTH, "lr": 1e-5, "min_lr": 1e-5}, RANGE),
    "scheduler.params.lr_range_test_step_size": (10, {**GROWTH, "lr_decay_iters": 10}, RANGE),
    "scheduler.params.lr_range_test_step_rate": (5, {**GROWTH, "cycle_decay": 5.0}, RANGE),
    "scheduler.params.lr_range_test_staircase": (True, {**GROWTH, "lr_decay_style": "range-test-stairs"}, RANGE),
    "scheduler.params.cos_min_ratio": (
        0.1, {"lr_decay_iters": 100, "lr_warmup_iters": 10, "min_lr": pytest.approx(1.5e-5)}, COSINE),
    "zero_optimization": (True, {"zero_stage": 1}, {}),
    ZERO + "stage3_gather_fp16_weights_on_model_save": (True, {"stage3_gather_16bit_weights_on_model_save": True}, {}),
    ZERO + "gather_16bit_weights_on_model_save": (True, {"stage3_gather_16bit_weights_on_model_save": True}, {}),
    **{ZERO + name: (12e5, {f"stage3_{name}": 1_200_000}, {}) for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")},
    **{ZERO + name: (value, {}, {}) for name, value in (
        ("use_all_reduce_for_fetch_params", False), ("allgather_sequential", False),
        ("model_persistence_threshold", 1e6), ("module_granularity_threshold", 0))},
    ZERO + "cpu_offload": (True, {"zero_stage": 2, "offload_optimizer_device": "cpu"}, STAGE_2),
    **{ZERO + name: (True, {"zero_stage": 3, "offload_param_device": "cpu"}, STAGE_3) for name in (
        "cpu_offload_param", "cpu_offload_params")},
    ZERO + "cpu_offload_use_pin_memory": (
        False, {"offload_optimizer_pin_memory": False, "offload_param_pin_memory": False}, {}),
    HOME + "device": ("cpu", {"zero_stage": 2, "offload_optimizer_device": "cpu"}, STAGE_2),
    PARAM + "device": (
        "nvme", {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"},
        merged(STAGE_3, nested(PARAM + "nvme_path", "/nvme"))),
    "aio.thread_count": (2, {"aio_intra_op_parallelism": 2}, {}),
    KEEP + "contiguous_memory_optimization": (
        True, {"contiguous_memory_optimization": True, "partition_activations": True},
        nested(KEEP + "partition_activations", True)),
    DROP + "enabled": (True, {"progressive_layer_drop": True, "pld_theta": 1.0}, {}),
    DROP + "theta": (0.6, {"pld_theta": 0.6}, {}),
    TUNING + "start_profile_step": (2, {"autotuning_start_profile_step": 2}, {}),
    BITS + "quantize_bits.start_bits": (12, {"quantize_start_bits": 12}, {}),
    BITS + "quantize_bits.target_bits": (4, {"quantize_target_bits": 4}, {}),
    BITS + "quantize_schedule.quantize_period": (400, {"quantize_period": 400}, {}),
    GROUPS: ({"wq1": {"params": {"start_bits": 12, "target_bits": 4, "quantization_period": 400}, "modules": ["*"]}},
             {"quantize_start_bits": 12, "quantize_target_bits": 4, "quantize_period": 400}, {}),
    **{f"{place}eigenvalue.enabled": (True, {"quantize_training": True, "quantize_eigenvalue": True}, QUANTISED)
       for place in ("", BITS)},
    "tensorboard.enabled": (True, {"tensorboard_dir": "out/job"}, BOARD),
    "tensorboard.output_path": ("", {"tensorboard_dir": "runs/job"}, BOARD),
    "tensorboard.job_name": ("mine", {"tensorboard_dir": "out/mine"}, BOARD),
    "csv_monitor.enabled": (True, {"csv_dir": "out/job"}, TABLES),
    "csv_monitor.output_path": ("", {"csv_dir": "runs/job"}, TABLES),
    "csv_monitor.job_name": ("mine", {"csv_dir": "out/mine"}, TABLES),
    "wandb.enabled": (True, {"wandb_project": "deepspeed"}, {}),
    "wandb.project": ("mine", {"wandb_project": "mine"}, WANDB),
    "wandb.group": ("sweep", {"wandb_project": "gpt", "wandb_group": "sweep"}, WANDB),
    "wandb.team": ("us", {"wandb_project": "gpt", "wandb_team": "us"}, WANDB),
}

# field -> its key, where that has another name
OTHER_NAMES = {"log_interval": "steps_per_print", "clip_grad": "gradient_clipping", "profile_backward": "profile",
               "quantize_offset": "schedule_offset", "quantize_type": "q_type quantization_type",
               "flops_profiler_step": "profile_step"}


IDENTITY = JsonKey.__dataclass_fields__["convert"].default


def plain_cases() -> Iterator[tuple[str, tuple[Any, dict[str, Any], dict[str, Any]]]]:
    """Of each other key that sets a field alone: a value that is not the default."""
    for path in rows(JsonKey):
        row, name = DS_KEYS[path], path.rpartition(".")[2]
        if path not in SPECIAL and row.is_independent and row.convert is IDENTITY:
            assert name == "enabled" or row.field.endswith(name) or name in OTHER_NAMES.get(row.field, ""), path
            default, kind = flat(Config())[row.field], row.json_type
            if kind.choices:
                value: Any = next(word for word in kind.choices if word != default)
            elif isinstance(default, bool):
                value = not default
            elif isinstance(default, (int, float)):
                value = default / 2 if isinstance(default, float) and default else 2 * abs(default) or 3
            else:
                value = "mine" if "text" in kind.expected else 7
            yield path, (value, {row.field: value}, {})


CASES = {**dict(plain_cases()), **SPECIAL}


def test_every_key_with_an_effect_sets_its_fields_and_no_other():
    assert set(CASES) == set(rows(JsonKey, RenamedKey))
    for path, (value, expected, beside) in CASES.items():
        config, row = build_ds_config(merged(beside, nested(path, value))), DS_KEYS[path]
        assert changes(config) == expected, path
        is_deprecated = isinstance(row, RenamedKey) and row.deprecated
        assert any(f"{path} is deprecated" in note for note in config.notes) == is_deprecated, path


def test_a_key_that_is_fixed_here_is_accepted_with_its_value_and_refused_with_its_reason():
    for path in rows(FixedValue):
        row, beside = DS_KEYS[path], WARMUP if path.startswith("scheduler") else {}
        for value in row.values:
            assert changes(build_ds_config(merged(beside, nested(path, value)))) == changes(build_ds_config(beside))
        twins = [bool(value) for value in row.values if isinstance(value, (int, float)) and value in (0, 1)
                 and not isinstance(value, bool)]  # true is no number; 1 is true
        for wrong in ([], "no", 17, not row.values[0], *twins):
            told = refusal(merged(beside, nested(path, wrong)))
            assert path in told and row.reason in told


def test_a_key_without_effect_says_so_unless_it_is_the_default():
    others = {0: 5, 1: 5, "nccl": "mpi", "Fail": "Warn", 0.8: 0.5, None: "0,1", "": "out", "DeepSpeedJobName": "job",
              2.0**63: 1e6, "gram": "standard"}
    for path in rows(IgnoredKey):
        row = DS_KEYS[path]
        assert build_ds_config(nested(path, row.default)).notes == ()
        config = build_ds_config(nested(path, not row.default if isinstance(row.default, bool) else
                                        others[row.default]))
        assert changes(config) == {} and len(config.notes) == 1
        assert path in config.notes[0] and row.reason in config.notes[0]


def test_a_section_that_does_not_exist_here_is_accepted_only_switched_off():
    for path in rows(UnsupportedSection):
        for off in ({"enabled": False, "other": [1, {"x": 2}]}, {}, None, False, *DS_KEYS[path].off):
            assert build_ds_config(nested(path, off)) == Config()
        for on in ({"enabled": True}, {"other": 1}, True, "auto", [], 0):
            told = refusal(nested(path, on))
            assert path in told and DS_KEYS[path].reason in told


WRONG = {"true or false": ["true ", 2, -1, 0.5, None, [], "false"],
         "a number": ["1", True, None, math.nan, math.inf, [1], 10**400],
         "a number of at least 0": [-1, "0", math.nan, True],
         "a number from 0 to 1": [-0.1, 1.1, "1"],
         "an integer": [1.5, "5e8", True, math.inf, math.nan, [], 10.01],
         "an integer of at least 1": [0, -3, 1.5, True, "4", math.inf],
         "an integer of at least 0": [-1, 0.5, False, "1"],
         "an integer from 0 to 64": [-1, 65, 1e9, "10", True],
         "a list of two numbers": [0.9, [0.9], [0.9, "x"], [1, 2, 3], {"0": 1}],
         "a text that is not empty": [1, True, "", []], "a text": [1, True, []],
         "an object {...}": ["2", 2, []]}


def test_a_value_of_the_wrong_type_is_told_with_its_path_and_what_is_expected():
    """Every value for one key of each type, and one for each other key."""
    kinds = set[str]()
    for path in rows(JsonKey, RenamedKey, IgnoredKey):
        expected, nullable = DS_KEYS[path].json_type.expected, getattr(DS_KEYS[path], "nullable", False)
        wrong = [] if expected == "anything" else WRONG.get(expected, [1, True, [], "other", math.nan])
        for value in wrong[:1] if expected in kinds else wrong:
            if value is not None or not nullable:
                told = refusal(nested(path, value))
                assert f"{path} is " in told and expected in told, (value, told)
        kinds.add(expected)
    for path in DS_OBJECTS - set(DS_KEYS):
        for wrong in (3, [1]):
            assert "expected an object" in refusal(nested(path, wrong))
        assert build_ds_config(nested(path, None)) == Config()


def test_auto_is_the_default_and_is_answered():
    # A file that says nothing of momentum means 0; a step of 1-bit Adam is found while the run goes on.
    for path in set(rows(JsonKey, FixedValue, IgnoredKey)) - {"optimizer.params.momentum", FREEZE_STEP}:
        beside = typed(OWN[path.rpartition(".")[2]][0]) if path.rpartition(".")[2] in OWN else {}
        beside = WARMUP if path.startswith("scheduler") else beside
        given = {"scheduler": {"params": {"warmup_min_lr": "auto"}}} if beside is WARMUP else nested(path, "auto")
        config = build_ds_config(merged(beside, given))
        assert any('"auto"' in note for note in config.notes), path
        assert changes(config) == changes(build_ds_config(beside)), path
    found = build_ds_config(merged(ONE_BIT, nested(FREEZE_STEP, "auto")))
    assert changes(found)["onebit_freeze_step"] == "auto"
    assert f' config: {FREEZE_STEP} "auto": found while the run goes on' in found.notes


def test_auto_says_what_was_chosen():
    tree = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
            "zero_optimization": {"reduce_bucket_size": "auto"}}
    config = build_ds_config(tree, flags={"batch_size": 2, "global_batch_size": 12, "clip_grad": 0.5}, world_size=2)
    assert [note.partition(": ")[2] for note in config.notes] == [
        'train_batch_size "auto": 12', 'gradient_accumulation_steps "auto": 3',
        'gradient_clipping "auto": --clip-grad 0.5',
        'zero_optimization.reduce_bucket_size "auto": --reduce-bucket-size 500000000']


# ---- unknown, double and misplaced keys --------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_name():
    for path, told in (
            ("train_batchsize", "did you mean train_batch_size?"), ("stage", "did you mean zero_optimization.stage?"),
            ("zero_optimization.stag", "did you mean zero_optimization.stage?"),
            ("zero_optimization.comm_overlap", "did you mean zero_optimization.overlap_comm?"),
            ("optimizer.lr", "did you mean optimizer.params.lr?"), ("xyzzy", "docs/ds_config.md lists every key"),
            ("optimizer.params.learning_rate", "did you mean optimizer.params.lr?"),
            ("load_universal_checkpoint", "did you mean checkpoint.load_universal?")):
        message = refusal(nested(path, 1))
        assert f"unknown key {path.partition('.')[0]}" in message and told in message
    assert "did you mean" not in refusal({"learning_rate": 1})


COMBINATIONS: list[tuple[dict[Any, Any], str]] = [
    (merged(typed("OneBitLamb"), {"zero_optimization": {"stage": 3}}), "from stage 2 on they are summed and split"),
    (merged(typed("OneBitLamb"), nested("zero_optimization", {"stage": 1, "offload_optimizer": {"device": "cpu"}})),
     "what a rank says is made of the momentum, on the device"),
    (merged(typed("ZeroOneAdam"), nested("optimizer.params.var_freeze_step", 5)),
     'optimizer.type "ZeroOneAdam" is not supported, 0/1 Adam was retired; use OneBitAdam (onebit_adam)'),
    (merged(typed("Muon"), nested("optimizer.params.adjust_lr_fn", "spectral")), '"original" or "match_rms_adamw"'),
    (merged(typed("Muon"), {"optimizer": {"params": {"lr": 0, "muon_lr": 0.02}}}),
     "lr is 0, and muon_lr and adam_lr are rates beside it"),
    (typed("LBFGS"), "evaluates the loss several times"), (typed("Adm"), 'did you mean "Adam"?'),
    (merged(typed("FusedLion"), nested("optimizer.params.eps", 1e-6)),
     "optimizer.params.eps is not a parameter of FusedLion, which takes lr, weight_decay, betas; leave it out"),
    (merged(typed("SGD"), nested("optimizer.params.betas", "auto")), "betas is not a parameter of SGD"),
    (merged(ADAM, nested("optimizer.params.bias_correction", False), nested("optimizer.params.amsgrad", True)),
     "amsgrad=true needs bias_correction=true"),
    (nested("optimizer.params.rho", 0.9), "optimizer.params.rho is not a parameter of adam"),
    ({"scheduler": {"params": {"cycle_min_lr": 1}, "type": "OneCycle"}}, "OneCycle needs scheduler.params.cycle_max"),
    (merged(CYCLE, nested("scheduler.params.cycle_min_lr", 1)), "cycle_min_lr 1 is above scheduler.params.cycle_max"),
    ({"scheduler": {"params": {"warmup_num_steps": 1}}}, "scheduler.type is missing"),
    (merged(COSINE, nested("scheduler.params.warmup_max_lr", 1e-3)), "is not a parameter of WarmupCosineLR"),
    (merged(WARMUP, nested("scheduler.params.total_num_steps", None)), "needs scheduler.params.total_num_steps"),
    (merged(WARMUP, nested("scheduler.params.warmup_num_steps", 101)), "warmup_num_steps 101 is above"),
    (merged(WARMUP, nested("scheduler.params.warmup_max_lr", 1), nested("optimizer.params.lr", 2)), "disagree on --lr"),
    ({"communication_data_type": "fp8"}, "gradients are sent in 16 or 32 bits"),
    ({"prescale_gradients": True, "gradient_predivide_factor": 4}, "give one of them"),
    (groups_of({"start_bits": 8, "target_bits": 4}, modules=["attention.self"]),
     'and with modules ["*"], as all weights have the same bits'),
    (groups_of({"start_bits": 4, "target_bits": 8}), "different_groups.wq1.params.target_bits 8 is above compression_"
     "training.weight_quantization.different_groups.wq1.params.start_bits 4"),
    *((merged(groups_of({"start_bits": 16, "target_bits": 8, "quantization_period": 400}), QUANTISED,
              nested(BITS + one, value)), f"{BITS}{one} {value} and {GROUPS}.wq1.params.{other} disagree on --quantiz")
      for one, value, other in (("quantize_bits.start_bits", 12, "start_bits 16"),
                                ("quantize_schedule.quantize_period", 10, "quantization_period 400"))),
    (nested(ZERO + "offload_optimizer", {"device": "cpu", "ratio": 1.5}),
     "offload_optimizer.ratio is 1.5: expected a number >= 0 and <= 1"),
    (merged(STAGE_3, nested(HOME[:-1], {"device": "cpu", "ratio": 0.3, "delayed_param_update": True})),
     "offload_optimizer.delayed_param_update with zero_optimization.offload_optimizer.ratio 0.3"),
    ({"autotuning": {"enabled": True, "start_profile_step": 3, "end_profile_step": 2}},
     "autotuning.end_profile_step 2 is before autotuning.start_profile_step 3"),

    ({"activation_checkpointing": {"contiguous_memory_optimization": True}},
     "contiguous_memory_optimization needs activation_checkpointing.partition_activations"),
    ({"fp16": {"enabled": True, "min_loss_scale": 1e6}}, "fp16.min_loss_scale 1e+06 is above fp16.initial_scale_power"),
    ({1: 2}, "the key 1 is not a text"),
    *((merged(STAGE_3, nested(section + "device", "nvme")), f"{section}device nvme needs {section}nvme_path")
      for section in (HOME, PARAM)),
]


def test_a_combination_that_cannot_be_honoured_says_why():
    for tree, told in COMBINATIONS:
        assert told in refusal(tree)


def test_a_type_without_its_parameters_is_deepspeeds_optimizer():
    assert build_ds_config(typed("SGD")).optim.sgd_momentum == 0 and OptimConfig(optimizer="sgd").sgd_momentum == 0.9
    assert build_ds_config(typed("SGD"), flags={"sgd_momentum": 0.8}).optim.sgd_momentum == 0.8
    assert build_ds_config(merged(typed("SGD"), nested("optimizer.params.momentum", "auto"))).optim.sgd_momentum == 0.9
    assert build_ds_config(typed("Lion")).optim.hyper_parameters()["betas"] == (0.9, 0.99)
    corrected = build_ds_config(merged(ADAM, nested("optimizer.params.bias_correction", True)))
    assert corrected.optim.hyper_parameters() == OptimConfig().hyper_parameters()
    eps = build_ds_config(merged(typed("Adagrad"), nested("optimizer.params.eps", 1))).optim
    assert eps.hyper_parameters()["eps"] == 1.0 and eps.adam_eps == 1e-8


PAIRS = [(old, new) for old in rows(RenamedKey) for new in DS_KEYS[old].new_paths
         if old != "zero_optimization" and isinstance(DS_KEYS[new], JsonKey)]


def test_a_deprecated_key_beside_its_new_name_must_say_the_same():
    for old, new in PAIRS:
        value, _, beside = CASES[old]
        same = DS_KEYS[old].convert(value)
        other = {True: False, 0.5: 0.25, 2: 3, 500_000: 1, "cpu": "none"}.get(same)
        for first, second in ((nested(old, value), nested(new, same)), (nested(new, same), nested(old, value))):
            config = build_ds_config(merged(beside, first, second))
            alone = changes(build_ds_config(merged(beside, nested(new, same))))
            assert alone.items() <= changes(config).items(), (old, new)
            is_told = any(f"{old} is deprecated" in note for note in config.notes)
            assert is_told == DS_KEYS[old].deprecated
        if other is not None:
            for first, second in ((nested(old, value), nested(new, other)), (nested(new, other), nested(old, value))):
                told = refusal(merged(first, second))
                assert old in told and new in told and "both are given with different values" in told


def test_a_section_in_the_wrong_place_is_sent_to_the_right_one():
    for name in {path.rpartition(".")[2] for path in DS_OBJECTS}:
        homes = [path.rpartition(".")[0] for path in sorted(DS_OBJECTS) if path.rpartition(".")[2] == name]
        for wrong in {"", "zero_optimization.", "fp16.", "aio."} - {f"{home}." if home else "" for home in homes}:
            told = refusal(nested(f"{wrong}{name}", {"enabled": True}))
            assert f"unknown key {wrong}{name}; move it " in told
            assert all((f"into {home}" if home else "to the top level") in told for home in homes)


def test_what_is_split_over_ranks_can_be_offloaded_and_nothing_else():
    for (section, kind, stages), place, stage in itertools.product(
            ((HOME, "optimizer", (1, 2, 3)), (PARAM, "param", (3,))), ("cpu", "nvme"), range(4)):
        tree = merged(nested(section + "device", place), nested(section + "nvme_path", "/x"),
                      nested(ZERO + "stage", stage))
        if stage in stages:
            config = build_ds_config(tree)
            assert flat(config)[f"offload_{kind}_device"] == place and config.zero.zero_stage == stage
            continue
        needs = f"zero_optimization.stage {'3' if stages == (3,) else '1, 2 or 3'}, not {stage}"
        assert f"{section}device {place} needs {needs}" in refusal(tree), "in the words of the file"
        old = f"{ZERO}cpu_offload{'_params' * (kind == 'param')}"
        assert f"{old} cpu needs {needs}" in refusal(merged(nested(old, True), nested(ZERO + "stage", stage)))


def test_every_name_of_adam_is_adamw_unless_the_file_says_otherwise():
    for name in ("DeepSpeedCPUAdam", "deepspeedcpuadam", "DeepSpeed_Adam", "FusedAdam", "Adam"):
        assert build_ds_config(typed(name)).optim == build_ds_config(ADAM).optim
        assert build_ds_config(typed(name)).optim.adam_w_mode
        coupled = merged(typed(name), nested("optimizer.params.adam_w_mode", False))
        assert not build_ds_config(coupled).optim.adam_w_mode


# ---- batch sizes -------------------------------------------------------------------------------------------------


def test_the_batch_triple_is_solved_exactly_where_a_solution_exists():
    sizes = (None, 1, 2, 4, 12)
    for total, micro, accumulation, dp in itertools.product(sizes, sizes, sizes, (1, 2, 3)):
        given = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro,
                 "gradient_accumulation_steps": accumulation}
        tree = {name: value for name, value in given.items() if value is not None}
        micros = [micro] if micro else range(1, 13) if total else [Config().train.batch_size]
        steps = [accumulation] if accumulation else range(1, 13) if total and micro else [1]
        fits = [(m * a * dp, m) for m in micros for a in steps if total in (None, m * a * dp)]
        if fits:
            config = build_ds_config(tree, world_size=dp)
            assert [(config.global_batch_size(dp), config.train.batch_size)] == fits
        else:
            refusal(tree, world_size=dp)


UNFIT_SIZES: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, {}, 2,
     "train_batch_size 32 != micro_batch 4 x accumulation 2 x data_parallel 2 = 16"),
    ({"train_batch_size": 16}, {"batch_size": 8, "model_parallel_size": 4}, 16,
     "(train_batch_size of config) is not divisible by micro_batch 8 (--batch-size) x data_parallel 4"),
    ({"train_batch_size": 16, "gradient_accumulation_steps": 1}, {"batch_size": 8, "model_parallel_size": 4}, 16,
     "train_batch_size 16 != micro_batch 8 x accumulation 1 x data_parallel 4 = 32"),
    ({"train_micro_batch_size_per_gpu": 4}, {"batch_size": 8}, 1,
     "--batch-size is 8, but train_micro_batch_size_per_gpu of config is 4"),
    ({"train_batch_size": 4}, {"global_batch_size": 8}, 1,
     "--global-batch-size is 8, but train_batch_size of config is 4"),
    ({"train_batch_size": 5}, {}, 2, "is not divisible by data_parallel 2"),
    ({"train_batch_size": 4}, {"model_parallel_size": 3}, 4, "3 does not divide the number of ranks, 4"),
    ({"train_batch_size": 4}, {"model_parallel_size": 0}, 4, "--model-parallel-size is 0"),
    ({"train_batch_size": 4}, {"batch_size": 0}, 4, "--batch-size is 0"),
]


def test_batch_sizes_of_file_and_flags_complete_each_other_or_are_refused_with_every_factor():
    for tree, flags, world, told in UNFIT_SIZES:
        assert told in refusal(tree, flags=flags, world_size=world)
    config = build_ds_config({"train_batch_size": 48}, flags={"batch_size": 4, "model_parallel_size": 2}, world_size=8)
    assert (config.global_batch_size(4), config.train.batch_size, config.accumulation(4)) == (48, 4, 3)
    config.check_world(8)
    assert build_ds_config({}, flags={"batch_size": 4}, world_size=8).train.global_batch_size is None


# ---- comments and trailing commas -----------------------------------------------------------------------------------


def test_comments_and_trailing_commas_anywhere_between_the_words_change_nothing(tmp_path):
    rng, path = random.Random(3), tmp_path / "ds.json"
    words = ["{", '"optimizer"', ":", "{", '"params"', ":", "{", '"betas"', ":", "[", "0.8", ",", "0.9", ",", "]", "}",
             ",", "}", ",", '"tensorboard"', ":", "{", '"enabled"', ":", "true", ",", '"output_path"', ":",
             '"http://x#y/* ,]"', ",", '"job_name"', ":", '"\\", //"', "}", "}"]
    blanks = [" ", "\n", "// x , }\n", "# \" \n", "/* ] \n \" */", ""]
    for _ in range(300):
        path.write_text("".join(word + rng.choice(blanks) + rng.choice(blanks) for word in words))
        assert changes(build_ds_config(path)) == {"adam_beta1": 0.8, "adam_beta2": 0.9, "tensorboard_dir":
                                                  "http://x#y/* ,]/\", //"}


# ---- flags and presets -------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    def write(text: Any) -> str:
        path = tmp_path / "ds.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return str(path)

    return write


def test_a_flag_and_a_key_that_agree_are_fine_and_the_preset_yields(written):
    name = written({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **WARMUP})
    config = parse_args(["--deepspeed", "--deepspeed_config", name, "--clip-grad", ".5", "--zero-stage=2", "--bf16",
                         "--preset", "tiny", "--warmup", "0.1"])
    assert config.model.num_layers == 2 and config.optim.clip_grad == 0.5 and config.zero.zero_stage == 2
    assert parse_args(["--deepspeed"]) == Config() == parse_args(["--no-deepspeed"]), "a flag for the user's own code"


DISAGREE: list[tuple[dict[str, Any], list[str], str]] = [
    ({"gradient_clipping": 1.0}, ["--clip-grad", "0.5"], "--clip-grad is 0.5, but gradient_clipping of {} is 1.0"),
    ({"fp16": {"enabled": False}}, ["--fp16"], "--fp16 is on, but fp16.enabled of {} is false"),
    ({"bf16": {"enabled": True}}, ["--no-bf16"], "--bf16 is off, but bf16.enabled of {} is true"),
    ({"bf16": {"enabled": True}}, ["--fp16"], "--fp16 and bf16.enabled exclude each other"),
    ({"fp16": {"enabled": True, "initial_scale_power": 10}}, ["--initial-loss-scale", "128"],
     "fp16.initial_scale_power of {} is 10 (that is --initial-loss-scale 1024.0)"),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, ["--loss-scale", "128"], "(that is --loss-scale not set)"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95]}}}, ["--adam-beta2", "0.999"],
     "--adam-beta2 is 0.999, but optimizer.params.betas of {} is [0.9, 0.95]"),
    ({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
     ["--no-stage3-gather-16bit-weights-on-model-save"], "stage3_gather_fp16_weights_on_model_save of {} is true"),
    (WARMUP, ["--lr-decay-style", "cosine"], 'of {} is "WarmupDecayLR" (that is --lr-decay-style linear)'),
    (BOARD, ["--tensorboard-dir", "b"], 'tensorboard.output_path of {} is "out" (that is --tensorboard-dir out/job)'),
    (TABLES, ["--csv-dir", "b"], 'csv_monitor.output_path of {} is "out" (that is --csv-dir out/job)'),
    (WANDB, ["--wandb-project", "b"], '--wandb-project is b, but wandb.project of {} is "gpt"'),
]


def test_a_flag_and_a_key_that_disagree_are_an_error_that_names_both(written):
    for tree, argv, told in DISAGREE:
        name = written(tree)
        with pytest.raises(ConfigError) as caught:
            parse_args(["--deepspeed_config", name, *argv])
        assert told.format(name) in str(caught.value)


def test_scaling_keys_say_nothing_while_fp16_is_off():
    assert build_ds_config({"fp16": {"enabled": False, "loss_scale": 128, "min_loss_scale": 1e9}}) == Config()
    config = build_ds_config({"fp16": {"loss_scale": 128}})
    assert config == Config() and "fp16.loss_scale without effect" in config.notes[0]
    assert build_ds_config({"fp16": {"loss_scale": 128}}, flags={"fp16": True}).precision.loss_scale == 128


BAD_FILES = [
    ('{\n  "a": 1\n  "b": 2\n}', "line 3 column 3: expected ',' or a closing bracket, found '\"b\"'"),
    ('{\n  // told\n  "a" 1}', "line 3 column 7: expected ':' after the key, found '1'"),
    ('{"a":}', "line 1 column 6: expected a value"), ("{'a': 1}", "line 1 column 2: expected a key in double quotes"),
    ('{"a": 1}}', "line 1 column 9: expected the end of the file, found '}'"), ("[1]", "expected an object"),
    ('{"a": "x', "line 1 column 7: expected a closing double quote"), ('{"a":', "found the end of the file"),
    ("", "line 1 column 1: expected a value"), ("{,}", "line 1 column 2"), ('{"a": [1,,]}', "line 1 column 10"),
    ('{"a": 1 /* x }', "line 1 column 9"), ('{"a": ' + "1" * 5000 + "}", "too many digits"),
    ('{"fp16": {"enabled": true, "enabled": true}}', "fp16.enabled is given twice"),
    ('{"wandb": {"x": 1, "x": 1}}', "wandb.x is given twice"),
    ('{"gradient_clipping": NaN}', "gradient_clipping is NaN"),
    ('{"zero_optimization": {"reduce_bucket_size": 1e999}}', "reduce_bucket_size is Infinity"),
    ('{"a":' * 500 + "1" + "}" * 500, "unknown key a"), ('{"a":' * 3000 + "1" + "}" * 3000, "nested too deeply"),
]


def test_a_bad_file_is_reported_with_its_name_and_place(written):
    for text, told in BAD_FILES:
        name = written(text)
        message = refusal(name)
        assert told in message and name in message, text[:40]


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "", "binary", "a\0b"):
        assert refusal(tmp_path / name).startswith(f"config={tmp_path / name} ")
        with pytest.raises(ConfigError, match="--deepspeed-config .*; give the path of a JSON file"):
            parse_args(["--deepspeed_config", str(tmp_path / name)])
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf{}")
    assert build_ds_config(tmp_path / "bom") == Config()


# ---- learning rate -----------------------------------------------------------------------------------------------


def deepspeed_rate(kind: str, step: int, warmup: int, total: int, floor: float) -> float:
    """DeepSpeed's rate of optimizer step `step` as a share of the peak: its schedulers are one behind the step."""
    it = step - 1
    if it < warmup:
        return max(0, it) / warmup
    if kind == "WarmupLR":
        return 1.0
    if kind == "WarmupDecayLR":
        return max(0.0, (total - it) / (total - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * (it - warmup + 1) / (total - warmup))) / 2


def test_schedules_are_deepspeeds_but_for_the_idle_first_steps():
    for kind, shift in (("WarmupLR", 0), ("WarmupDecayLR", 1), ("WarmupCosineLR", 0)):
        params = {"warmup_num_steps": 10, "warmup_type": "linear"}
        params |= {} if kind == "WarmupLR" else {"total_num_steps": 60}
        params |= {"cos_min_ratio": 0.1} if kind == "WarmupCosineLR" else {}
        ours = build_lr_schedule(build_ds_config({"scheduler": {"type": kind, "params": params}}, flags={"lr": 1.0}))
        assert [ours(step) for step in range(9)] == pytest.approx(
            [deepspeed_rate(kind, step + 2, 10, 60, 0.1) for step in range(9)])
        assert [ours(step) for step in range(11, 60)] == pytest.approx(
            [deepspeed_rate(kind, step + shift, 10, 60, 0.1) for step in range(11, 60)])


def deepspeed_one_cycle(step: int, first: int, second: int, low: float, high: float, decay: float) -> float:
    """The rate of optimizer step `step`, from the count of its scheduler, which is one behind."""
    total, it = first + second, step - 1
    if step == 0:
        return low
    if it >= total:
        return low / (1 + decay * (it - total + 1))
    x = math.fmod(it + 1, total) / total
    ratio = first / total
    return low + (high - low) * (x / ratio if x <= ratio else (x - 1) / (ratio - 1))


@pytest.mark.parametrize(("first", "second"), [(10, None), (7, 30), (30, 7), (1, 1)])
def test_one_cycle_is_deepspeeds_at_every_step(first, second):
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": first, "decay_step_size": 5,
              "cycle_second_step_size": second, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}
    ours = build_lr_schedule(build_ds_config({"scheduler": {"type": "OneCycle", "params": params}}))
    second = second or first
    for step in range(3 * (first + second)):
        assert ours(step) == pytest.approx(deepspeed_one_cycle(step, first, second, 1e-4, 1e-2, 0.1), rel=1e-12)
    low, high = 0.8, 0.9
    height = [(ours(step) - 1e-4) / (1e-2 - 1e-4) for step in range(first + second + 1)]
    assert [ours.betas(step)[0] for step in range(1, first + second + 1)] == pytest.approx(
        [high - (high - low) * share for share in height[1:]])
    assert ours.betas(0) == (low, 0.99), "DeepSpeed's first step"
    assert ours.betas(first + second + 5)[0] == pytest.approx(high * (1 + 0.01 / 5 * 5))
    assert ours.betas(10**6)[0] < 1
    still = build_ds_config({"scheduler": {"type": "OneCycle", "params": {**params, "cycle_momentum": False}}})
    assert build_lr_schedule(still).betas(3) is None


def test_a_range_test_grows_as_deepspeeds():
    for stairs in (False, True):
        params = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 5,
                  "lr_range_test_staircase": stairs}
        ours = build_lr_schedule(build_ds_config({"scheduler": {"type": "LRRangeTest", "params": params}}))
        for step in range(50):
            interval = step // 7 if stairs else step / 7
            assert ours(step) == pytest.approx(1e-4 * (1 + 5 * interval), rel=1e-12)


# ---- whole files -------------------------------------------------------------------------------------------------

# What a published example's file says.
PUBLISHED: dict[str, Any] = {
    "train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_print": 1, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True,
                          "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7},
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "weight_decay": 0.01}}, "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1,
             "initial_scale_power": 16}, "zero_allow_untested_optimizer": True}


def test_a_published_file_has_its_effect(written):
    path = written(json.dumps(PUBLISHED, indent=2).replace("\n}", ",  // a comma too many\n}"))
    assert changes(build_ds_config(path, world_size=4)) == {
        "zero_stage": 2, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000, "fp16": True,
        "log_interval": 1, "global_batch_size": 16}


def test_the_shipped_files_fit_the_flags_of_the_scripts():
    recipe = (ROOT / "scripts" / "lib.sh").read_text()
    assert "--clip-grad 1.0" in recipe and "--weight-decay 0.1" in recipe, "or this test must follow"
    stage = {"zero1": 1, "zero2": 2, "zero3": 3, "zero_offload": 2, "zero_infinity": 3}
    for path, world in itertools.product((ROOT / "scripts/configs").glob("*.json"), (1, 2, 8)):
        argv = f"--deepspeed --deepspeed_config {path} --clip-grad 1.0 --weight-decay 0.1 --batch-size 4 --lr 1e-3"
        if "infinity" in path.name:
            argv += " --offload-optimizer-nvme-path /n --offload-param-nvme-path /n"
        config = parse_args([*argv.split(), "--preset", "tiny", "--model-parallel-size", "1"], world)
        config.check_world(world)
        assert config.zero.zero_stage == next((number for name, number in stage.items() if name in path.name), 0)


def test_every_shipped_file_belongs_to_a_script_and_every_script_finds_its_file():
    named = {name for script in (ROOT / "scripts").glob("ds_*.sh")
             for name in re.findall(r"scripts/configs/([\w.-]+\.json)", script.read_text())}
    assert named == {path.name for path in (ROOT / "scripts/configs").glob("*.json")}


# ---- anything at all ---------------------------------------------------------------------------------------------

STRANGE = [None, True, False, 0, -1, 1, 2, 1.5, 1e9, 5e8, 1e400, math.nan, 10**30, "", "auto", "cpu", "none", "true ",
           "fp32", "Adam", "WarmupLR", [], [0.9, 0.95], [None], {}, {"enabled": False}, {"stage": 3}, {"type": "Adam"}]
WHOLE = merged(*(merged(beside, nested(path, value)) for path, (value, expected, beside) in CASES.items()
                 if not isinstance(DS_KEYS[path], RenamedKey)
                 and path not in ("bf16.enabled", "scheduler.params.cos_min_ratio", "prescale_gradients",
                                  HOME + "ratio", DROP + "enabled")
                 and beside not in (RANGE, CYCLE) and not path.startswith(("scheduler.params.decay_"))
                 and beside.get("optimizer", ADAM["optimizer"]) == ADAM["optimizer"]),
               ADAM,
               {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, "scheduler": {"type": "WarmupDecayLR"}})


def mutate(tree: Any, rng: random.Random) -> Any:
    """The tree with one place changed: a value replaced, a key renamed, dropped or moved in from elsewhere."""
    if not isinstance(tree, dict) or not tree or rng.random() < 0.15:
        return rng.choice(STRANGE)
    key = rng.choice(list(tree))
    result = dict(tree)
    match rng.randrange(5):
        case 0:
            del result[key]
        case 1:
            result[rng.choice([key + "s", key[1:], key[::-1], *map(str, DS_OBJECTS)])] = result.pop(key)
        case 2:
            result[rng.choice(list(DS_KEYS)).rpartition(".")[2]] = rng.choice(STRANGE)
        case _:
            result[key] = mutate(tree[key], rng)
    return result


def only_config_errors(call: Any) -> int:
    """1 if the call succeeds, 0 if it is refused in words."""
    try:
        call()
    except ConfigError as error:
        assert str(error)
        return 0
    return 1


@pytest.mark.parametrize("trees, least", [(400, 12), pytest.param(10_000, 300, marks=pytest.mark.slow)])
def test_a_mutated_tree_is_a_configuration_or_a_config_error(trees, least):
    config = build_ds_config(WHOLE)
    assert config.zero.zero_stage == 3 and config.precision.fp16 and config.global_batch_size(1) == 12
    rng, done = random.Random(11), 0
    for _ in range(trees):
        tree = WHOLE if rng.random() < 0.5 else {key: WHOLE[key] for key in rng.sample(list(WHOLE), 4)}
        for _ in range(rng.randrange(1, 4)):
            tree = mutate(tree, rng)
        flags = rng.choice([{}, {"fp16": True}, {"batch_size": 2}, {"lr": 1e-2}, {"zero_stage": 1}])
        if isinstance(tree, dict):
            done += only_config_errors(lambda: build_ds_config(tree, flags=flags, world_size=rng.choice([1, 2, 3])))
    assert done > least, "some must pass, or nothing is tested"


def test_a_base64_text_stands_for_a_file():
    text = base64.urlsafe_b64encode(json.dumps({"bf16": {"enabled": True}, "x?>": 1}).encode()).decode()
    assert "the base64 configuration: unknown key x?>" in refusal(text)
    text = base64.urlsafe_b64encode(b'{"bf16": {"enabled": true}}').decode()
    assert build_ds_config(text).precision.bf16 and parse_args(["--deepspeed_config", text]).precision.bf16
    for wrong in ("abcd", "missing.json", base64.urlsafe_b64encode(b"[1]").decode()):
        assert "cannot be read" in refusal(wrong)
