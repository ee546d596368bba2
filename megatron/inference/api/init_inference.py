"""`megatron.inference.init_inference`: prepares a model for inference, with DeepSpeed's arguments. Collective over all
ranks.

    engine = init_inference(model, tensor_parallel={"tp_size": 2}, dtype=torch.bfloat16)
    logits = engine(input_ids)

The model is our GPT-2 (in memory or from a checkpoint), transformers' GPT-2, or any module with an injection
policy. Other modules are changed in place, as DeepSpeed does; every check that can run before the change runs
before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron.config.schema import require
from megatron.config.tree import ModelConfig
from megatron.distributed import exit_codes, process_group
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import CheckpointError, ConfigError, TrainerError
from megatron.inference import load
from megatron.inference.api import arguments, weights
from megatron.inference.api.arguments import InferenceArguments
from megatron.inference.api.engine import InferenceEngine, broadcast_rng_state
from megatron.inference.api.equivalence import TPEquivalenceCheck, assert_weights_equal_across_ranks
from megatron.inference.api.policy import TPPlan, make_tp_plan
from megatron.inference.api.shard_module import (check_divisible, check_not_poisoned, check_scales, int8_layers,
                                                 poison_on_failure, quantize_layers, shard_module)
from megatron.inference.api.weights import HF_GPT2_CLASS, gpt2_from_hf_layers
from megatron.inference.int8 import activation_dtype
from megatron.model.gpt2 import GPT2
from megatron.zero.api.init import groups_from_mpu
from mpu import groups as mpu_groups
from mpu.groups import Groups


def init_inference(model: nn.Module | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
                   **kwargs: Any) -> InferenceEngine:
    """The engine of a model; docs/inference.md lists the arguments, which are DeepSpeed's."""
    exit_codes.install_excepthook()
    args = arguments.parse_arguments(config, kwargs)
    env = process_group.init()
    groups = _build_groups(args)
    device = process_group.device_for(env)
    notes = list(args.notes)
    if model is None or isinstance(model, GPT2):
        engine = _init_gpt2(model, args, groups, device)
    else:
        require(isinstance(model, nn.Module), f"init_inference: model is a {type(model).__name__}: expected a module "
                "(of an engine that trains, save a checkpoint, and give checkpoint=, its folder)")
        engine = _init_other_module(model, args, groups, device, notes)
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
    require(args.policy is None, "init_inference: injection_policy is for models that are not ours: our GPT-2 is cut "
            "by itself; leave it out")
    if args.checkpoint is not None:
        opened = weights.open_weights(args.checkpoint, args.base_dir, groups)
        if model is not None:
            shape = model.config
            all_succeed_or_raise(lambda: weights.check_same_shape(shape, opened), groups.world)
    elif model is None:
        raise ConfigError("init_inference needs a model, or checkpoint=: the folder of one")
    else:
        check_not_poisoned(model)
        if model.tp.size == groups.tp.size and args.dtype is not torch.int8:
            _check_token_limits(model.config, args)
            all_succeed_or_raise(lambda: _check_finite(model, args.dtype), groups.world)
            with poison_on_failure(model) if args.dtype else nullcontext():
                model.to(device, args.dtype)
            return _make_engine(model, model, args, groups)
        wanted = "be int8" if args.dtype is torch.int8 else f"be for {groups.tp.size}"
        require(model.tp.is_solo, f"init_inference: the given model is split over {model.tp.size} ranks and cannot "
                f"{wanted}: save it, and give checkpoint=, which loads at any size")
        assert_weights_equal_across_ranks(model, groups.tp)
        opened = weights.weights_of_gpt2(model)
    _check_token_limits(opened.shape, args)
    dtype = args.dtype or (load.DTYPES[opened.precision] if model is None else next(model.parameters()).dtype)
    made = load.build_model(opened, groups, dtype, device)
    return _make_engine(made, made, args, groups)


def _check_token_limits(shape: ModelConfig, args: InferenceArguments) -> None:
    positions = shape.max_position_embeddings
    limit = min(args.max_out_tokens or positions, positions)
    require(args.min_out_tokens <= limit, f"init_inference: min_out_tokens is {args.min_out_tokens}, and there is "
            f"room for {limit}: the model has {positions} positions"
            + (f", and max_out_tokens is {args.max_out_tokens}" if args.max_out_tokens else ""))


