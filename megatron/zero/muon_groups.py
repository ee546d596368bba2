"""Param groups for Muon: it updates the hidden matrices, AdamW the other parameters.

A *hidden matrix* has two dimensions, lies in a unit (not the root), and belongs to no embedding; `use_muon` in a param
group overrides this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron.errors import ConfigError
from megatron.optim.rule import ParamGroup
from megatron.zero.partitioned_param import full_shape
from megatron.zero.tiling import TiledLinearBase
from megatron.zero.units import ROOT, unit_name_by_param
from mpu.layers import VocabParallelEmbedding

EMBEDDING_CLASSES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)
# A module whose name contains one of these is taken for the output layer, which makes logits.
HEAD_NAMES = ("embed", "head", "output", "classifier", "score")

MUON_KEYS = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "split_qkv")
ADAM_KEYS = ("betas", "eps")
LR_KEYS = {True: "muon_lr", False: "adam_lr"}


def split_muon_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]], lr: float) -> list[ParamGroup]:
    """Split each group into one for Muon (hidden matrices) and one for AdamW, without empty ones.

    Each new group has the hyper-parameters of its optimizer, and `lr_scale`, the factor from the common `lr` to the
    learning rate of that optimizer. Raises ConfigError if Muon would get no matrix."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden = hidden_matrices(model)
    split: list[ParamGroup] = []
    for group in groups:
        for use_muon in (True, False):
            members = [p for p in group["params"] if bool(group.get("use_muon", p in hidden)) == use_muon]
            for parameter in members if use_muon else ():
                if len(shape := tuple(full_shape(parameter))) != 2:
                    raise ConfigError(f"Muon: {names.get(parameter, 'a parameter')} of shape {shape} is in a param "
                                      "group that says \"use_muon\": true: only a matrix, of two dimensions, can be "
                                      "made orthogonal; leave it out")
            if members:
                left_out = {*(ADAM_KEYS if use_muon else MUON_KEYS), *LR_KEYS.values()}
                rate = group[LR_KEYS[use_muon]]
                split.append({**{key: value for key, value in group.items() if key not in left_out}, "params": members,
                              "use_muon": use_muon, "lr_scale": 1.0 if rate is None else rate / lr})
    if not any(group["use_muon"] for group in split):
        raise ConfigError("Muon: the model has no hidden matrix, a parameter of two dimensions in a block (an "
                          "element of a ModuleList): give param groups that say \"use_muon\": true, or take AdamW")
    of_muon = {p for group in split if group["use_muon"] for p in group["params"]}
    for name, module in model.named_modules():
        if isinstance(module, TiledLinearBase) and not of_muon.isdisjoint(module.parameters()):
            raise ConfigError(f"Muon: {name} is a linear layer in tiles, whose full matrix never exists: give its "
                              "parameters in a group that says \"use_muon\": false, or leave tiling out")
    return split


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    units = unit_name_by_param(model)
    has_blocks = any(unit != ROOT for unit in units.values())
    embeddings = {p for module in model.modules() if isinstance(module, EMBEDDING_CLASSES)
                  for p in module.parameters(recurse=False)}
    return {p for name, p in model.named_parameters() if len(full_shape(p)) == 2 and p not in embeddings
            and (units[p] != ROOT if has_blocks
                 else not any(word in name.lower().rpartition(".")[0].rpartition(".")[2] for word in HEAD_NAMES))}


def muon_split_note(groups: Sequence[ParamGroup]) -> str:
    """One line: how many parameters Muon and AdamW update."""
    count, numbers = Counter[bool](), Counter[bool]()
    for group in groups:
        count[group["use_muon"]] += len(group["params"])
        numbers[group["use_muon"]] += sum(full_shape(p).numel() for p in group["params"])
    return (f" Muon: {count[True]} hidden matrices, {numbers[True]} numbers on each tensor parallel rank; AdamW "
            f"updates the {count[False]} other parameters, {numbers[False]} numbers")
