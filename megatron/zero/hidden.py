"""Which parameters are hidden matrices: those that Muon makes orthogonal, where AdamW updates the others.

A *hidden matrix* has two dimensions and turns activations into activations. Tables that are looked up are none, nor is
the head, whose outputs are logits. So it is a matrix inside of the model's blocks (the elements of its outermost
`ModuleList`s, which are the engine's units) that no embedding module has. In a model without blocks everything is
looked at, and a name tells the head. A param group that says `use_muon` decides for its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron.errors import ConfigError
from megatron.optim.rule import ParamGroup
from megatron.zero.holders import full_shape
from megatron.zero.tiling import TiledLinearBase
from megatron.zero.units import ROOT, unit_name_by_param
from mpu.layers import VocabParallelEmbedding

EMBEDDING_CLASSES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)
HEAD_NAMES = ("embed", "head", "output", "classifier", "score")
"""What a module is called that makes logits, as a part of its name."""

MUON_KEYS = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "split_qkv")
ADAM_KEYS = ("betas", "eps")
LR_KEYS = {True: "muon_lr", False: "adam_lr"}


def split_muon_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]], lr: float) -> list[ParamGroup]:
    """Each group in two, hidden matrices first, without empty ones; each part has the hyper-parameters of its
    optimizer, and `lr_scale`: what the group's rate is multiplied by, so that `lr` becomes the optimizer's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden = hidden_matrices(model)
    found = []
    for group in groups:
        for use_muon in (True, False):
            members = [p for p in group["params"] if bool(group.get("use_muon", p in hidden)) == use_muon]
            if use_muon:
                _check_matrices(members, names)
            if members:
                found.append(_make_param_group(group, members, use_muon, lr))
    if not any(group["use_muon"] for group in found):
        raise ConfigError("Muon: the model has no hidden matrix, a parameter of two dimensions in a block (an "
                          "element of a ModuleList): give param groups that say \"use_muon\": true, or take AdamW")
    _check_tiles(model, found)
    return found


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    units = unit_name_by_param(model)
    has_blocks = any(unit != ROOT for unit in units.values())
    embeddings = {
        p
        for module in model.modules() if isinstance(module, EMBEDDING_CLASSES) for p in module.parameters(recurse=False)
    }
    return {p for name, p in model.named_parameters() if len(full_shape(p)) == 2 and p not in embeddings
            and (units[p] != ROOT if has_blocks else not _is_head(name))}


def _is_head(name: str) -> bool:
    *_, module = ["", *name.lower().split(".")[:-1]]
    return any(word in module for word in HEAD_NAMES)


def _make_param_group(group: Mapping[str, Any], members: list[nn.Parameter], use_muon: bool, lr: float) -> ParamGroup:
    left_out = {*(ADAM_KEYS if use_muon else MUON_KEYS), *LR_KEYS.values()}
    rate = group[LR_KEYS[use_muon]]
    return {**{name: value for name, value in group.items() if name not in left_out}, "params": members,
            "use_muon": use_muon, "lr_scale": 1.0 if rate is None else rate / lr}


def muon_split_note(groups: Sequence[ParamGroup]) -> str:
    """Who updates how much."""
    count, numbers = Counter[bool](), Counter[bool]()
    for group in groups:
        count[group["use_muon"]] += len(group["params"])
        numbers[group["use_muon"]] += sum(full_shape(p).numel() for p in group["params"])
    return (f" Muon: {count[True]} hidden matrices, {numbers[True]} numbers on each tensor parallel rank; AdamW "
            f"updates the {count[False]} other parameters, {numbers[False]} numbers")


def _check_matrices(members: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    for parameter in members:
        shape = tuple(full_shape(parameter))
        if len(shape) != 2:
            raise ConfigError(f"Muon: {names.get(parameter, 'a parameter')} of shape {shape} is in a param group that "
                              "says \"use_muon\": true: only a matrix, of two dimensions, can be made orthogonal; "
                              "leave it out")


def _check_tiles(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """A tile is a parameter of its own, and no whole matrix."""
    of_muon = {p for group in groups if group["use_muon"] for p in group["params"]}
    for name, module in model.named_modules():
        if isinstance(module, TiledLinearBase) and not of_muon.isdisjoint(module.parameters()):
            raise ConfigError(f"Muon: {name} is a linear layer in tiles, whose matrix never exists whole: give its "
                              "parameters in a group that says \"use_muon\": false, or leave tiling out")
