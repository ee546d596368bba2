"""`megatron.inference.init_inference`: prepares a model for inference, with DeepSpeed's arguments. Collective over all
ranks.

    engine = init_inference(model, tensor_parallel={"tp_size": 2}, dtype=torch.bfloat16)
    logits = engine(input_ids)

The model is our GPT-2 (in memory or from a checkpoint), transformers' GPT-2, or any module with an injection policy.
Weights of a GPT-2 are read like a checkpoint (load.py), at any tensor parallel size and precision. Other modules are
changed in place, as DeepSpeed does; every check that can run before the change runs before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint, parameter_shapes
from megatron.checkpoint.convert.importers import HUGGING_FACE, REQUIRED_CONFIG, SUPPORTED_GELU, model_config_of
from megatron.checkpoint.reshard import TPSlice
from megatron.checkpoint.tags import describe_format
from megatron.config.hf_config import HF_CONFIG_FILE, model_fields_of, read_json_object
from megatron.config.schema import require
from megatron.config.tree import ModelConfig
from megatron.distributed import exit_codes, process_group
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import CheckpointError, ConfigError, TrainerError
from megatron.inference import load
from megatron.inference.api.arguments import InferenceArguments, parse_arguments
from megatron.inference.api.engine import InferenceEngine, broadcast_rng_state
from megatron.inference.api.policy import TPPlan, make_tp_plan
from megatron.inference.api.shard_module import (TPEquivalenceCheck, assert_tensors_equal_across_ranks, check_divisible,
                                                 check_not_poisoned, full_row_maxima, linear_layers, poison_on_failure,
                                                 quantize_layers, shard_module)
from megatron.inference.int8 import activation_dtype
from megatron.inference.load import OpenedModel
from megatron.model.gpt2 import GPT2
from megatron.zero.api.init import groups_from_mpu
from mpu import groups as mpu_groups
from mpu.groups import Group, Groups
from mpu.partition import partition_of, set_partition


HF_GPT2_CLASS = "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"


def init_inference(model: nn.Module | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
                   **kwargs: Any) -> InferenceEngine:
    """The engine of a model; docs/inference.md lists the arguments, which are DeepSpeed's."""
    exit_codes.install_excepthook()
    args = parse_arguments(config, kwargs)
    env = process_group.init_process_group()
    groups = _build_groups(args)
    device = process_group.device_for(env)
    require(model is None or isinstance(model, nn.Module), f"init_inference: model is a {type(model).__name__}: "
            "expected a module (of an engine that trains, save a checkpoint, and give checkpoint=, its folder)")
    if model is not None:
        check_not_poisoned(model)
    notes = list(args.notes)
    engine = (_init_gpt2(model, args, groups, device) if model is None or isinstance(model, GPT2) else
              _init_other_module(model, args, groups, device, notes))
    for note in notes if groups.world.rank == 0 else ():
        print(f"note: init_inference: {note}", file=sys.stderr, flush=True)
    return engine.eval()


def _build_groups(args: InferenceArguments) -> Groups:
    """From the given process groups, or tensor parallel groups of `tp_size` ranks."""
    size = args.tp_size
    require(args.mpu is None or args.tp_group is None,
            "init_inference: give one of tensor_parallel.mpu and tensor_parallel.tp_group")
    if args.mpu is not None:
        groups = groups_from_mpu(args.mpu)
    elif args.tp_group is not None:
        groups = mpu_groups.groups_from_process_groups(args.tp_group, None)
    else:
        world = process_group.read_environment().world_size
        require(world % (size or 1) == 0, f"init_inference: tensor_parallel.tp_size is {size}, and there are {world} "
                f"ranks: start {size} of them, or a multiple (python -m megatron.launch --nproc-per-node {size} "
                "SCRIPT)")
        return mpu_groups.build(size or 1)
    require(size in (None, groups.tp.size), f"init_inference: tensor_parallel.tp_size is {size}, and the given group "
            f"has {groups.tp.size} ranks: leave tp_size out")
    return groups


# ---- our GPT-2 ------------------------------------------------------------------------------------------------------

