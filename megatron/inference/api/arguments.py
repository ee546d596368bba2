"""The arguments of `init_inference`: DeepSpeed's names, from the call and from `config`.

ARGUMENTS has one row for each name that DeepSpeed's call knows: it is used, accepted with the values that change
nothing, or refused with what to do instead. The call and `config` may both give an argument if they give the same
value.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.config.config_errors import ErrorList
from megatron.config.ds_reader import parse_loose_json, to_plain_dicts
from megatron.config.schema import require
from megatron.errors import ConfigError

DTYPE_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
DTYPES = {**DTYPE_NAMES, **{str(dtype): dtype for dtype in DTYPE_NAMES.values()}, "float32": torch.float32,
          "float": torch.float32, "bfloat16": torch.bfloat16, "bfloat": torch.bfloat16, "float16": torch.float16,
          "half": torch.float16}


@dataclass(frozen=True)
class InferenceArguments:
    """What a call asks for."""

    tp_size: int | None = None
    mpu: Any = None
    tp_group: Any = None
    dtype: torch.dtype | None = None
    """None: as the model is."""
    checkpoint: str | Mapping[str, Any] | None = None
    base_dir: str = ""
    fast: bool = False
    """By our decoder where there is one for the model."""
    policy: Mapping[Any, Any] | None = None
    example_inputs: Any = None
    max_out_tokens: int | None = None
    min_out_tokens: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class AcceptedArgument:
    field_name: str
    """Field of InferenceArguments."""
    expected: str
    convert: Callable[[Any], Any]
    """Raises ValueError for what is not `expected`."""


@dataclass(frozen=True)
class FixedArgument:
    """Not ours to set: accepted where the value changes nothing."""

    accepted_values: tuple[Any, ...]
    explanation: str
    warns_only: bool = False
    """Other values are answered with a note, not an error: nothing goes wrong without."""


def _positive_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _dtype(value: Any) -> torch.dtype:
    found = DTYPES.get(str(value))
    if found is None:
        raise ValueError
    return found


def _checkpoint(value: Any) -> str | Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError
    return os.fspath(value)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    return value


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError
    return os.fspath(value)


def _anything(value: Any) -> Any:
    return value


_NO_EXPERTS = "there are no experts in these models; leave it out"
_PLAIN_KERNELS = "torch's own kernels are used, for any model; leave it out"
_ROWS = "int8 weights have one scale for each output row, max / 127, found when the model is loaded; leave it out"
_OFF = (None, False)

ARGUMENTS: dict[str, AcceptedArgument | FixedArgument] = {
    "tensor_parallel.tp_size": AcceptedArgument("tp_size", "a number of ranks, 1 or more", _positive_int),
    "tensor_parallel.mpu": AcceptedArgument("mpu", "an object with get_{model,data}_parallel_group()", _anything),
    "tensor_parallel.tp_group": AcceptedArgument("tp_group", "a process group of torch.distributed", _anything),
    "tensor_parallel.enabled": FixedArgument((True,), "tp_size 1 is a whole model; give that"),
    "tensor_parallel.tp_grain_size": FixedArgument((1, 64), "parts are equal; leave it out", warns_only=True),
    "dtype": AcceptedArgument("dtype", "torch.float32, torch.bfloat16, torch.float16 or torch.int8, or their names",
                              _dtype),
    "checkpoint": AcceptedArgument("checkpoint", "a folder, or DeepSpeed's JSON description (a path or a dict)",
                                   _checkpoint),
    "base_dir": AcceptedArgument("base_dir", "a folder", _path),
    "replace_with_kernel_inject": AcceptedArgument("fast", "true or false", _boolean),
    "injection_policy": AcceptedArgument("policy", "{LayerClass: names of its row-parallel "
                                         "layers}, or {LayerClass: Cut(...)}", _mapping),
    "example_inputs": AcceptedArgument("example_inputs", "inputs that the model takes", _anything),
    "max_out_tokens": AcceptedArgument("max_out_tokens", "a number of tokens, 1 or more", _positive_int),
    "min_out_tokens": AcceptedArgument("min_out_tokens", "a number of tokens, 1 or more", _positive_int),
    "replace_method": FixedArgument((None, "auto", ""), "DeepSpeed ignores it too; leave it out", warns_only=True),
    "training_mp_size": FixedArgument((None, 1), "a checkpoint says itself over how many ranks it was trained",
                                      warns_only=True),
    "enable_cuda_graph": FixedArgument(_OFF, "graphs are not captured", warns_only=True),
    "use_triton": FixedArgument(_OFF, _PLAIN_KERNELS, warns_only=True),
    "triton_autotune": FixedArgument(_OFF, _PLAIN_KERNELS, warns_only=True),
    "return_tuple": FixedArgument((None, True, False), "layers return what they did"),
    "triangular_masking": FixedArgument((True,), "the mask is the model's own; leave it out"),
    "transposed_mode": FixedArgument(_OFF, "the class of a layer says how its matrix lies; leave it out"),
    "set_empty_params": FixedArgument(_OFF, "with checkpoint= and no model, each rank "
                                      "makes and reads its part alone; leave it out"),
    "keep_module_on_host": FixedArgument(_OFF, "a rank's part goes to its device; "
                                         "CUDA_VISIBLE_DEVICES= (empty) runs on the CPU"),
    "save_mp_checkpoint_path": FixedArgument((None,),
                                             "a checkpoint of ours loads at any tp_size: no copy for each is needed"),
    "checkpoint_config": FixedArgument((None, {}), "give checkpoint=, and base_dir= if it is relative"),
    "zero": FixedArgument((None, {}, {"stage": 0}, {"stage": 1}, {"stage": 2}),
                          "weights are split by tensor_parallel.tp_size; leave it out"),
    "injection_policy_tuple": FixedArgument((None,), "give injection_policy={LayerClass: (names,)}"),
    "config": FixedArgument((None, {}), "give its keys directly"),
    "quantization_setting": FixedArgument((None,), _ROWS),
    "quant.enabled": FixedArgument((True, False), ""),
    "quant.weight.enabled": FixedArgument((True, False), ""),
    "quant.weight.num_bits": FixedArgument((8,), "weights are int8 (dtype=torch.int8) or not quantised"),
    "quant.weight.q_type": FixedArgument(("symmetric",), _ROWS),
    "quant.weight.q_groups": FixedArgument((1,), _ROWS),
    "quant.weight.quantized_initialization": FixedArgument((None, {}), _ROWS),
    "quant.weight.post_init_quant": FixedArgument((None, {}), _ROWS),
    "quant.activation.enabled": FixedArgument((False,), "activations are not quantised; leave it out"),
    **{f"quant.activation.{name}": FixedArgument(("symmetric", 1, 8), "activations are not quantised; leave it out")
       for name in ("num_bits", "q_type", "q_groups")},
    "quant.qkv.enabled": FixedArgument((True,),
                                       "all matrices of a block are quantised, with dtype=torch.int8; leave it out"),
    "moe": FixedArgument((None, False, {}, {"enabled": False}), _NO_EXPERTS),
    "moe_type": FixedArgument(("standard",), _NO_EXPERTS),
    "moe_experts": FixedArgument(([1], (1,)), _NO_EXPERTS),
    "ep_size": FixedArgument((1,), _NO_EXPERTS),
    "ep_group": FixedArgument((None,), _NO_EXPERTS),
    "ep_mp_group": FixedArgument((None,), _NO_EXPERTS)}
ALIASES = {"mp_size": "tensor_parallel.tp_size", "mpu": "tensor_parallel.mpu", "tp": "tensor_parallel",
           "kernel_inject": "replace_with_kernel_inject", "injection_dict": "injection_policy",
           "max_tokens": "max_out_tokens", "min_tokens": "min_out_tokens", "tm": "triangular_masking",
           "ckpt_config": "checkpoint_config", "args": "config", "expert_group": "ep_group",
           "expert_mp_group": "ep_mp_group"}
"""What else a key is called -> its path in TABLE."""
SECTIONS = {path.rpartition(".")[0] for path in ARGUMENTS} - {""} | {"quant"}


def parse_arguments(config: Any, given: Mapping[str, Any]) -> InferenceArguments:
    """What the call says with the keys of `config`, a dict or a JSON file; all that is wrong is one error."""
    problems, found = ErrorList(), dict[str, tuple[str, Any]]()
    for tree, where in ((_load_config(config), " of config"), (given, "")):
        for path, written, value in _walk_keys(tree, where, "", problems):
            _check_value(path, written, value, found, problems)
    problems.raise_if_any("init_inference")
    fields, notes = dict[str, Any](), []
    for path, (written, value) in found.items():
        row = ARGUMENTS[path]
        if isinstance(row, AcceptedArgument):
            fields[row.field_name] = value
        elif not _is_one_of(value, row.accepted_values):
            notes.append(f"{written} has no effect: {row.explanation}")
    return InferenceArguments(**fields, notes=tuple(notes))


def _load_config(config: Any) -> Mapping[str, Any]:
    """Of a dict, or of a file."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    require(isinstance(config, (str, os.PathLike)),
            f"init_inference: config is {_format_value(config)}: expected a dict or the path of a JSON file")
    name = os.fspath(config)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"init_inference: config {name}: cannot be read ({error})") from error
    tree = to_plain_dicts(parse_loose_json(text, name), name)
    require(isinstance(tree, dict), f"{name}: expected an object {{...}}")
    return dict(tree)


