"""Int8 weights: a tensor subclass that stores int8 levels and one scale per row, and the matrix product with it.

    linear      (x @ levels.T) * scale; tensor parallel ranks add their partial sums afterwards
    embedding   levels[token] * scale[token]

Activations are bf16 where the device supports it well, otherwise fp32. On a CPU, few bf16 rows use torch's packed
int8 kernel; more rows, and fp32, dequantize the matrix block by block. On a GPU the whole matrix is dequantized
before the product. Any other torch function receives a dequantized copy; in-place writes raise.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron.errors import ConfigError
from mpu.device import on_accelerator

CACHE_LINE = 64  # alignment of a matrix in bytes


def allocate_levels(shapes: Mapping[str, Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """An int8 tensor of each shape, all in one allocation. On a CPU huge pages are requested: decoding reads all
    weights for every token, and a processor prefetches within a page only, so that 2 MB pages are up to a third faster
    than 4 kB pages."""
    sizes = [-(-prod(shape) // CACHE_LINE) * CACHE_LINE for shape in shapes.values()]
    if device.type == "cpu" and sizes:
        area = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                area.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(area, dtype=torch.int8)
    else:
        flat = torch.empty(sum(sizes), dtype=torch.int8, device=device)
    ends = accumulate(sizes)
    return {name: flat[end - size :][: prod(shape)].view(*shape)
            for (name, shape), size, end in zip(shapes.items(), sizes, ends, strict=True)}


PACKED_KERNEL_MAX_ROWS = 12  # rows up to which the packed kernel is faster (benchmarks/int8_decode.py)

# Elements per load of the packed kernel, which checks neither the end of a row nor its alignment.
SIMD_WIDTH = 16

# Elements dequantized at a time on a CPU: fp32 blocks stay in the cache, bf16 products are faster with larger ones.
# Other dtypes are refused: sums of levels overflow fp16.
BLOCK_ELEMENTS = {torch.float64: 1 << 17, torch.float32: 1 << 18, torch.bfloat16: 1 << 20}

# CPU features whose bf16 products torch's kernels use (the last one is ARM's).
BF16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16")


def activation_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device supports it, otherwise fp32."""
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has = device.type != "cpu" or any(torch.cpu.get_capabilities().get(name) for name in BF16_CAPABILITIES)
    return torch.bfloat16 if has else torch.float32


class Int8(Tensor):
    levels: Tensor  # [rows, columns] int8, contiguous, aligned to SIMD_WIDTH bytes
    scale: Tensor  # [rows], in the dtype of the activations, which is also this tensor's `dtype`

    @staticmethod
    def __new__(cls, levels: Tensor, scale: Tensor) -> Int8:
        made: Int8 = Tensor._make_wrapper_subclass(cls, levels.shape, dtype=scale.dtype, device=levels.device)
        return made

    def __init__(self, levels: Tensor, scale: Tensor) -> None:
        self.levels, self.scale = levels, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8({list(self.levels.shape)}, {self.scale.dtype})"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.levels.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        return self.levels.to(self.scale.dtype) * self.scale[:, None]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise NotImplementedError("the data of an int8 weight cannot be replaced: give its layer another parameter")
        if func is F.linear and isinstance(args[1], Int8):
            return _linear(*args, **kwargs)
        if func is F.embedding and isinstance(args[1], Int8):
            rows, table = args[0], args[1]
            return F.embedding(rows, table.levels) * F.embedding(rows, table.scale[:, None])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].levels, args[0].scale)
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return _copy(args[0], **(kwargs or {}))
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func}: an int8 weight cannot be written into")
        args, kwargs = tree_map(lambda x: x.dequantized() if isinstance(x, Int8) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """For torch.compile."""
        return ["levels", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], meta: None, size: Any, stride: Any) -> Int8:
        return Int8(inner["levels"], inner["scale"])


def _copy(weight: Int8, *, dtype: torch.dtype | None = None, device: torch.device | None = None,
          non_blocking: bool = False, **layout: Any) -> Int8:
    """`layout` (memory_format and so on) is ignored: levels are contiguous."""
    dtype = weight.dtype if dtype is None else dtype
    if dtype not in BLOCK_ELEMENTS:
        known = ", ".join(str(known).removeprefix("torch.") for known in BLOCK_ELEMENTS)
        raise ConfigError(f"an int8 weight cannot be made {str(dtype).removeprefix('torch.')}: its activations are one "
                          f"of {known}; for another precision, load the model without int8")
    levels = weight.levels.to(device=device, non_blocking=non_blocking, copy=True,
                              memory_format=torch.contiguous_format)
    return Int8(levels, weight.scale.to(device=device, dtype=dtype, non_blocking=non_blocking, copy=True))


def _linear(x: Tensor, weight: Int8, bias: Tensor | None = None) -> Tensor:
    y = int8_matmul(x.reshape(-1, x.shape[-1]), weight.levels, weight.scale).view(*x.shape[:-1], len(weight.levels))
    return y if bias is None else y + bias


def int8_matmul(x: Tensor, levels: Tensor, scale: Tensor) -> Tensor:
    """[n, columns] x [rows, columns] -> [n, rows]."""
    if on_accelerator(x):
        return F.linear(x, levels.to(x.dtype)) * scale
    rows, columns = levels.shape
    if x.dtype == torch.bfloat16 and len(x) <= PACKED_KERNEL_MAX_ROWS and columns % SIMD_WIDTH == 0:
        is_aligned = x.is_contiguous() and x.storage_offset() % SIMD_WIDTH == 0
        x = x if is_aligned else x.clone(memory_format=torch.contiguous_format)
        return torch._weight_int8pack_mm(x, levels, scale)
    block_rows = max(1, BLOCK_ELEMENTS[x.dtype] // columns)
    if rows <= block_rows:
        return F.linear(x, levels.to(x.dtype)) * scale
    y = x.new_empty(len(x), rows)
    for first in range(0, rows, block_rows):
        torch.mul(F.linear(x, levels[first : first + block_rows].to(x.dtype)), scale[first : first + block_rows],
                  out=y[:, first : first + block_rows])
    return y
