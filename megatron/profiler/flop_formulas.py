"""How many multiply-accumulates (MACs) a torch operation is; one MAC is two FLOPs.

Counted are matrix products, attention and convolutions; element-wise operations are not. Causal attention counts s
(s + 1) / 2 scores, and its backward five products for the forward's two. The formulas are those of torch's registry
(torch.utils.flop_counter.register_flop_formula) and the ones of this file. `flop_formula(func)` returns a function of
(result, args, kwargs), OpHandling for a composite operation, or None; `may_multiply` says what lacks a formula.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Formula = Callable[[Any, Sequence[Any], Mapping[str, Any]], int]

aten = torch.ops.aten


class OpHandling(Enum):
    DECOMPOSE = "count the operations that it consists of"


def _product(first: int, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """[..., m, k] x [..., k, n] or [k]; `first` is the index of the first factor in `args`."""
    a, b = args[first], args[first + 1]
    return int(a.numel() * (b.shape[-1] if b.dim() > 1 else 1))


def _pairwise_distances(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A product of both matrices, extended by two columns: ones and the squared norms of the rows."""
    return int(result.numel() * (args[0].shape[-1] + 2))


def _convolution_backward(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """One product for the gradient of the image and one for the weight's, each like the forward. Torch's formula
    ignores groups."""
    grad_output, image, weight, transposed, output_mask = args[0], args[1], args[2], args[7], args[10]
    points = image if transposed else grad_output  # one filter application per element
    return int(sum(output_mask[:2])) * int(points.numel() * prod(weight.shape[1:]))


def _attention(func: Any, backward: bool, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """query [b, n, s, d], key [b, m, t, d], value [b, m, t, e]: q k^T and its product with v; backward, q k^T again and
    the gradients of q, k, the scores and v."""
    def argument(name: str) -> Any:
        index, default = _argument_positions(func)[name]
        return args[index] if index < len(args) else kwargs.get(name, default)

    query, key, value = argument("query"), argument("key"), argument("value")
    *heads, rows, width = query.shape
    scores = rows * key.shape[-2]
    if argument("is_causal"):  # row i has at most i + 1
        corner = min(rows, key.shape[-2])
        scores = corner * (corner + 1) // 2 + (rows - corner) * key.shape[-2]
    return int(prod(heads) * scores * (3 * width + 2 * value.shape[-1] if backward else width + value.shape[-1]))


@cache
def _argument_positions(func: Any) -> dict[str, tuple[int, Any]]:
    """Argument -> (index, default)."""
    arguments = enumerate(func._schema.arguments)
    return {item.name: (index, item.default_value if item.has_default_value() else None) for index, item in arguments}


def _registered_formula(formula: Callable[..., int], result: Any, args: Sequence[Any],
                        kwargs: Mapping[str, Any]) -> int:
    return int(formula(*args, **kwargs, out_val=result)) // 2


_FIRST_FACTOR_INDEX = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "_int_mm": 0, "_scaled_mm": 0, "addmm": 1,
                       "baddbmm": 1, "addbmm": 1, "addmv": 1, "_addmm_activation": 1}
"""Products -> the argument index of the first factor."""

_FORMULAS: dict[str, Formula] = {
    **{name: partial(_product, first) for name, first in _FIRST_FACTOR_INDEX.items()},
    "convolution_backward": _convolution_backward, "_euclidean_dist": _pairwise_distances}
"""Operations that torch's registry lacks, or counts differently."""
_SDPA_PREFIX = "_scaled_dot_product_"
_MULTIPLYING_NAMES = re.compile(
    "mm|matmul|linear|conv|attention|transformer_encoder|multi_head|rnn|lstm|gru|[cp]dist|dot|mv$|"
    "trilinear|sparse_mm|linalg|cholesky|solve|svd|geqrf|ormqr|_fft_[cr]2[cr]")
_NOT_MULTIPLYING_NAMES = re.compile(
    "gamma|cumm|dummy|hamming|upsample|powsum|vector_norm|cross|linalg_check|convert|reorder|"
    "mm_search|flatten")
"""Patterns in the names of torch operations that multiply matrices, and exceptions. Torch has no complete marking of
element-wise operations, views and copies, so only names remain."""
_TORCH_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor")


@cache
def flop_formula(func: Any) -> Formula | OpHandling | None:
    """How an operation is counted."""
    space, name, packet = _names(func)
    if space == "aten" and name.removesuffix("_") in _FORMULAS:  # also in place
        return _FORMULAS[name.removesuffix("_")]
    if space == "aten" and name.startswith(_SDPA_PREFIX) and name != _SDPA_PREFIX + "attention_math":
        return partial(_attention, func, name.endswith("_backward"))
    if packet in flop_registry:
        return partial(_registered_formula, flop_registry[packet])
    # in inference mode composite operations are dispatched undecomposed
    is_composite = isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd")
    return OpHandling.DECOMPOSE if space != "prim" and is_composite else None


@cache
def may_multiply(func: Any) -> bool:
    """Whether it may contain products: without a formula, the profile lists it as not counted."""
    space, name, _ = _names(func)
    return (callable(flop_formula(func)) or space not in _TORCH_NAMESPACES
            or _MULTIPLYING_NAMES.search(name) is not None and _NOT_MULTIPLYING_NAMES.search(name) is None)


def _names(func: Any) -> tuple[str, str, Any]:
    """(namespace, name, key in torch's flop registry)."""
    if isinstance(func, torch._ops.OpOverload):
        packet = func.overloadpacket
        return func.namespace, packet.__name__, packet
    return "higher_order", str(func), func
