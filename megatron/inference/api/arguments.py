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
from megatron.config.ds_json import parse_loose_json
from megatron.config.schema import require
from megatron.errors import ConfigError
from megatron.inference import load

DTYPES = {**load.DTYPES, **{str(dtype): dtype for dtype in load.DTYPES.values()}, "float32": torch.float32,
          "float": torch.float32, "bfloat16": torch.bfloat16, "bfloat": torch.bfloat16, "float16": torch.float16,
          "half": torch.float16}


@dataclass(frozen=True)
class InferenceArguments:
    tp_size: int | None = None
    mpu: Any = None
    tp_group: Any = None
    dtype: torch.dtype | None = None
    """None: that of the model."""
    checkpoint: str | Mapping[str, Any] | None = None
    base_dir: str = ""
    fast: bool = False
    """Generate with our decoder, where it supports the model."""
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
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class FixedArgument:
    """Accepted with the values that change nothing."""

    accepted_values: tuple[Any, ...]
    explanation: str
    warns_only: bool = False
    """Other values give a note, not an error: the result is correct without them."""


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


_NO_EXPERTS = "there are no experts in these models; leave it out"
_PLAIN_KERNELS = "torch's own kernels are used, for any model; leave it out"
_ROWS = "int8 weights have one scale for each output row, max / 127, found when the model is loaded; leave it out"
_OFF = (None, False)

ARGUMENTS: dict[str, AcceptedArgument | FixedArgument] = {
    "tensor_parallel.tp_size": AcceptedArgument("tp_size", "a number of ranks, 1 or more", _is_positive_int),
    "tensor_parallel.mpu": AcceptedArgument("mpu", "an object with get_{model,data}_parallel_group()",
                                            lambda value: True),
    "tensor_parallel.tp_group": AcceptedArgument("tp_group", "a process group of torch.distributed",
                                                 lambda value: True),
    "tensor_parallel.enabled": FixedArgument((True,), "tp_size 1 is a whole model; give that"),
    "tensor_parallel.tp_grain_size": FixedArgument((1, 64), "parts are equal; leave it out", warns_only=True),
    "dtype": AcceptedArgument("dtype", "torch.float32, torch.bfloat16, torch.float16 or torch.int8, or their names",
                              lambda value: str(value) in DTYPES, lambda value: DTYPES[str(value)]),
    "checkpoint": AcceptedArgument(
        "checkpoint", "a folder, or DeepSpeed's JSON description (a path or a dict)",
        lambda value: isinstance(value, Mapping) or _is_path(value) and bool(os.fspath(value)),
        lambda value: value if isinstance(value, Mapping) else os.fspath(value)),
    "base_dir": AcceptedArgument("base_dir", "a folder", _is_path, os.fspath),
    "replace_with_kernel_inject": AcceptedArgument("fast", "true or false", lambda value: isinstance(value, bool)),
    "injection_policy": AcceptedArgument("policy", "{LayerClass: names of its row-parallel layers}, or {LayerClass: "
                                         "Cut(...)}", lambda value: isinstance(value, Mapping) and bool(value)),
    "example_inputs": AcceptedArgument("example_inputs", "inputs that the model takes", lambda value: True),
    "max_out_tokens": AcceptedArgument("max_out_tokens", "a number of tokens, 1 or more", _is_positive_int),
    "min_out_tokens": AcceptedArgument("min_out_tokens", "a number of tokens, 1 or more", _is_positive_int),
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
"""Other names of a key -> its path in ARGUMENTS."""
SECTIONS = {path.rpartition(".")[0] for path in ARGUMENTS} - {""} | {"quant"}


def parse_arguments(config: Any, given: Mapping[str, Any]) -> InferenceArguments:
    """The call's arguments, merged with the keys of `config` (a dict or a JSON file). One error lists all problems."""
    problems = ErrorList()
    if config is not None and not isinstance(config, Mapping):
        require(_is_path(config),
                f"init_inference: config is {_format_value(config)}: expected a dict or the path of a JSON file")
        name = os.fspath(config)
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"init_inference: config {name}: cannot be read ({error})") from error
        config = parse_loose_json(text, name, problems)
        require(isinstance(config, dict), f"{name}: expected an object {{...}}")
    values = dict[str, tuple[str, Any]]()  # path -> (the key as the caller wrote it, value)
    for tree, where in ((config or {}, " of config"), (given, "")):
        for path, written, value in _walk_keys(tree, where, "", problems):
            _check_value(path, written, value, values, problems)
    problems.raise_if_any("init_inference")
    fields, notes = dict[str, Any](), []
    for path, (written, value) in values.items():
        row = ARGUMENTS[path]
        if isinstance(row, AcceptedArgument):
            fields[row.field_name] = value
        elif not _is_one_of(value, row.accepted_values):
            notes.append(f"{written} has no effect: {row.explanation}")
    return InferenceArguments(**fields, notes=tuple(notes))


def _walk_keys(tree: Mapping[str, Any], location: str, prefix: str,
               problems: ErrorList) -> Iterator[tuple[str, str, Any]]:
    """(path in ARGUMENTS, key as the caller wrote it, value)."""
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
            section, _, name = written.rpartition(".")
            known = [other for other in [*ARGUMENTS, *SECTIONS, *ALIASES] if other.rpartition(".")[0] == section]
            near = (difflib.get_close_matches(written, known, n=1, cutoff=0.6)
                    or [other for other in ARGUMENTS if other.rpartition(".")[2] == name])
            hint = f"did you mean {near[0]}?" if near else "docs/inference.md lists every argument"
            problems.append(f"{written}{location} is unknown; {hint}")


def _check_value(path: str, written: str, value: Any, values: dict[str, tuple[str, Any]], problems: ErrorList) -> None:
    row, converted = ARGUMENTS[path], value
    if isinstance(row, AcceptedArgument):
        if value is None:
            return
        if not row.accepts(value):
            problems.append(f"{written} is {_format_value(value)}: expected {row.expected}")
            return
        converted = row.convert(value)
    elif not row.warns_only and not _is_one_of(value, row.accepted_values):
        problems.append(f"{written} is {_format_value(value)}, which is not supported: {row.explanation}")
    before, other = values.setdefault(path, (written, converted))
    if other is not converted and other != converted:
        problems.append(
            f"{before} is {_format_value(other)} and {written} is {_format_value(value)}: leave one of them out")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Equality where True is not 1."""
    return any(type(value) is type(one) and value == one for one in values)


def _format_value(value: Any) -> str:
    return f"{value!r:.80}"
