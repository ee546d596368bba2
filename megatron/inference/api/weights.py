"""Where `init_inference` takes the weights of a GPT-2 from: a checkpoint, DeepSpeed's JSON description of one, or a
model in memory (ours or transformers'). All are read like a checkpoint, at any tensor parallel size and precision
(load.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.checkpoint.convert.detect_format import describe_format
from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint, parameter_shapes
from megatron.checkpoint.convert.importers import HUGGING_FACE, REQUIRED_CONFIG, SUPPORTED_GELU, model_config_of
from megatron.config.config_errors import ErrorList
from megatron.config.ds_reader import parse_loose_json, to_plain_dicts
from megatron.config.hf_config import HF_CONFIG_FILE, HF_FIELDS, model_fields_of
from megatron.config.schema import require
from megatron.config.tree import ModelConfig
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import CheckpointError
from megatron.inference.load import OpenedModel, open_hf_folder, open_run_checkpoint
from megatron.model.gpt2 import GPT2
from mpu.groups import Group, Groups
from mpu.partition import partition_of, set_partition

HF_NAMES = {ours: theirs for theirs, (ours, _) in HF_FIELDS.items()}


def open_weights(given: str | Mapping[str, Any], base_dir: str, groups: Groups) -> OpenedModel:
    """Opens a checkpoint folder of ours, a Hugging Face GPT-2 folder, or the folder that DeepSpeed's description
    `{"type": "ds_model", "checkpoints": FOLDER}` names. Collective."""
    name = given if isinstance(given, str) else "checkpoint"
    folder = Path(base_dir, name)
    if isinstance(given, str) and folder.suffix == ".json":
        try:
            problems = ErrorList()
            given = to_plain_dicts(parse_loose_json(folder.read_text(encoding="utf-8"), name), problems)
            problems.raise_if_any(name)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"checkpoint {folder}: cannot be read ({error})") from error
        require(isinstance(given, Mapping), f"{name}: expected an object {{...}}")
    if isinstance(given, Mapping):
        files = given.get("checkpoints")
        if not isinstance(files, str):
            raise CheckpointError(
                f"{name}: a list of files of type {given.get('type')!r} is not read here: make a checkpoint of it with "
                "`python -m megatron.checkpoint convert` (docs/checkpoints.md), which loads at any tp_size, and give "
                "checkpoint=FOLDER")
        folder = Path(base_dir or given.get("base_dir") or "", files)
    is_hf = (folder / HF_CONFIG_FILE).is_file() and "Hugging Face" in describe_format(folder)
    return (open_hf_folder if is_hf else open_run_checkpoint)(os.fspath(folder), groups)


def weights_of_gpt2(model: GPT2) -> OpenedModel:
    """A model in memory that is not sharded."""
    shape = model.config
    tensors = {name: tensor.detach()[: shape.known_vocab_size] if name == "wte.weight" else tensor.detach()
               for name, tensor in model.named_parameters()}
    weights = ExternalCheckpoint("the given model", shape, {name: lambda tensor=tensor: tensor  # type: ignore[misc]
                                                            for name, tensor in tensors.items()})
    return OpenedModel(weights, shape, {}, "fp32", "the given model")


def check_same_shape(wanted: ModelConfig, opened: OpenedModel) -> None:
    """Raises ConfigError unless the checkpoint fits a model of ours."""
    _require_equal(opened, _compare(wanted, opened, {}))


def _compare(wanted: ModelConfig, opened: OpenedModel, names: Mapping[str, str]) -> dict[str, tuple[Any, Any]]:
    ours = wanted.architecture()
    return {names.get(key, key): (its, ours[key]) for key, its in opened.shape.architecture().items()}


def check_not_meta(name: str, value: Tensor) -> None:
    require(not value.is_meta, f"init_inference: {name} is on the meta device, and has no values: make the model on "
            "another one, or load its weights first")


def check_hf_model(model: Any, opened: OpenedModel) -> None:
    """Raises ConfigError unless the checkpoint fits a GPT-2 of transformers. Equal names and shapes of the weights are
    not enough."""
    for name, value in model.named_parameters():
        check_not_meta(name, value)
    config = model.config.to_dict()
    wanted = ModelConfig(**model_fields_of(config))
    gelu = config.get("activation_function", SUPPORTED_GELU[0])
    _require_equal(opened, {
        **_compare(wanted, opened, HF_NAMES),
        **{name: (value, config.get(name, value)) for name, value in REQUIRED_CONFIG.items()},
        "activation_function": (gelu if gelu in SUPPORTED_GELU else SUPPORTED_GELU[0], gelu)})


def _require_equal(opened: OpenedModel, values: Mapping[str, tuple[Any, Any]]) -> None:
    """`values`: name -> (of the checkpoint, of the model)."""
    differing = [f"its {name} is {its}, and the given model's is {ours}" for name, (its, ours) in values.items()
                 if its != ours]
    require(not differing, f"checkpoint {opened.name} is another model: {'; '.join(differing)}; leave the model out, "
            "and it is made as the checkpoint says")


@contextmanager
def fill_hf_model(model: nn.Module, opened: OpenedModel, groups: Groups) -> Iterator[None]:
    """Copies the weights into a GPT-2 of transformers; an exception inside restores its own ones. Collective."""
    own = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in model.parameters()]

    @torch.no_grad()
    def copy_weights() -> None:
        parameters = dict(model.named_parameters())
        for name, shape in parameter_shapes(opened.shape).items():
            values = torch.empty(shape)
            opened.weights.read("weight", name, shape=shape, partition=None, tp_rank=0, tp_size=1, offset=0,
                                out=values.view(-1))
            values = values.t() if HUGGING_FACE.is_transposed(name) else values
            parameters[HUGGING_FACE.to_their_name(name, "transformer.")].copy_(values)

    try:
        all_succeed_or_raise(copy_weights, groups.world)
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, values in own:
                parameter.copy_(values)
        raise


HF_GPT2_CLASS = "GPT2LMHeadModel"


@torch.no_grad()
def gpt2_from_hf_layers(theirs: Any, tp: Group) -> GPT2:
    """A GPT2 that shares the sharded layers of a GPT-2 of transformers, for our decoder. Raises ConfigError where ours
    would compute something else."""
    shape = model_config_of(theirs.config.to_dict(), "the given model")
    body, head = theirs.transformer, theirs.lm_head
    require(head.weight is body.wte.weight and head.bias is None, "its lm_head is not the token table")
    made = GPT2(shape, tp, deferred=True)
    for block, their in zip(made.blocks, body.h, strict=True):
        for ours, layer in (("ln_1", their.ln_1), ("attn.qkv", their.attn.c_attn), ("attn.proj", their.attn.c_proj),
                            ("ln_2", their.ln_2), ("mlp.fc", their.mlp.c_fc), ("mlp.proj", their.mlp.c_proj)):
            block.set_submodule(ours, layer)
    made.wpe, made.ln_f = body.wpe, body.ln_f
    # one padded token table: theirs is a view of the real rows, ours of this rank's rows
    table, partition = body.wte.weight, partition_of(made.wte.weight)
    padded = F.pad(table, (0, 0, 0, made.wte.padded_shape[0] - len(table)))
    body.wte.weight = head.weight = nn.Parameter(padded[: len(table)], requires_grad=False)
    start, stop = made.wte.vocab_range
    made.wte.weight = nn.Parameter(padded[start:stop], requires_grad=False)
    set_partition(made.wte.weight, partition)
    return made.eval().requires_grad_(False)