def _make_engine(module: nn.Module, gpt2: GPT2, args: InferenceArguments, groups: Groups) -> InferenceEngine:
    return InferenceEngine(module, gpt2.eval(), groups.tp, args.max_out_tokens)


# ---- a model that is not ours ---------------------------------------------------------------------------------------

def _init_other_module(model: nn.Module, args: InferenceArguments, groups: Groups, device: torch.device,
                       notes: list[str]) -> InferenceEngine:
    check_not_poisoned(model)
    filling: AbstractContextManager[None] = nullcontext()
    is_headed_gpt2 = type(model).__name__ == HF_GPT2_CLASS and type(model).__module__.startswith("transformers.")
    if args.checkpoint is not None:
        require(is_headed_gpt2, f"init_inference: checkpoint= fills a GPT-2, and the model is a "
                f"{type(model).__name__}: load its weights first (from_pretrained, or load_state_dict), and leave "
                "checkpoint out")
        opened = weights.open_weights(args.checkpoint, args.base_dir, groups)
        all_succeed_or_raise(lambda: weights.check_hf_model(model, opened), groups.world)
        filling = weights.fill_hf_model(model, opened, groups)
    plan = all_succeed_or_raise(lambda: _make_plan(model, args, groups), groups.world)

    def check_weights() -> None:
        assert_weights_equal_across_ranks(model, groups.tp)
        if args.dtype is torch.int8:
            check_scales(model, plan)
        else:
            _check_finite(model, args.dtype)

    def shard() -> None:
        shard_module(model, plan, groups.tp)
        if equivalence is not None:
            equivalence.check_sharded()

    with filling:
        all_succeed_or_raise(check_weights, groups.world)
        equivalence = all_succeed_or_raise(
            lambda: None if groups.tp.is_solo else TPEquivalenceCheck(model, plan, args.example_inputs, groups.tp),
            groups.world)
    with poison_on_failure(model) if plan.tp_layers or args.dtype else nullcontext():
        all_succeed_or_raise(shard, groups.world)
        if args.dtype is torch.int8:
            quantize_layers(model, plan, groups, activation_dtype(device), device)
        else:
            model.to(device, args.dtype)
    model.eval().requires_grad_(False)
    broadcast_rng_state(groups.tp)
    if args.fast and is_headed_gpt2:
        try:
            gpt2 = gpt2_from_hf_layers(model, groups.tp)
            _check_token_limits(gpt2.config, args)
            return _make_engine(model, gpt2, args, groups)
        except TrainerError as error:
            notes.append(f"replace_with_kernel_inject has no effect: {error}")
    elif args.fast:
        notes.append(f"replace_with_kernel_inject has no effect: there is no decoder for a {type(model).__name__}")
    return InferenceEngine(model, None, groups.tp, args.max_out_tokens)


def _make_plan(model: nn.Module, args: InferenceArguments, groups: Groups) -> TPPlan:
    """Depends on the layers only; their weights may not be loaded yet."""
    plan = make_tp_plan(model, args.policy)
    require(bool(plan.tp_layers) or groups.tp.is_solo, f"init_inference: how a {type(model).__name__} is cut over "
            f"{groups.tp.size} ranks is not known: give injection_policy={{LayerClass: (names of its row-parallel "
            "layers,)}} (docs/inference.md)")
    check_divisible(model, plan, groups.tp)
    if args.dtype is torch.int8:
        int8_layers(model, plan)
    return plan


@torch.no_grad()
def _check_finite(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Raises CheckpointError for a parameter that is not finite once cast to `dtype`."""
    for name, value in model.named_parameters():
        weights.check_not_meta(name, value)
        if not value.is_floating_point() or not value.numel():
            continue
        ends = torch.stack(value.aminmax())  # a cast keeps the order of numbers
        if not bool(ends.to(dtype or value.dtype).isfinite().all()):
            raise CheckpointError(f"{name} is not finite in {str(dtype or 'its precision').removeprefix('torch.')}: "
                                  "ask for another dtype")
