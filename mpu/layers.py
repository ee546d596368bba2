"""Linear layers and embeddings whose weight is split over the tensor-parallel group.

    ColumnParallelLinear     Y = X A + b    A split by columns: every rank computes some features of Y
    RowParallelLinear        Y = X A + b    A split by rows: every rank computes a partial sum of Y
    VocabParallelEmbedding   the table split by rows (tokens)
    ParallelEmbedding        the table split by columns (features)

A column layer that keeps its output split, followed by a row layer, needs one all-reduce in forward and one in
backward. With `sequence_parallel` the input of the first and the output of the second are this rank's positions, [b, s
/ tp, ...], while the module trains: an all-gather and a reduce-scatter replace the all-reduce, and what is between row
and column layers is kept once, not on every rank. Weights are stored as in torch.nn.Linear: [out, in]. A function as
`init_method` fills the *logical* (unsplit) weight in fp32 on the CPU in one call, and it is then sliced; a
`CounterRNGInit` draws only this rank's slice (weight_init.py), now or deferred. The same seed gives the same model for
every tp size. `tp=None` means the current group (parallel_state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from mpu.device import on_accelerator
from mpu.fp8 import fp8_linear
from mpu.grads import MainGrad
from mpu.groups import Group
from mpu.parallel_state import tp_group_or_current
from mpu.partition import local_slice, partition_of, set_partition
from mpu.regions import (all_gather_positions, copy_to_region, gather_from_region, reduce_from_region,
                         reduce_scatter_positions, reduce_scatter_to_sequence_region, replicated_to_partial,
                         scatter_to_region)
from mpu.split import ParallelError, Partition, divide, split_range
from mpu.weight_init import (ConstantInitializer, CounterRNGInit, NormalInitializer, allocate_weight, set_initializer,
                             strided_segments_of)

# Fills a tensor in place, such as torch.nn.init.xavier_normal_; or describes counter-based values.
InitMethod = Callable[[Tensor], Any] | CounterRNGInit

# Row counts for which W x^T is faster than x W^T.
WEIGHT_FIRST_ROWS = {torch.bfloat16: range(1, 65), torch.float32: range(8, 17)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [..., in], [out, in], [out] -> [..., out].

    With few rows, as in decoding, the product is bound by reading the weight, and torch's two orders differ in speed by
    up to 2x on a CPU: W x^T is faster in bf16, and in fp32 from some rows on (benchmarks/few_rows.py). Everything
    else, and weights with their own product (__torch_function__), uses F.linear."""
    rows = x.numel() // x.shape[-1]
    if torch.is_grad_enabled() or rows not in WEIGHT_FIRST_ROWS.get(x.dtype, ()) or on_accelerator(x) \
            or has_torch_function((weight,)):
        return F.linear(x, weight, bias)
    if rows == 1:
        row = x.reshape(-1)
        y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    else:
        columns = x.reshape(rows, -1).t()  # [..., in] -> [in, rows]
        y = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
        y = y.t().contiguous()  # [out, rows] -> [rows, out]
    return y.view(*x.shape[:-1], len(weight))


class _GatherLinear(torch.autograd.Function):
    """x W^T + b of all positions: keeps this rank's positions of x, and gathers the others again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.has_bias = tp, bias is not None
        return F.linear(all_gather_positions(x, tp), weight, bias)  # [b, s / tp, in] -> [b, s, in] -> [b, s, out / tp]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, 1)  # [b * s, out / tp]
        if torch.compiler.is_compiling():  # a gather that needs no gradient would move to the forward, its result kept
            x = x + 0 * rows[0, 0]
        d_weight = rows.t() @ all_gather_positions(x, ctx.tp).flatten(0, 1)
        d_x = reduce_scatter_positions(grads[0] @ weight, ctx.tp)  # [b, s, in] -> [b, s / tp, in]
        return d_x, d_weight, rows.sum(0) if ctx.has_bias else None, None


class _ParallelModule(nn.Module):
    """A module with one split weight; `reset_parameters` initializes it again."""

    weight: nn.Parameter
    fp8 = False  # in column and row layers: products of training have 8-bit factors (`use_fp8`)

    def __init__(self, logical: tuple[int, int], padded: tuple[int, int], partition: Partition, init_method: InitMethod,
                 tp: Group | None, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__()
        self.tp = tp_group_or_current(tp)
        self.logical_shape, self.padded_shape, self.init_method = logical, padded, init_method
        shape = list(padded)
        side = f"{type(self).__name__} {('output', 'input')[partition.dim]}"
        each = divide(divide(padded[partition.dim], partition.stride, side), self.tp.size, side)
        shape[partition.dim] = each * partition.stride
        deferred = isinstance(init_method, CounterRNGInit) and init_method.deferred
        self.weight = nn.Parameter(allocate_weight(shape, deferred, dtype, device))
        set_partition(self.weight, partition)

    def make_bias(self, size: int, partition: Partition | None) -> nn.Parameter:
        bias = nn.Parameter(torch.zeros(size, dtype=self.weight.dtype, device=self.weight.device))
        set_partition(bias, partition)
        return bias

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.fp8 and self.training:
            return fp8_linear(x, self.weight, bias)
        return linear(x, self.weight, bias)

    @torch.no_grad()
    def reset_parameters(self) -> Tensor | None:
        """Initialize the logical weight and keep this rank's slice; returns the full weight if it was materialized."""
        partition = partition_of(self.weight)
        assert partition is not None
        bias: nn.Parameter | None = getattr(self, "bias", None)
        if isinstance(init := self.init_method, CounterRNGInit):
            segments = strided_segments_of(tuple(self.weight.shape), partition, self.tp.rank, self.tp.size)
            set_initializer(self.weight, NormalInitializer(init.key, init.std, segments), init.deferred)
            if bias is not None:
                set_initializer(bias, ConstantInitializer(0.0), init.deferred)
            return None
        if self.weight.is_meta:
            return None
        # The whole tensor on every rank, from the same stream: then the slices fit for every tp size.
        full = torch.empty(self.logical_shape, dtype=torch.float32, device="cpu")
        init(full)
        padding = self.padded_shape[0] - self.logical_shape[0]
        padded = F.pad(full, (0, 0, 0, padding)) if padding else full
        self.weight.copy_(local_slice(padded, partition, self.tp.rank, self.tp.size))
        if bias is not None:
            bias.zero_()
        return full


