"""How many multiply-accumulates (MACs) a torch operation is; one MAC is two FLOPs.

Counted are matrix products, attention and convolutions; element-wise operations are not. Causal attention counts s
(s + 1) / 2 scores, and its backward five products for the forward's two. `flop_formula(func)` returns a function of
(result, args, kwargs), DECOMPOSE for a composite operation, or None. Operations outside torch are counted by the
formula registered with torch.utils.flop_counter.register_flop_formula; `may_multiply` says what lacks one.
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
    DECOMPOSE = "an operation that consists of others"


DECOMPOSE = OpHandling.DECOMPOSE


def _product(first: int, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of the factors [..., m, k] and [..., k, n], or [k], from the argument `first` on."""
    a, b = args[first], args[first + 1]
    return int(a.numel() * (b.shape[-1] if b.dim() > 1 else 1))


def _linear(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    image, weight = args[:2]
    return int(image.numel() * weight.shape[0])


def _linear_backward(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """One product for the gradient of the image and one for the weight's, each like the forward."""
    image, weight, wanted = args[0], args[2], args[3]
    return int(sum(wanted[:2])) * int(image.numel() * weight.shape[0])


def _pairwise_distances(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of the rows of two matrices by a product of them, each lengthened by 1 and the square of its rows."""
    return int(result.numel() * (args[0].shape[-1] + 2))


def _convolution(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    image, weight, transposed = args[0], args[1], args[6]
    return _filter_macs(weight, image if transposed else result)


def _convolution_backward(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """One product for the gradient of the image and one for the weight's, each like the forward."""
    above, image, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return int(sum(wanted[:2])) * _filter_macs(weight, image if transposed else above)


def _filter_macs(weight: Any, points: Any) -> int:
    """A filter at each point of the side where it is applied once."""
    return int(points.numel() * prod(weight.shape[1:]))


def _attention(func: Any, backward: bool, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """query [b, n, s, d], key [b, m, t, d], value [b, m, t, e]: q k^T and its product with v; backward, q k^T again and
    the gradients of q, k, the scores and v."""
    query, key, value, causal = (_argument_value(func, name, args, kwargs)
                                 for name in ("query", "key", "value", "is_causal"))
    *heads, rows, width = query.shape
    pairs = prod(heads) * _num_scores(rows, key.shape[-2], causal)
    return int(pairs * (3 * width + 2 * value.shape[-1] if backward else width + value.shape[-1]))


def _num_scores(rows: int, columns: int, causal: bool) -> int:
    """Scores of one head; row i of a causal one has i + 1 at most."""
    if not causal:
        return rows * columns
    corner = min(rows, columns)
    return corner * (corner + 1) // 2 + (rows - corner) * columns


def _argument_value(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    place, default = _argument_positions(func)[name]
    return args[place] if place < len(args) else kwargs.get(name, default)


@cache
def _argument_positions(func: Any) -> dict[str, tuple[int, Any]]:
    """Argument -> its place, and its default."""
    arguments = enumerate(func._schema.arguments)
    return {item.name: (place, item.default_value if item.has_default_value() else None) for place, item in arguments}


def _registered_formula(formula: Callable[..., int], result: Any, args: Sequence[Any],
                        kwargs: Mapping[str, Any]) -> int:
    return int(formula(*args, **kwargs, out_val=result)) // 2


_FIRST_FACTOR_INDEX = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "_int_mm": 0, "_scaled_mm": 0, "addmm": 1,
                       "baddbmm": 1, "addbmm": 1, "addmv": 1, "_addmm_activation": 1}
"""Products -> the place of the first factor."""

_FORMULAS: dict[str, Formula] = {
    **{name: partial(_product, first) for name, first in _FIRST_FACTOR_INDEX.items()},
    "convolution": _convolution, "_convolution": _convolution, "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward, "mkldnn_linear": _linear, "mkldnn_linear_backward": _linear_backward,
    "linear_backward": _linear_backward, "_euclidean_dist": _pairwise_distances}
_SDPA_PREFIX = "_scaled_dot_product_"
_MULTIPLYING_NAMES = re.compile(
    "mm|matmul|linear|conv|attention|transformer_encoder|multi_head|rnn|lstm|gru|[cp]dist|dot|mv$|"
    "trilinear|sparse_mm|linalg|cholesky|solve|svd|geqrf|ormqr|_fft_[cr]2[cr]")
_NOT_MULTIPLYING_NAMES = re.compile(
    "gamma|cumm|dummy|hamming|upsample|powsum|vector_norm|cross|linalg_check|convert|reorder|"
    "mm_search|flatten")
"""What the names of torch's operations that multiply have in them, and those that only look so. Torch marks but a part
of those that go element by element, and those that view or move nothing as little as a product: names are what is left
to tell them by."""
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
    return DECOMPOSE if space != "prim" and _is_composite(func) else None


@cache
def may_multiply(func: Any) -> bool:
    """There may be products in it; where no formula says how many, that is to be told."""
    space, name, _ = _names(func)
    return callable(flop_formula(func)) or space not in _TORCH_NAMESPACES or _multiplies(name)


def _multiplies(name: str) -> bool:
    return _MULTIPLYING_NAMES.search(name) is not None and _NOT_MULTIPLYING_NAMES.search(name) is None


def _is_composite(func: Any) -> bool:
    """In inference mode such operations arrive as they are; otherwise only what they consist of does."""
    return isinstance(func, torch._ops.OpOverload) and bool(torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"))


def _names(func: Any) -> tuple[str, str, Any]:
    """Namespace, name, and what formulas are registered for."""
    if isinstance(func, torch._ops.OpOverload):
        packet = func.overloadpacket
        return func.namespace, packet.__name__, packet
    return "higher_order", str(func), func
