"""`fp16.auto_cast`: floating point inputs of the engine's forward in fp16, wherever they are nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of floating point numbers, also inside lists, tuples and dicts, as `dtype`; the rest as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(cast_inputs(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_inputs(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {key: cast_inputs(item, dtype) for key, item in value.items()}
    return value
