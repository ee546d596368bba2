"""Other bf16 products than those of torch, for benchmarks on a processor that cannot multiply bf16: there they take up
to 150 times as long, and hide everything else that a step does.

    "fp32"   by way of fp32: the values of bf16 in the time of fp32. Operands become fp32 in blocks, so no copy of a
             weight is seen in the peak of memory
    "none"   zeros, in no time: what a step does beside its products

All contenders alike; whatever else is in bf16 stays so, memory and what ranks send each other above all. As far as a
step's time is the sum of its products and the rest, the ratio of two contenders on a processor that has bf16, however
fast, lies between that of "none" and that of the products alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

BLOCK = 1 << 20
"""Elements of an operand that are fp32 at a time."""

ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")

_library = Library("aten", "IMPL")


def product(a: Tensor, b: Tensor, out: Tensor, beta: float = 0.0) -> Tensor:
    """out = a @ b + beta * out, with sums in fp32."""
    (rows, inner), columns = a.shape, b.shape[1]
    if inner > max(rows, columns):
        total = torch.zeros(rows, columns)
        width = max(1, BLOCK // max(rows, columns))
        for at in range(0, inner, width):
            total += _mm(a[:, at:at + width].float(), b[at:at + width].float())
        out.copy_(total.add_(out, alpha=beta) if beta else total)
    elif rows >= columns:
        right, height = b.float(), max(1, BLOCK // max(inner, columns))
        for at in range(0, rows, height):
            part, made = out[at:at + height], _mm(a[at:at + height].float(), right)
            part.copy_(made.add_(part, alpha=beta) if beta else made)
    else:
        product(b.t(), a.t(), out.t(), beta)
    return out


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """fp32's own: this operator is not among those below."""
    return torch.addmm(torch.empty(()), a, b, beta=0, out=torch.empty(a.shape[0], b.shape[1]))


def install(kind: str) -> None:
    """In this process, from now on."""
    if kind == "torch":
        return
    warnings.filterwarnings("ignore", "Warning only once for all operators")  # about what is done here on purpose
    for name, function in (_zeros() if kind == "none" else _by_fp32()).items():
        _replace(name, function)


def _zeros() -> dict[str, Callable[..., Any]]:
    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:-1])

    def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
                           ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    return {"mm": lambda a, b: a.new_zeros(a.shape[0], b.shape[1]),
            "mm.out": lambda a, b, *, out: out.zero_(),
            "addmm": lambda bias, a, b, **scales: a.new_zeros(a.shape[0], b.shape[1]),
            "addmm_": lambda out, a, b, **scales: out.zero_(),
            ATTENTION[0]: attention, ATTENTION[1]: attention_backward}


def _by_fp32() -> dict[str, Callable[..., Any]]:
    def mm(a: Tensor, b: Tensor) -> Tensor:
        return product(a, b, a.new_empty(a.shape[0], b.shape[1]))

    def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return product(a, b, out)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        assert alpha == 1
        return product(a, b, bias.expand(a.shape[0], b.shape[1]).clone(), beta)

    def addmm_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        assert alpha == 1
        return product(a, b, out, beta)

    kernels = {name: get_kernel(f"aten::{name}", "CPU") for name in ATTENTION}
    return {"mm": mm, "mm.out": mm_out, "addmm": addmm, "addmm_": addmm_,
            **{name: _in_fp32(kernel) for name, kernel in kernels.items()}}


def _replace(name: str, function: Callable[..., Any]) -> None:
    """For bf16; all else goes where it went."""
    kernel = get_kernel(f"aten::{name}", "CPU")

    def choose(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype == torch.bfloat16:
            return function(*args, **kwargs)
        return kernel.call_boxed(keys, *args, **kwargs)

    _library.impl(name, choose, "CPU", with_keyset=True, allow_override=True)


def _in_fp32(kernel: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def function(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        def wide(value: Any) -> Any:
            return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

        made = kernel.call_boxed(keys, *map(wide, args), **{key: wide(value) for key, value in kwargs.items()})
        narrow = made[:-1] if len(made) == 2 else made  # forward: the output, and the logarithm of the sums in fp32
        return (*(value.bfloat16() for value in narrow), *made[len(narrow):])

    return function
