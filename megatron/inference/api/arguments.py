"""The arguments of `init_inference`: DeepSpeed's names, from the call and from `config`.

Each name that DeepSpeed's call knows has a row: an argument that is used, one that is refused unless its value changes
nothing, or one that never has an effect. The call and `config` may both give an argument if they give the same value.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from megatron.config.ds_json import parse_loose_json
from megatron.config.schema import ErrorList, require
from megatron.errors import ConfigError
from megatron.inference import load

DTYPES = {**load.DTYPES, **{str(dtype): dtype for dtype in load.DTYPES.values()}, "float32": torch.float32,
          "float": torch.float32, "bfloat16": torch.bfloat16, "bfloat": torch.bfloat16, "float16": torch.float16,
          "half": torch.float16}


def _positive_int(value: Any) -> int | None:
    return value if type(value) is int and value >= 1 else None


def _path(value: Any) -> str | None:
    return os.fspath(value) if isinstance(value, str | os.PathLike) else None


def _used(expected: str, convert: Callable[[Any], Any] = lambda value: value, default: Any = None,
          section: str = "") -> Any:
    """An argument that is used: what is expected, and its value by `convert`, where None is refused."""
    return field(default=default, metadata={"section": section, "expected": expected, "convert": convert})


@dataclass(frozen=True)
class InferenceArguments:
    tp_size: int | None = _used("a number of ranks, 1 or more", _positive_int, section="tensor_parallel.")
    mpu: Any = _used("an object with get_{model,data}_parallel_group()", section="tensor_parallel.")
    tp_group: Any = _used("a process group of torch.distributed", section="tensor_parallel.")
    # None: that of the model.
    dtype: torch.dtype | None = _used("torch.float32, torch.bfloat16, torch.float16 or torch.int8, or their names",
                                      lambda value: DTYPES.get(str(value)))
    checkpoint: str | Mapping[str, Any] | None = _used(
        "a folder, or DeepSpeed's JSON description (a path or a dict)",
        lambda value: value if isinstance(value, Mapping) else _path(value) or None)
    base_dir: str = _used("a folder", _path, "")
    # Generate with our decoder, where it supports the model.
    replace_with_kernel_inject: bool = _used("true or false", lambda value: value if isinstance(value, bool) else None,
                                             False)
    injection_policy: Mapping[Any, Any] | None = _used(
        "{LayerClass: names of its row-parallel layers}, or {LayerClass: Cut(...)}",
        lambda value: value if isinstance(value, Mapping) and value else None)
    example_inputs: Any = _used("inputs that the model takes")
    max_out_tokens: int | None = _used("a number of tokens, 1 or more", _positive_int)
    min_out_tokens: int = _used("a number of tokens, 1 or more", _positive_int, 1)
    notes: tuple[str, ...] = field(default=(), compare=False)


USED_ARGUMENTS = {item.metadata["section"] + item.name: item for item in fields(InferenceArguments) if item.metadata}

_OFF = (None, False)
_NO_EXPERTS = "there are no experts in these models; leave it out"
_ROWS = "int8 weights have one scale for each output row, max / 127, found when the model is loaded; leave it out"
_ACTIVATIONS = "activations are not quantised; leave it out"

# Path -> the values that change nothing, and what to do instead of another one.
FIXED_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel.enabled": ((True,), "tp_size 1 is a whole model; give that"),
    "return_tuple": ((None, True, False), "layers return what they did"),
    "triangular_masking": ((True,), "the mask is the model's own; leave it out"),
    "transposed_mode": (_OFF, "the class of a layer says how its matrix lies; leave it out"),
    "set_empty_params": (_OFF, "with checkpoint= and no model, each rank makes and reads its part alone; leave it out"),
    "keep_module_on_host": (_OFF, "a rank's part goes to its device; CUDA_VISIBLE_DEVICES= (empty) runs on the CPU"),
    "save_mp_checkpoint_path": ((None,), "a checkpoint of ours loads at any tp_size: no copy for each is needed"),
    "checkpoint_config": ((None, {}), "give checkpoint=, and base_dir= if it is relative"),
    "zero": ((None, {}, *({"stage": stage} for stage in range(3))),
             "weights are split by tensor_parallel.tp_size; leave it out"),
    "injection_policy_tuple": ((None,), "give injection_policy={LayerClass: (names,)}"),
    "config": ((None, {}), "give its keys directly"),
    "quantization_setting": ((None,), _ROWS),
    "quant.enabled": ((True, False), "give true or false"),
    "quant.weight.enabled": ((True, False), "give true or false"),
    "quant.weight.num_bits": ((8,), "weights are int8 (dtype=torch.int8) or not quantised"),
    "quant.weight.q_type": (("symmetric",), _ROWS),
    "quant.weight.q_groups": ((1,), _ROWS),
    "quant.weight.quantized_initialization": ((None, {}), _ROWS),
    "quant.weight.post_init_quant": ((None, {}), _ROWS),
    "quant.activation.enabled": ((False,), _ACTIVATIONS),
    **{f"quant.activation.{name}": (("symmetric", 1, 8), _ACTIVATIONS) for name in ("num_bits", "q_type", "q_groups")},
    "quant.qkv.enabled": ((True,), "all matrices of a block are quantised, with dtype=torch.int8; leave it out"),
    "moe": ((None, False, {}, {"enabled": False}), _NO_EXPERTS),
    "moe_type": (("standard",), _NO_EXPERTS),
    "moe_experts": (([1], (1,)), _NO_EXPERTS),
    "ep_size": ((1,), _NO_EXPERTS),
    "ep_group": ((None,), _NO_EXPERTS),
    "ep_mp_group": ((None,), _NO_EXPERTS)}

_PLAIN_KERNELS = "torch's own kernels are used, for any model; leave it out"
# Path -> the values that need no note, and the note.
ARGUMENTS_WITHOUT_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel.tp_grain_size": ((1, 64), "parts are equal; leave it out"),
    "replace_method": ((None, "auto", ""), "DeepSpeed ignores it too; leave it out"),
    "training_mp_size": ((None, 1), "a checkpoint says itself over how many ranks it was trained"),
    "enable_cuda_graph": (_OFF, "graphs are not captured"),
    "use_triton": (_OFF, _PLAIN_KERNELS),
    "triton_autotune": (_OFF, _PLAIN_KERNELS)}

ARGUMENTS = (*USED_ARGUMENTS, *FIXED_ARGUMENTS, *ARGUMENTS_WITHOUT_EFFECT)
SECTIONS = {path.rpartition(".")[0] for path in ARGUMENTS} - {""} | {"quant"}
# Other names of a key -> its path.
ALIASES = {"mp_size": "tensor_parallel.tp_size", "mpu": "tensor_parallel.mpu", "tp": "tensor_parallel",
           "kernel_inject": "replace_with_kernel_inject", "injection_dict": "injection_policy",
           "max_tokens": "max_out_tokens", "min_tokens": "min_out_tokens", "tm": "triangular_masking",
           "ckpt_config": "checkpoint_config", "args": "config", "expert_group": "ep_group",
           "expert_mp_group": "ep_mp_group"}


def parse_arguments(config: Any, given: Mapping[str, Any]) -> InferenceArguments:
    """The call's arguments, merged with the keys of `config` (a dict or a JSON file). One error lists all problems."""
    problems = ErrorList()
    if config is not None and not isinstance(config, Mapping):
        require((name := _path(config)) is not None,
                f"init_inference: config is {config!r:.80}: expected a dict or the path of a JSON file")
        assert name is not None
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"init_inference: config {name}: cannot be read ({error})") from error
        config = parse_loose_json(text, name, problems)
        require(isinstance(config, dict), f"{name}: expected an object {{...}}")
    written_as, values, notes = dict[str, str](), dict[str, Any](), dict[str, str]()
    for tree, where in ((config or {}, " of config"), (given, "")):
        for path, written, value in _walk_keys(tree, where, "", problems):
            converted = value
            if path in USED_ARGUMENTS:
                if value is None:
                    continue
                metadata = USED_ARGUMENTS[path].metadata
                if (converted := metadata["convert"](value)) is None:
                    problems.append(f"{written} is {value!r:.80}: expected {metadata['expected']}")
                    continue
            elif path in FIXED_ARGUMENTS:
                accepted, remedy = FIXED_ARGUMENTS[path]
                problems.require(_is_one_of(value, accepted),
                                 f"{written} is {value!r:.80}, which is not supported: {remedy}")
            elif not _is_one_of(value, ARGUMENTS_WITHOUT_EFFECT[path][0]):
                notes[path] = f"{written} has no effect: {ARGUMENTS_WITHOUT_EFFECT[path][1]}"
            before, other = written_as.setdefault(path, written), values.setdefault(path, converted)
            problems.require(other is converted or other == converted,
                             f"{before} is {other!r:.80} and {written} is {value!r:.80}: leave one of them out")
    problems.raise_if_any("init_inference")
    used = {USED_ARGUMENTS[path].name: value for path, value in values.items() if path in USED_ARGUMENTS}
    return InferenceArguments(**used, notes=tuple(notes.values()))