def _init_gpt2(model: GPT2 | None, args: InferenceArguments, groups: Groups, device: torch.device) -> InferenceEngine:
    require(args.injection_policy is None, "init_inference: injection_policy is for models that are not ours: our "
            "GPT-2 is cut by itself; leave it out")
    if args.checkpoint is not None:
        opened = open_weights(args.checkpoint, args.base_dir, groups, model)
    elif model is None:
        raise ConfigError("init_inference needs a model, or checkpoint=: the folder of one")
    else:
        if model.tp.size == groups.tp.size and args.dtype is not torch.int8:
            _check_token_limits(model.config, args)
            all_succeed_or_raise(lambda: _check_finite(model, args.dtype), groups.world)
            with poison_on_failure(model) if args.dtype else nullcontext():
                model.to(device, args.dtype)
            return InferenceEngine(model, model, groups.tp, args.max_out_tokens)
        wanted = "be int8" if args.dtype is torch.int8 else f"be for {groups.tp.size}"
        require(model.tp.is_solo, f"init_inference: the given model is split over {model.tp.size} ranks and cannot "
                f"{wanted}: save it, and give checkpoint=, which loads at any size")
        _check_equal_weights(model, groups)
        shape = model.config
        tensors = {name: tensor.detach()[: shape.known_vocab_size] if name == "wte.weight" else tensor.detach()
                   for name, tensor in model.named_parameters()}
        weights = ExternalCheckpoint("the given model", shape, {name: lambda tensor=tensor: tensor  # type: ignore[misc]
                                                                for name, tensor in tensors.items()})
        opened = OpenedModel(weights.read_slice, shape, {}, "fp32", "the given model")
    _check_token_limits(opened.shape, args)
    dtype = args.dtype or (load.DTYPES[opened.precision] if model is None else next(model.parameters()).dtype)
    made = load.build_model(opened, groups, dtype, device)
    return InferenceEngine(made, made, groups.tp, args.max_out_tokens)


def _check_token_limits(shape: ModelConfig, args: InferenceArguments) -> None:
    positions = shape.max_position_embeddings
    limit = min(args.max_out_tokens or positions, positions)
    require(args.min_out_tokens <= limit, f"init_inference: min_out_tokens is {args.min_out_tokens}, and there is "
            f"room for {limit}: the model has {positions} positions"
            + (f", and max_out_tokens is {args.max_out_tokens}" if args.max_out_tokens else ""))


def _check_equal_weights(model: nn.Module, groups: Groups) -> None:
    assert_tensors_equal_across_ranks(model.parameters(), groups.tp, "weights", "load the same checkpoint on every "
                                      "rank, or set the same seed before the model is made")


# ---- checkpoints ----------------------------------------------------------------------------------------------------

def open_weights(given: str | Mapping[str, Any], base_dir: str, groups: Groups, model: Any) -> OpenedModel:
    """Opens a checkpoint folder of ours, a Hugging Face GPT-2 folder, or the folder that DeepSpeed's description
    `{"type": "ds_model", "checkpoints": FOLDER}` names, for `model` if there is one. Collective."""
    folder = Path(base_dir, given if isinstance(given, str) else "")
    if folder.suffix == ".json":
        given = read_json_object(folder)
    if isinstance(given, Mapping):
        files = given.get("checkpoints")
        if not isinstance(files, str):
            raise CheckpointError(
                f"checkpoint: a list of files of type {given.get('type')!r} is not read here: make a checkpoint of it "
                "with `python -m megatron.checkpoint convert` (docs/checkpoints.md), which loads at any tp_size, and "
                "give checkpoint=FOLDER")
        folder = Path(base_dir or given.get("base_dir") or "", files)
    is_hf = (folder / HF_CONFIG_FILE).is_file() and "Hugging Face" in describe_format(folder)
    opened = (load.open_hf_folder if is_hf else load.open_run_checkpoint)(os.fspath(folder), groups)
    if model is not None:
        all_succeed_or_raise(lambda: check_same_shape(model, opened), groups.world)
    return opened


def check_same_shape(model: Any, opened: OpenedModel) -> None:
    """Raises ConfigError unless the checkpoint fits a GPT-2 of ours or of transformers. Equal names and shapes of the
    weights are not enough."""
    its, theirs = opened.shape.architecture(), {} if isinstance(model, GPT2) else model.config.to_dict()
    wanted = model.config if isinstance(model, GPT2) else ModelConfig(**model_fields_of(theirs))
    gelu, ours = theirs.get("activation_function", SUPPORTED_GELU[0]), wanted.architecture()
    values = {**{name: (saved, ours[name]) for name, saved in its.items()},
              **{name: (value, theirs.get(name, value)) for name, value in REQUIRED_CONFIG.items()},
              "activation_function": (gelu if gelu in SUPPORTED_GELU else SUPPORTED_GELU[0], gelu)}
    differing = [f"its {name} is {saved}, and the given model's is {given}" for name, (saved, given) in values.items()
                 if saved != given]
    require(not differing, f"checkpoint {opened.name} is another model: {'; '.join(differing)}; leave the model out, "
            "and it is made as the checkpoint says")


# ---- a model that is not ours ---------------------------------------------------------------------------------------

