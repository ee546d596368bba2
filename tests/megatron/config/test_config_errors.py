"""Every independent reason of a file is told, once and at once; what follows from another is not. Parameters of
optimizers have ranges, and settings of a method that is off are noted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import parse_args
from megatron.config.ds_json import build_ds_config
from megatron.config.optimizer_config import DEEPSPEED_TYPES, EXTRA_RANGES, OPTIMIZERS
from megatron.config.schema import flag_name, setting_of
from megatron.config.tree import SECTIONS, Config, OptimConfig
from megatron.errors import ConfigError
from tests.megatron.launch.processes import launched

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
        "model_parallel_size": 3, "num_attention_heads": 4}, "--model-parallel-size 3 does not divide"),
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
    done = launched(2, "pretrain_gpt2.py", "--mock-data", "--deepspeed_config", path)
    head, *lines = done.stderr.splitlines()
    assert done.returncode == 2 and head == f"error: {path}: 3 errors:"
    assert [line[:6] for line in lines] == ["  (1) ", "  (2) ", "  (3) "]


def test_what_belongs_to_an_optimizer_in_doubt_is_not_judged_by_another() -> None:
    for flags in ("onebit_lamb --optimizer-params coeff_beta=0.9", "onebit_adam --onebit-freeze-step auto"):
        (told,) = reasons(lambda: parse_args(["--no-adam-w-mode", "--optimizer", *flags.split()]))
        assert told.startswith("--no-adam-w-mode and --optimizer ")


# ---- parameters of optimizers --------------------------------------------------------------------------------------

BASE = {"train_batch_size": 8}
NUMBERS = [(optimizer, name) for optimizer, takes in OPTIMIZERS.items() for name, default in takes.extra.items()
           if not isinstance(default, bool | str)]
TYPES = {ours: given for given, ours in DEEPSPEED_TYPES.items()}
WRONG = [("onebit_lamb", "coeff_beta", 2), ("onebit_lamb", "factor_threshold", -1), ("lamb", "max_coeff", 0),
         ("lion", "betas", [0.9, 1.5]), ("rmsprop", "alpha", -1), ("adagrad", "eps", -1e-8), ("sgd", "dampening", 2)]
OUT_OF_ORDER = [("lamb", {"min_coeff": 11}), ("onebit_lamb", {"max_coeff": 0.3, "min_coeff": 0.5}),
                ("onebit_lamb", {"factor_min": 5}), ("onebit_lamb", {"factor_max": 0.1}),
                ("rprop", {"etas": [1.2, 0.5]}), ("rprop", {"step_sizes": [1, 0.1]})]


def of_flags(optimizer: str, params: dict[str, Any]) -> str:
    texts = tuple(f"{name}={str(value).lower()}" for name, value in params.items())
    with pytest.raises(ConfigError) as caught:
        OptimConfig(optimizer=optimizer, optimizer_params=texts)  # type: ignore[arg-type]
    return str(caught.value)


def of_file(optimizer: str, params: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_ds_config({**BASE, "optimizer": {"type": TYPES[optimizer], "params": params}})
    return str(caught.value)


def test_each_number_has_a_range_its_default_is_in_it_and_one_beyond_is_named_as_it_was_written() -> None:
    for optimizer, name in NUMBERS:
        default = OPTIMIZERS[optimizer].extra[name]
        numbers, wrong = (default, [-1, -1]) if isinstance(default, tuple) else ((default,), -1)
        assert default is None or all(EXTRA_RANGES[name].least <= one <= EXTRA_RANGES[name].most for one in numbers)
        assert of_flags(optimizer, {name: wrong}).startswith(f"--optimizer-params {name} is ")
    for optimizer, name, value in WRONG:
        assert of_flags(optimizer, {name: value}).startswith(f"--optimizer-params {name} is {value}: expected ")
        assert f"optimizer.params.{name} is {value}: expected " in of_file(optimizer, {name: value})


def test_pairs_are_in_order() -> None:
    for optimizer, params in OUT_OF_ORDER:
        assert of_flags(optimizer, params).startswith(f"--optimizer-params {[*params][-1][:3]}".replace("max", "min"))
        assert "optimizer.params." in of_file(optimizer, params)


def test_a_parameter_that_is_a_flag_says_which() -> None:
    assert of_flags("onebit_adam", {"freeze_step": 5}) == (
        "--optimizer-params freeze_step has a flag of its own: give --onebit-freeze-step")
    assert of_flags("adam", {"betas": [0, 1]}).endswith("give --adam-beta1 and --adam-beta2")


# ---- settings without effect ---------------------------------------------------------------------------------------

VALUES = {"quantize_rounding": "stochastic", "quantize_type": "asymmetric", "eigenvalue_layer_name": "h",
          "flops_profiler_output_file": "f", "onebit_freeze_step": "10", "pld_theta": "0.3",
          "quantize_change_ratio": "0.5", "quantize_start_bits": "12", "quantize_groups": "4",
          "profile_steps": "2:3", "recompute_granularity": "selective"}

FIELDS = [item for section in SECTIONS.values() for item in fields(section)]
SWITCH = {item.name: switch for item in FIELDS for switch, wanted in (setting_of(item).needs or {}).items()
          if wanted == () and item.name != "load_from_fp32_weights"}  # whose switches are two


def unread(config: Config) -> list[str]:
    return [note.strip().removeprefix("note: ") for note in config.notes if " no effect" in note]


def kind_of(name: str) -> str:
    return next(str(item.type) for item in FIELDS if item.name == name)


def given(name: str) -> list[str]:
    kind = kind_of(name)
    return [flag_name(name)] if kind == "bool" else [flag_name(name), VALUES.get(name, "3" if "int" in kind else "0.5")]


def test_a_setting_of_a_method_that_is_off_is_noted_and_one_of_a_method_that_is_on_is_not() -> None:
    for name in SWITCH.keys() - {"quantize_eigenvalue", "contiguous_memory_optimization", "fp8_head"}:
        chain = [SWITCH[name]]
        while chain[-1] in SWITCH:
            chain.append(SWITCH[chain[-1]])
        outermost = chain[-1]
        assert unread(parse_args(given(name))) == [f"{flag_name(name)} has no effect without {flag_name(outermost)}"]
        assert unread(parse_args([*given(name), *(word for switch in chain for word in given(switch))])) == [], name
        if kind_of(outermost) == "bool":
            assert unread(parse_args([*given(name), f"--no-{flag_name(outermost)[2:]}"])) == [], "it was said to be off"


def test_a_setting_of_another_optimizer_is_noted() -> None:
    names = {name for takes in OPTIMIZERS.values() for name in " ".join(takes.fields.values()).split()}
    for name, optimizer in product(names, OPTIMIZERS):
        found = unread(parse_args(["--optimizer", optimizer, "--train-iters", "2e5", *given(name)]))
        assert bool(found) == (name not in " ".join(OPTIMIZERS[optimizer].fields.values()))
        assert all(note.startswith(f"{flag_name(name)} has no effect with --optimizer {optimizer}: ") for note in found)


NOTED = [
    ("--onebit-freeze-step 10", "--onebit-freeze-step has no effect with --optimizer adam: onebit_adam, onebit_lamb "
                                "read it"),
    ("--bf16 --fp8-head", "--fp8-head has no effect without --fp8"), ("--bf16 --fp8 --fp8-head", None),
    ("--pld-theta 0.3 --pld-gamma 0.1", "--pld-theta and --pld-gamma have no effect without --progressive-layer-drop"),
    ("--lr-wsd-decay-iters 5 --lr-wsd-decay-style linear",
     "--lr-wsd-decay-iters and --lr-wsd-decay-style have no effect without --lr-decay-style WSD"),
    ("--lr-wsd-decay-iters 5 --lr-decay-style WSD", None),
    ("--zero-stage 3 --stage3-max-live-parameters 5 --reduce-bucket-size 5 --no-overlap-comm", None),
    ("--zero-stage 2 --stage3-max-live-parameters 5 --stage3-max-reuse-distance 0 --bf16 --no-load-from-fp32-weights",
     "--stage3-max-live-parameters has no effect without --zero-stage 3"),
    ("--no-reduce-scatter", "--reduce-scatter has no effect without --zero-stage 1 or 2 or 3"),
    ("--autotuning", "--autotuning has no effect: python -m megatron.tune with the same flags is what tunes"),
    ("--no-load-from-fp32-weights", "--load-from-fp32-weights has no effect without --fp16 or --bf16"),
    ("--zero-stage 2 --no-allgather-partitions",
     "--allgather-partitions has no effect: each device has one way to collect updated weights"),
    ("--zero-stage 2 --cpu-optimizer --round-robin-gradients", "--round-robin-gradients has no effect: each rank "
     "copies to the host only its own part of the gradients, an equal one")]


def test_how_it_is_said() -> None:
    for argv, wanted in NOTED:
        assert unread(parse_args(argv.split())) == ([wanted] if wanted else [])


GROUP = {"different_groups": {"wq1": {"params": {"start_bits": 12, "target_bits": 4, "quantization_period": 5}}}}


@pytest.mark.parametrize("tree, wanted", [
    ({"progressive_layer_drop": {"theta": 0.5, "gamma": 0.1}},
     "progressive_layer_drop.gamma and progressive_layer_drop.theta have no effect without "
     "progressive_layer_drop.enabled"),
    ({"compression_training": {"weight_quantization": GROUP}}, "different_groups.wq1.params.quantization_period have "
     "no effect without quantize_training.enabled"),
    ({"quantize_training": {"enabled": True, "fp16_mixed_quantize": {"quantize_change_ratio": 0.5}}},
     "quantize_training.fp16_mixed_quantize.quantize_change_ratio has no effect without "
     "quantize_training.fp16_mixed_quantize.enabled"),
])
def test_a_key_of_a_method_that_is_off_is_noted_in_its_words(tree: dict[str, Any], wanted: str) -> None:
    for in_engine in (False, True):
        (note,) = unread(build_ds_config({"train_batch_size": 8, **tree}, in_engine=in_engine))
        assert note.startswith("config: ") and note.endswith(wanted)