def _walk_keys(tree: Mapping[str, Any], location: str, prefix: str,
               problems: ErrorList) -> Iterator[tuple[str, str, Any]]:
    """(path, as it was written, value) of every key."""
    for key, value in tree.items():
        written = f"{prefix}{key}"
        path = ALIASES.get(written, written)
        head, dot, rest = path.partition(".")
        path = ALIASES[head] + dot + rest if head == "tp" else path
        if path in SECTIONS and isinstance(value, Mapping):
            yield from _walk_keys(value, location, f"{path}.", problems)
        elif path in ARGUMENTS:
            yield path, written + location, value
        elif path in SECTIONS and value is not None:
            example = {"tensor_parallel": '{"tp_size": 2}', "quant": '{"enabled": true}'}.get(path, "{...}")
            problems.append(f"{written}{location} is {_format_value(value)}: expected an object, such as {example}")
        elif path not in SECTIONS:
            problems.append(f"{written}{location} is unknown; {_suggest(written)}")


def _suggest(written: str) -> str:
    section = written.rpartition(".")[0]
    known = [path for path in [*ARGUMENTS, *SECTIONS, *ALIASES] if path.rpartition(".")[0] == section]
    near = difflib.get_close_matches(written, known, n=1, cutoff=0.6)
    near = near or [path for path in ARGUMENTS if path.rpartition(".")[2] == written.rpartition(".")[2]]
    return f"did you mean {near[0]}?" if near else "docs/inference.md lists every argument"


def _check_value(path: str, written: str, value: Any, found: dict[str, tuple[str, Any]], problems: ErrorList) -> None:
    row = ARGUMENTS[path]
    if isinstance(row, AcceptedArgument):
        if value is None:
            return
        try:
            converted = row.convert(value)
        except ValueError:
            problems.append(f"{written} is {_format_value(value)}: expected {row.expected}")
            return
    else:
        converted = value
        if not row.warns_only and not _is_one_of(value, row.accepted_values):
            problems.append(f"{written} is {_format_value(value)}, which is not supported: {row.explanation}")
    before, other = found.setdefault(path, (written, converted))
    if other is not converted and other != converted:
        problems.append(
            f"{before} is {_format_value(other)} and {written} is {_format_value(value)}: leave one of them out")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Equal, and true is not 1."""
    return any(type(value) is type(one) and value == one for one in values)


def _format_value(value: Any) -> str:
    return f"{value!r:.80}"
