"""Each argument of DeepSpeed's call does what it says, or is refused by name with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError, TrainerError
from megatron.inference import init_inference
from megatron.inference.api.arguments import ALIASES, ARGUMENTS, FIXED_ARGUMENTS, parse_arguments


def test_the_call_of_the_tutorial() -> None:
    asked = parse_arguments(None, {"tensor_parallel": {"tp_size": 2}, "dtype": torch.half, "checkpoint": "folder",
                                   "replace_with_kernel_inject": True, "replace_method": "auto", "training_mp_size": 1,
                                   "max_out_tokens": 1024, "min_tokens": 3, "injection_policy": {nn.Linear: ("out",)}})
    assert (asked.tp_size, asked.dtype, asked.checkpoint, asked.replace_with_kernel_inject) == (2, torch.float16, "folder", True)
    assert (asked.max_out_tokens, asked.min_out_tokens, asked.injection_policy) == (1024, 3, {nn.Linear: ("out",)})
    assert asked.notes == ()


@pytest.mark.parametrize("name, dtype", [
    ("fp32", torch.float32), ("float", torch.float32), ("torch.bfloat16", torch.bfloat16), ("half", torch.float16),
    (torch.float32, torch.float32), ("int8", torch.int8), (torch.int8, torch.int8)])
def test_dtypes_by_any_of_their_names(name: Any, dtype: torch.dtype) -> None:
    assert parse_arguments({"dtype": name}, {}).dtype is dtype


def test_config_is_a_dict_or_a_file(tmp_path: Path) -> None:
    tree = {"kernel_inject": True, "tensor_parallel": {"tp_size": 4, "enabled": True}, "dtype": "bf16"}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(tree))
    with_names = parse_arguments(file, {"mp_size": 4, "dtype": torch.bfloat16})
    assert parse_arguments(tree, {}) == parse_arguments(str(file), {}) == with_names
    assert parse_arguments(tree, {}).tp_size == 4


@pytest.mark.parametrize("config, given, said", [
    ({"dtype": "fp32"}, {"dtype": torch.half},
     "dtype of config is torch.float32 and dtype is torch.float16: leave one of them out"),
    ({"tensor_parallel": {"tp_size": 2}}, {"mp_size": 4},
     "tensor_parallel.tp_size of config is 2 and mp_size is 4: leave one of them out"),
    (None, {"mp_size": 2, "tp": {"tp_size": 1}}, "mp_size is 2 and tensor_parallel.tp_size is 1: leave one"),
    ({"kernel_inject": True}, {"replace_with_kernel_inject": False}, "kernel_inject of config is True and"),
])
def test_two_that_disagree_are_both_named(config: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(config, given)
    assert said in str(error.value)


def test_a_key_twice_in_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tensor_parallel": {"tp_size": 2, "tp_size": 4}}')
    with pytest.raises(ConfigError, match="tensor_parallel.tp_size is given twice"):
        parse_arguments(tmp_path / "config.json", {})


UNSUPPORTED: dict[str, Any] = {
    "tensor_parallel.enabled": False, "triangular_masking": False, "transposed_mode": True, "set_empty_params": True,
    "keep_module_on_host": True, "save_mp_checkpoint_path": "x", "checkpoint_config": {"checkpoint_dir": "x"},
    "zero": {"stage": 3}, "injection_policy_tuple": ("a", "b"), "config": {"dtype": "fp32"},
    "quantization_setting": (True, 8), "quant.weight.num_bits": 4, "quant.weight.q_type": "asymmetric",
    "quant.weight.q_groups": 8, "quant.activation.enabled": True, "quant.qkv.enabled": False, "moe": True,
    "moe_type": "residual", "moe_experts": [4], "ep_size": 2, "ep_group": object(), "ep_mp_group": object(),
    "quant.weight.quantized_initialization": {"num_bits": 8}, "quant.weight.post_init_quant": {"a": 1},
    "quant.activation.num_bits": 4, "quant.activation.q_type": "asymmetric", "quant.activation.q_groups": 2,
    "return_tuple": 3, "quant.enabled": 3, "quant.weight.enabled": 3,
}


def test_every_argument_that_is_not_supported_says_what_to_do() -> None:
    assert FIXED_ARGUMENTS.keys() == UNSUPPORTED.keys()
    for path, value in UNSUPPORTED.items():
        accepted, remedy = FIXED_ARGUMENTS[path]
        with pytest.raises(ConfigError) as error:
            parse_arguments(None, nested(path, value))
        assert str(error.value).startswith(f"init_inference: {path} is {value!r:.80}, which is not supported: ")
        assert str(error.value).endswith(remedy)
        for harmless in accepted:
            assert parse_arguments(None, nested(path, harmless)).notes == ()


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def test_what_changes_nothing_is_noted() -> None:
    for name, value in {"enable_cuda_graph": True, "use_triton": True, "triton_autotune": True, "training_mp_size": 4,
                        "replace_method": "manual", "tensor_parallel.tp_grain_size": 8}.items():
        (note,) = parse_arguments(None, nested(name, value)).notes
        assert note.startswith(f"{name} has no effect: ")


@pytest.mark.parametrize("given, said", [
    ({"mp_sise": 2}, "mp_sise is unknown; did you mean mp_size?"),
    ({"tensor_parallel": {"tp_sizes": 2}}, "did you mean tensor_parallel.tp_size?"),
    ({"tp_size": 2}, "tp_size is unknown; did you mean mp_size?"),
    ({"tensor_parallel": 2}, 'tensor_parallel is 2: expected an object, such as {"tp_size": 2}'),
    ({"frobnicate": 2}, "frobnicate is unknown; docs/inference.md lists every argument"),
    ({"mp_size": 0}, "mp_size is 0: expected a number of ranks, 1 or more"),
    ({"mp_size": True}, "mp_size is True: expected"),
    ({"dtype": "fp8"}, "dtype is 'fp8': expected torch.float32"),
    ({"checkpoint": 3}, "checkpoint is 3: expected a folder"),
    ({"injection_policy": ["out"]}, "injection_policy is ['out']: expected {LayerClass"),
    ({"replace_with_kernel_inject": "yes"}, "expected true or false"),
    ({"max_out_tokens": 0, "dtype": "x"}, "2 errors:\n  (1) max_out_tokens is 0"),
])
def test_what_is_wrong_is_named_with_the_nearest_that_is_right(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(None, given)
    assert said in str(error.value)


def test_other_names_lead_to_rows_of_the_table() -> None:
    for name, path in ALIASES.items():
        assert path in ARGUMENTS or any(row.startswith(f"{path}.") for row in ARGUMENTS), name


@pytest.mark.parametrize("model, given, said", [
    (None, {}, "init_inference needs a model, or checkpoint="),
    (3, {}, "model is a int: expected a module"),
    (nn.Linear(3, 3), {"mp_size": 2}, "tensor_parallel.tp_size is 2, and there are 1 ranks: start 2 of them"),
    (nn.Linear(3, 3), {"checkpoint": "runs"}, "checkpoint= fills a GPT-2, and the model is a Linear"),
    (None, {"checkpoint": "nowhere"}, "nowhere"),
    (None, {"checkpoint": {"type": "Megatron", "version": 0.0, "checkpoints": ["mp_rank_00/model_optim_rng.pt"]}},
     "a list of files of type 'Megatron' is not read here: make a checkpoint of it with `python -m megatron."),
    (None, {"checkpoint": "nowhere.json"}, "nowhere.json: cannot be read"),
    (None, {"config": "nowhere.json"}, "config nowhere.json: cannot be read"),
])
def test_calls_that_cannot_be_answered(model: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerError) as error:
        init_inference(model, **given)
    assert said in str(error.value)