def _walk_keys(tree: Mapping[str, Any], location: str, prefix: str,
               problems: ErrorList) -> Iterator[tuple[str, str, Any]]:
    """(path, key as the caller wrote it, value) of each argument."""
    for key, value in tree.items():
        written = f"{prefix}{key}"
        path = ALIASES.get(written, written)
        if path in SECTIONS and isinstance(value, Mapping):
            yield from _walk_keys(value, location, f"{path}.", problems)
        elif path in ARGUMENTS:
            yield path, written + location, value
        elif path in SECTIONS:
            problems.require(value is None, f"{written}{location} is {value!r:.80}: expected an object, such as "
                             + ('{"tp_size": 2}' if path == "tensor_parallel" else '{"enabled": true}'))
        else:
            section, _, name = written.rpartition(".")
            known = [other for other in [*ARGUMENTS, *SECTIONS, *ALIASES] if other.rpartition(".")[0] == section]
            near = (difflib.get_close_matches(written, known, n=1, cutoff=0.6)
                    or [other for other in ARGUMENTS if other.rpartition(".")[2] == name])
            hint = f"did you mean {near[0]}?" if near else "docs/inference.md lists every argument"
            problems.append(f"{written}{location} is unknown; {hint}")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Equality where True is not 1."""
    return any(type(value) is type(one) and value == one for one in values)
