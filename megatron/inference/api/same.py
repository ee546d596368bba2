"""Whether all tensor parallel ranks were given the same: they work on one model, and on one answer, together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron.config.setting import require
from mpu.collectives import all_gather_json
from mpu.groups import Group


def assert_weights_equal_across_ranks(model: nn.Module, tp: Group) -> None:
    """A model that each rank made from random numbers of its own is not one model."""
    _assert_equal_across_ranks(
        model.parameters(), tp, "the model of rank {} of the tensor parallel group has other weights than that of "
        "rank 0: load the same checkpoint on every rank, or set the same seed before the model is made")


def assert_tensors_equal_across_ranks(given: Iterable[Tensor], tp: Group, what: str) -> None:
    _assert_equal_across_ranks(
        given, tp, f"rank {{}} of the tensor parallel group was given other {what} than rank 0: give the same to "
        "all")


def _assert_equal_across_ranks(tensors: Iterable[Tensor], tp: Group, message: str) -> None:
    if tp.is_solo:
        return
    said = repr([(tuple(one.shape), one.dtype, float(one.detach().sum(dtype=torch.float64)), _order_sensitive_sum(one))
                 for one in tensors])
    found = all_gather_json(hashlib.sha256(said.encode()).hexdigest(), tp)
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    require(other is None, message.format(other))


def _order_sensitive_sum(one: Tensor) -> float:
    """Numbers of small tensors in another order are others."""
    flat = one.detach().flatten()[:4096].double()
    return float(flat @ torch.arange(1.0, 1.0 + len(flat), dtype=flat.dtype, device=flat.device))
