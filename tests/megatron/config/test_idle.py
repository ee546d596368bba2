"""Settings that belong to a method which is off are said to have no effect; nothing else is."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from megatron.config.cli import parse_args
from megatron.config.ds_json import build_ds_config
from megatron.config.optimizer_config import OPTIMIZERS
from megatron.config.schema import flag_name, setting_of
from megatron.config.tree import SECTIONS, Config

VALUES = {"quantize_rounding": "stochastic", "quantize_type": "asymmetric", "eigenvalue_layer_name": "h",
          "flops_profiler_output_file": "f", "onebit_freeze_step": "10", "pld_theta": "0.3",
          "quantize_change_ratio": "0.5", "quantize_start_bits": "12", "quantize_groups": "4",
          "profile_steps": "2:3"}

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
    for name in SWITCH.keys() - {"quantize_eigenvalue", "contiguous_memory_optimization"}:
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