class ColumnParallelLinear(_ParallelModule):
    """Y = X A + b with A = [A_1 .. A_p] split along its columns: rank i computes Y_i = X A_i + b_i.

    weight [out / tp, in], bias [out / tp]. `gather_output` gathers Y on every rank. `stride` is the number of equal
    parts of the output that are split separately (3 for a fused q, k, v projection). With `skip_bias_add` the result is
    (X A, b), for a caller that fuses the addition."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True, gather_output: bool = True,
                 init_method: InitMethod = nn.init.xavier_normal_, stride: int = 1,
                 keep_master_weight_for_test: bool = False, skip_bias_add: bool = False, *,
                 sequence_parallel: bool = False, tp: Group | None = None, dtype: torch.dtype | None = None,
                 device: torch.device | str | None = None) -> None:
        shape = (output_size, input_size)
        super().__init__(shape, shape, Partition(0, stride), init_method, tp, dtype, device)
        self.gather_output, self.stride, self.skip_bias_add = gather_output, stride, skip_bias_add
        self.sequence_parallel = sequence_parallel and not self.tp.is_solo
        self.bias = self.make_bias(self.weight.shape[0], Partition(0, stride)) if bias else None
        full = self.reset_parameters()
        self.master_weight = full if keep_master_weight_for_test else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """[..., in] -> [..., out], or [..., out / tp] without `gather_output`."""
        added = None if self.skip_bias_add else self.bias
        if not (self.sequence_parallel and self.training):
            y = self.product(copy_to_region(x, self.tp), added)
        elif self.fp8:
            y = fp8_linear(x, self.weight, added, sequence_group=self.tp)
        else:
            y = cast(Tensor, _GatherLinear.apply(x, self.weight, added, self.tp))  # type: ignore[no-untyped-call]
        bias: Tensor | None = self.bias if self.skip_bias_add else None
        if self.gather_output:
            y = self._gather(y)
            bias = None if bias is None else self._gather(bias)
        return (y, bias) if self.skip_bias_add else y

    def _gather(self, y: Tensor) -> Tensor:
        """[..., out / tp] -> [..., out] with the `stride` parts in logical order."""
        whole = gather_from_region(y, self.tp)
        if self.stride == 1 or self.tp.is_solo:
            return whole
        # [..., tp, stride, n] -> [..., stride, tp, n] -> [..., out]
        parts = whole.view(*whole.shape[:-1], self.tp.size, self.stride, -1)  # rank by rank
        return parts.transpose(-3, -2).flatten(-3)  # [..., stride, tp, n] -> [..., out]


class RowParallelLinear(_ParallelModule):
    """Y = X A + b with A split along its rows and X along its columns: Y = sum_i X_i A_i + b. weight [out, in / tp];
    bias [out] is replicated and added once, after the sum."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True, input_is_parallel: bool = False,
                 init_method: InitMethod = nn.init.xavier_normal_, stride: int = 1,
                 keep_master_weight_for_test: bool = False, skip_bias_add: bool = False, *,
                 sequence_parallel: bool = False, tp: Group | None = None, dtype: torch.dtype | None = None,
                 device: torch.device | str | None = None) -> None:
        shape = (output_size, input_size)
        super().__init__(shape, shape, Partition(1, stride), init_method, tp, dtype, device)
        self.input_is_parallel, self.stride, self.skip_bias_add = input_is_parallel, stride, skip_bias_add
        self.sequence_parallel = sequence_parallel and not self.tp.is_solo
        self.bias = self.make_bias(output_size, None) if bias else None
        full = self.reset_parameters()
        self.master_weight = full if keep_master_weight_for_test else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """[..., in / tp], or [..., in] without `input_is_parallel` -> [..., out]."""
        if not self.input_is_parallel:
            x = self._scatter(x)
        if self.tp.is_solo and not self.skip_bias_add:
            return self.product(x, self.bias)  # one fused operation
        if self.sequence_parallel and self.training:
            added = None if self.bias is None or self.skip_bias_add else replicated_to_partial(self.bias, self.tp)
            y = reduce_scatter_to_sequence_region(self.product(x, added), self.tp)
            if self.skip_bias_add:  # the caller adds the bias to this rank's positions alone
                return y, None if self.bias is None else copy_to_region(self.bias, self.tp)
            return y
        # The bias is added after the sum: before it, it would count once per rank.
        y = reduce_from_region(self.product(x, None), self.tp)  # partial sums [..., out] -> [..., out]
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias

    def _scatter(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., in / tp], a slice of each of the `stride` parts."""
        if self.stride != 1 and not self.tp.is_solo:
            parts = x.reshape(*x.shape[:-1], self.stride, self.tp.size, -1)  # [..., stride, tp, n]
            x = parts.transpose(-3, -2).flatten(-3)  # [..., tp, stride, n] -> [..., in]
        return scatter_to_region(x, self.tp)


def use_fp8(module: nn.Module) -> None:
    """Give the products of all column and row layers of `module` 8-bit factors while it trains (fp8.py)."""
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.fp8 = True


class VocabParallelEmbedding(_ParallelModule):
    """An embedding whose table is split along the vocabulary. weight [padded_size / tp, dim]. `num_embeddings` counts
    the real tokens; rows up to `padded_size` are zero and make the slices equal. A token outside the vocabulary raises
    on CPU. On CUDA that check would synchronize, so the data layer has to refuse it. Without `reduce_results` the
    result is this rank's term of the sum over ranks."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init_method: InitMethod = nn.init.xavier_normal_, *,
                 padded_size: int | None = None, reduce_results: bool = True, tp: Group | None = None,
                 dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        padded = num_embeddings if padded_size is None else padded_size
        if padded < num_embeddings:
            raise ParallelError(f"padded size {padded} is smaller than the vocabulary {num_embeddings}: raise it")
        partition = Partition(0, size=num_embeddings)
        shapes = (num_embeddings, embedding_dim), (padded, embedding_dim)
        super().__init__(*shapes, partition, init_method, tp, dtype, device)
        self.num_embeddings, self.reduce_results = num_embeddings, reduce_results
        self.vocab_range = split_range(self.tp.rank, self.tp.size, padded)
        # If set, the table's gradient is accumulated there, row by row, and autograd gets none.
        self.weight_main_grad: MainGrad | None = None
        self.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] integers -> [..., dim]."""
        if not on_accelerator(tokens) and tokens.numel():
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= self.num_embeddings:
                raise ParallelError(f"token id {low if low < 0 else high} is outside the vocabulary "
                                    f"0..{self.num_embeddings - 1}: the data was made with another tokenizer")
        if self.tp.is_solo:
            return self._look_up(tokens)
        # Rows of other ranks are zero here; the sum over ranks has each row once. [..., dim]
        start, stop = self.vocab_range
        not_local = (tokens < start) | (tokens >= stop)
        rows = self._look_up((tokens - start).masked_fill(not_local, 0)).masked_fill(not_local.unsqueeze(-1), 0)
        return reduce_from_region(rows, self.tp) if self.reduce_results else rows

    def _look_up(self, rows: Tensor) -> Tensor:
        # On CUDA adding rows one by one is not deterministic, and torch's dense gradient is cheap.
        if self.weight_main_grad is None or on_accelerator(rows) or not torch.is_grad_enabled():
            return F.embedding(rows, self.weight)
        return cast(Tensor, EmbeddingIntoMainGrad.apply(  # type: ignore[no-untyped-call]
            rows, self.weight, self.weight_main_grad))


class EmbeddingIntoMainGrad(torch.autograd.Function):
    """F.embedding whose backward adds the used rows to a main_grad buffer; no dense gradient is created."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, main_grad: MainGrad) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.main_grad = main_grad
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (rows,) = ctx.saved_tensors
        total = ctx.main_grad.accumulated()
        total.index_add_(0, rows.flatten(), grads[0].flatten(0, -2).to(total.dtype))  # [..., dim] -> [N, dim]
        return None, None, None


class ParallelEmbedding(_ParallelModule):
    """An embedding whose table is split along its features: weight [num_embeddings, dim / tp]."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init_method: InitMethod = nn.init.xavier_normal_,
                 keep_master_weight_for_test: bool = False, *, tp: Group | None = None,
                 dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        shape = (num_embeddings, embedding_dim)
        super().__init__(shape, shape, Partition(1), init_method, tp, dtype, device)
        full = self.reset_parameters()
        self.master_weight = full if keep_master_weight_for_test else None

    def forward(self, indices: Tensor) -> Tensor:
        """[...] integers -> [..., dim]."""
        return gather_from_region(F.embedding(indices, self.weight), self.tp)
