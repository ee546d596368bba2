"""`megatron.inference.init_inference`: a model made ready for inference, as DeepSpeed's tutorial types it.

    engine = init_inference(model, tensor_parallel={"tp_size": 2}, dtype=torch.bfloat16)
    logits = engine(input_ids)

The model is our GPT-2, whole or from a checkpoint, transformers' GPT-2, or any module with an injection policy. A
module that is not ours is changed in place, as DeepSpeed does; what can be refused before it is changed is, and leaves
it as it was. Collective over all ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.agree import all_succeed_or_raise
from megatron.config.setting import require
from megatron.config.tree import ModelConfig
from megatron.errors import CheckpointError, ConfigError, TrainerError
from megatron.inference import loading
from megatron.inference.api import arguments, weights
from megatron.inference.api.arguments import Asked
from megatron.inference.api.cut import changing, check_even, check_unbroken, cut
from megatron.inference.api.engine import InferenceEngine, share_random_state
from megatron.inference.api.policy import Plan, plan_of
from megatron.inference.api.proof import Proof
from megatron.inference.api.quantise import check_scales, layers_of_int8, quantise
from megatron.inference.api.same import check_model
from megatron.inference.api.weights import HEADED, ours_of
from megatron.inference.int8 import activations_on
from megatron.launch import distributed, exits
from megatron.model.gpt2 import GPT2
from megatron.zero.api.init import groups_from_mpu
from mpu import groups as mpu_groups
from mpu.groups import Groups


def init_inference(model: nn.Module | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
                   **kwargs: Any) -> InferenceEngine:
    """The engine of a model; docs/inference.md lists the arguments, which are DeepSpeed's."""
    exits.install_excepthook()
    asked = arguments.read(config, kwargs)
    env = distributed.init()
    groups = _groups(asked)
    device = distributed.device_for(env)
    notes = list(asked.notes)
    if model is None or isinstance(model, GPT2):
        engine = _of_ours(model, asked, groups, device)
    else:
        require(isinstance(model, nn.Module), f"init_inference: model is a {type(model).__name__}: expected a module "
                "(of an engine that trains, save a checkpoint, and give checkpoint=, its folder)")
        engine = _of_theirs(model, asked, groups, device, notes)
    _say(notes, groups)
    return engine.eval()


def _groups(asked: Asked) -> Groups:
    """The grid: of the given process groups, or of `tp_size` ranks each."""
    size = asked.tp_size
    require(asked.mpu is None or asked.tp_group is None,
            "init_inference: give one of tensor_parallel.mpu and tensor_parallel.tp_group")
    if asked.mpu is not None:
        groups = groups_from_mpu(asked.mpu)
    elif asked.tp_group is not None:
        groups = mpu_groups.groups_from_process_groups(asked.tp_group, None)
    else:
        world = distributed.read_environment().world_size
        require(world % (size or 1) == 0, f"init_inference: tensor_parallel.tp_size is {size}, and there are {world} "
                f"ranks: start {size} of them, or a multiple (python -m megatron.launch --nproc-per-node {size} "
                "SCRIPT)")
        return mpu_groups.build(size or 1)
    require(size in (None, groups.tp.size), f"init_inference: tensor_parallel.tp_size is {size}, and the given group "
            f"has {groups.tp.size} ranks: leave tp_size out")
    return groups


# ---- our GPT-2 ------------------------------------------------------------------------------------------------------

def _of_ours(model: GPT2 | None, asked: Asked, groups: Groups, device: torch.device) -> InferenceEngine:
    require(asked.policy is None, "init_inference: injection_policy is for models that are not ours: our GPT-2 is cut "
            "by itself; leave it out")
    if asked.checkpoint is not None:
        found = weights.open_checkpoint(asked.checkpoint, asked.base_dir, groups)
        if model is not None:
            shape = model.config
            all_succeed_or_raise(lambda: weights.check_shape(shape, found), groups.world)
    elif model is None:
        raise ConfigError("init_inference needs a model, or checkpoint=: the folder of one")
    else:
        check_unbroken(model)
        if model.tp.size == groups.tp.size and asked.dtype is not torch.int8:
            _check_room(model.config, asked)
            all_succeed_or_raise(lambda: _check_finite(model, asked.dtype), groups.world)
            with changing(model) if asked.dtype else nullcontext():
                model.to(device, asked.dtype)
            return _engine(model, model, asked, groups)
        wanted = "be int8" if asked.dtype is torch.int8 else f"be for {groups.tp.size}"
        require(model.tp.is_solo, f"init_inference: the given model is split over {model.tp.size} ranks and cannot "
                f"{wanted}: save it, and give checkpoint=, which loads at any size")
        check_model(model, groups.tp)
        found = weights.of_model(model)
    _check_room(found.shape, asked)
    dtype = asked.dtype or _precision(model, found)
    made = loading.build(found, groups, dtype, device)
    return _engine(made, made, asked, groups)


