"""The classic names of the regions, over the current tensor parallel group."""

from __future__ import annotations

from torch import Tensor

from mpu.classic import current_groups
from mpu.regions import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region


def copy_to_model_parallel_region(x: Tensor) -> Tensor:
    return copy_to_region(x, current_groups().tp)


def reduce_from_model_parallel_region(x: Tensor) -> Tensor:
    return reduce_from_region(x, current_groups().tp)


def scatter_to_model_parallel_region(x: Tensor) -> Tensor:
    return scatter_to_region(x, current_groups().tp)


def gather_from_model_parallel_region(x: Tensor) -> Tensor:
    return gather_from_region(x, current_groups().tp)