def _init_other_module(model: nn.Module, args: InferenceArguments, groups: Groups, device: torch.device,
                       notes: list[str]) -> InferenceEngine:
    filling: AbstractContextManager[None] = nullcontext()
    is_headed_gpt2 = f"{type(model).__module__}.{type(model).__name__}" == HF_GPT2_CLASS
    if args.checkpoint is not None:
        require(is_headed_gpt2, f"init_inference: checkpoint= fills a GPT-2, and the model is a "
                f"{type(model).__name__}: load its weights first (from_pretrained, or load_state_dict), and leave "
                "checkpoint out")
        opened = open_weights(args.checkpoint, args.base_dir, groups, model)
        filling = fill_hf_model(model, opened, groups)

    def make_plan() -> TPPlan:
        """Depends on the layers only; their weights may not be loaded yet."""
        plan = make_tp_plan(model, args.injection_policy)
        require(bool(plan.tp_layers) or groups.tp.is_solo, f"init_inference: how a {type(model).__name__} is cut over "
                f"{groups.tp.size} ranks is not known: give injection_policy={{LayerClass: (names of its row-parallel "
                "layers,)}} (docs/inference.md)")
        check_divisible(model, plan, groups.tp)
        if args.dtype is torch.int8:
            linear_layers(model, plan)
        return plan

    def check_weights() -> dict[str, Tensor]:
        _check_equal_weights(model, groups)
        if args.dtype is torch.int8:
            return full_row_maxima(model, plan)
        _check_finite(model, args.dtype)
        return {}

    def shard() -> None:
        shard_module(model, plan, groups.tp)
        if equivalence is not None:
            equivalence.check_sharded()

    plan = all_succeed_or_raise(make_plan, groups.world)
    with filling:
        maxima = all_succeed_or_raise(check_weights, groups.world)
        equivalence = all_succeed_or_raise(
            lambda: None if groups.tp.is_solo else TPEquivalenceCheck(model, plan, args.example_inputs, groups.tp),
            groups.world)
    with poison_on_failure(model) if plan.tp_layers or args.dtype else nullcontext():
        all_succeed_or_raise(shard, groups.world)
        if args.dtype is torch.int8:
            quantize_layers(model, plan, maxima, groups.world, activation_dtype(device), device)
        else:
            model.to(device, args.dtype)
    model.eval().requires_grad_(False)
    broadcast_rng_state(groups.tp)
    if args.replace_with_kernel_inject and is_headed_gpt2:
        try:
            gpt2 = gpt2_from_hf_layers(model, groups.tp)
            _check_token_limits(gpt2.config, args)
            return InferenceEngine(model, gpt2, groups.tp, args.max_out_tokens)
        except TrainerError as error:
            notes.append(f"replace_with_kernel_inject has no effect: {error}")
    elif args.replace_with_kernel_inject:
        notes.append(f"replace_with_kernel_inject has no effect: there is no decoder for a {type(model).__name__}")
    return InferenceEngine(model, None, groups.tp, args.max_out_tokens)


@torch.no_grad()
def _check_finite(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Raises CheckpointError for a parameter that is not finite once cast to `dtype`."""
    for name, value in model.named_parameters():
        if not value.is_floating_point() or not value.numel():
            continue
        ends = torch.stack(value.aminmax())  # a cast keeps the order of numbers
        if not bool(ends.to(dtype or value.dtype).isfinite().all()):
            raise CheckpointError(f"{name} is not finite in {str(dtype or 'its precision').removeprefix('torch.')}: "
                                  "ask for another dtype")


# ---- GPT-2 of transformers ------------------------------------------------------------------------------------------

@contextmanager
def fill_hf_model(model: nn.Module, opened: OpenedModel, groups: Groups) -> Iterator[None]:
    """Copies the weights into a GPT-2 of transformers; an exception inside restores its own ones. Collective."""
    own = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in model.parameters()]

    @torch.no_grad()
    def copy_weights() -> None:
        parameters = dict(model.named_parameters())
        for name, shape in parameter_shapes(opened.shape).items():
            values = torch.empty(shape)
            opened.read_slice("weight", name, TPSlice(shape), 0, values.view(-1))
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


@torch.no_grad()
def gpt2_from_hf_layers(theirs: Any, tp: Group) -> GPT2:
    """A GPT2 that shares the sharded layers of a GPT-2 of transformers, for our decoder. Raises ConfigError where ours
    would compute something else."""
    shape = model_config_of(theirs.config.to_dict(), "the given model")
    body, head = theirs.transformer, theirs.lm_head
    require(head.weight is body.wte.weight and head.bias is None, "its lm_head is not the token table")
    made = GPT2(shape, tp, deferred=True)
    for block, their_block in zip(made.blocks, body.h, strict=True):
        for their_name, our_name in HUGGING_FACE.modules.items():
            block.set_submodule(our_name, their_block.get_submodule(their_name))
    made.wpe, made.ln_f = body.wpe, body.ln_f
    # one padded token table: theirs is a view of the real rows, ours of this rank's rows
    table, partition = body.wte.weight, partition_of(made.wte.weight)
    padded = F.pad(table, (0, 0, 0, made.wte.padded_shape[0] - len(table)))
    body.wte.weight = head.weight = nn.Parameter(padded[: len(table)], requires_grad=False)
    start, stop = made.wte.vocab_range
    made.wte.weight = nn.Parameter(padded[start:stop], requires_grad=False)
    set_partition(made.wte.weight, partition)
    return made.eval().requires_grad_(False)