def _precision(model: GPT2 | None, found: loading.Found) -> torch.dtype:
    """As the model is; without one, as it was trained."""
    return loading.DTYPES[found.precision] if model is None else next(model.parameters()).dtype


def _check_room(shape: ModelConfig, asked: Asked) -> None:
    positions = shape.max_position_embeddings
    room = min(asked.max_out_tokens or positions, positions)
    require(asked.min_out_tokens <= room, f"init_inference: min_out_tokens is {asked.min_out_tokens}, and there is "
            f"room for {room}: the model has {positions} positions"
            + (f", and max_out_tokens is {asked.max_out_tokens}" if asked.max_out_tokens else ""))


def _engine(module: nn.Module, gpt2: GPT2, asked: Asked, groups: Groups) -> InferenceEngine:
    return InferenceEngine(module, gpt2.eval(), groups.tp, asked.max_out_tokens)


# ---- a model that is not ours ---------------------------------------------------------------------------------------

def _of_theirs(model: nn.Module, asked: Asked, groups: Groups, device: torch.device,
               notes: list[str]) -> InferenceEngine:
    check_unbroken(model)
    filling: AbstractContextManager[None] = nullcontext()
    is_headed_gpt2 = type(model).__name__ == HEADED and type(model).__module__.startswith("transformers.")
    if asked.checkpoint is not None:
        require(is_headed_gpt2, f"init_inference: checkpoint= fills a GPT-2, and the model is a "
                f"{type(model).__name__}: load its weights first (from_pretrained, or load_state_dict), and leave "
                "checkpoint out")
        found = weights.open_checkpoint(asked.checkpoint, asked.base_dir, groups)
        all_succeed_or_raise(lambda: weights.check_transformers(model, found), groups.world)
        filling = weights.filled(model, found, groups)
    plan = all_succeed_or_raise(lambda: _planned(model, asked, groups), groups.world)
    with filling:
        all_succeed_or_raise(lambda: _check_weights(model, plan, asked.dtype, groups), groups.world)
        proof = all_succeed_or_raise(lambda: _proof(model, plan, asked, groups), groups.world)
    with changing(model) if plan.places or asked.dtype else nullcontext():
        all_succeed_or_raise(lambda: _cut(model, plan, proof, groups), groups.world)
        if asked.dtype is torch.int8:
            quantise(model, plan, groups, activations_on(device), device)
        else:
            model.to(device, asked.dtype)
    model.eval().requires_grad_(False)
    share_random_state(groups.tp)
    if asked.fast and is_headed_gpt2:
        try:
            gpt2 = ours_of(model, groups.tp)
            _check_room(gpt2.config, asked)
            return _engine(model, gpt2, asked, groups)
        except TrainerError as error:
            notes.append(f"replace_with_kernel_inject has no effect: {error}")
    elif asked.fast:
        notes.append(f"replace_with_kernel_inject has no effect: there is no decoder for a {type(model).__name__}")
    return InferenceEngine(model, None, groups.tp, asked.max_out_tokens)


def _planned(model: nn.Module, asked: Asked, groups: Groups) -> Plan:
    """By the layers; their weights may still have to come."""
    plan = plan_of(model, asked.policy)
    require(bool(plan.places) or groups.tp.is_solo, f"init_inference: how a {type(model).__name__} is cut over "
            f"{groups.tp.size} ranks is not known: give injection_policy={{LayerClass: (names of its row-parallel "
            "layers,)}} (docs/inference.md)")
    check_even(model, plan, groups.tp)
    if asked.dtype is torch.int8:
        layers_of_int8(model, plan)
    return plan


def _check_weights(model: nn.Module, plan: Plan, dtype: torch.dtype | None, groups: Groups) -> None:
    check_model(model, groups.tp)
    if dtype is torch.int8:
        check_scales(model, plan)
    else:
        _check_finite(model, dtype)


def _proof(model: nn.Module, plan: Plan, asked: Asked, groups: Groups) -> Proof | None:
    return None if groups.tp.is_solo else Proof(model, plan, asked.example_inputs, groups.tp)


def _cut(model: nn.Module, plan: Plan, proof: Proof | None, groups: Groups) -> None:
    cut(model, plan, groups.tp)
    if proof is not None:
        proof.check()


@torch.no_grad()
def _check_finite(model: nn.Module, dtype: torch.dtype | None) -> None:
    """In the precision to come, one parameter at a time."""
    for name, value in model.named_parameters():
        weights.require_values(name, value)
        if not value.is_floating_point() or not value.numel():
            continue
        ends = torch.stack(value.aminmax())  # a cast keeps the order of numbers
        if not bool(ends.to(dtype or value.dtype).isfinite().all()):
            raise CheckpointError(f"{name} is not finite in {str(dtype or 'its precision').removeprefix('torch.')}: "
                                  "ask for another dtype")


def _say(notes: list[str], groups: Groups) -> None:
    if groups.world.rank == 0:
        for note in notes:
            print(f"note: init_inference: {note}", file=sys.stderr, flush=True)
