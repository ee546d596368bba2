"""The fused kernel of the loss, without a GPU: its numbers in Triton's interpreter, its compilation for Hopper, the
bytes it moves. All but the last needs Triton, which comes with requirements-test.txt."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpu import loss_chunk
from mpu.cross_entropy import linear_cross_entropy
from mpu.groups import SOLO, build
from mpu.loss_chunk import VocabShard
from tests.distributed import run_ranks
from tests.kernels import compiled, interpreted
from tests.wires import accelerator_side

ROWS, COLUMNS, WIDTH = 64, 4000, 4096


@pytest.fixture
def triton() -> Any:
    return pytest.importorskip("triton", reason="Triton is not installed: it comes with requirements-test.txt")


def test_the_kernel_computes_what_it_should_in_the_interpreter(triton: Any) -> None:
    assert re.search(r"\b5\d passed", interpreted("tests/mpu/loss_kernel_cases.py"))


@pytest.mark.slow
def test_the_losses_of_every_layout_pass_with_the_interpreted_kernel(triton: Any) -> None:
    interpreted("--accelerator-side", "tests/mpu/test_cross_entropy.py")


# -- compiled ------------------------------------------------------------------------------------------------------


def _compiled(name: str, dtype: str) -> Any:
    """A kernel with what Triton assumes of GPT-2's shapes: addresses and strides by 16."""
    from mpu import loss_kernel
    kernel = getattr(loss_kernel, name)
    constants = {"WIDTH": 50_304, "BLOCK": loss_kernel._BLOCK}
    kinds = {key: "*fp32" for key in kernel.arg_names} | {
        "logits": f"*{dtype}", "out": f"*{dtype}", "targets": "*i64", "stride": "i32", "first": "i32",
        "columns": "i32"}
    by_16 = set(kernel.arg_names) - {*constants, "columns", "first"}
    return compiled(kernel, kinds, constants, by_16, loss_kernel._WARPS)


def _block() -> int:
    from mpu import loss_kernel
    return loss_kernel._BLOCK


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name, loads, stores", [
    ("row_summary_kernel", 1, 0), ("gradient_kernel", 1, 1), ("loss_and_gradient_kernel", 2, 1)])
def test_the_kernel_compiles_for_hopper_and_moves_16_bytes_at_once(
    triton: Any, name: str, dtype: str, loads: int, stores: int
) -> None:
    made = _compiled(name, dtype)
    assert len(made.asm["cubin"]) > 1000
    rows = [line for line in made.asm["ttir"].splitlines() if f"tensor<{_block()}x!tt.ptr" in line]
    assert (sum("tt.load" in line for line in rows), sum("tt.store" in line for line in rows)) == (loads, stores)
    wide = Counter(re.findall(r"(ld|st)\.global[.\w:]*\.v4\.b32", made.asm["ptx"]))
    assert wide["ld"] >= loads and wide["st"] >= stores


# -- counted -------------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, and how many ran. Views move none, and a look-up one number a row."""

    FREE = {"aten::empty", "aten::gather", "aten::scatter_add_"}

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in self.FREE:
            schema, given = func._schema.arguments, dict(enumerate(args)) | (kwargs or {})
            read = [given[key] for key in given if not self._is_written_only(schema, key, func)]
            tensors = [leaf for leaf in tree_leaves((read, result)) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.launches += 1
        return result

    @staticmethod
    def _is_written_only(schema: Any, key: int | str, func: Any) -> bool:
        name = schema[key].name if isinstance(key, int) else key
        return name == "out" or name == "self" and func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_")


def _traffic_of_a_chunk(logits: torch.Tensor) -> Traffic:
    target = torch.zeros(len(logits), dtype=torch.int64)
    with Traffic() as traffic:
        loss_chunk.losses_of_chunk(logits, target, VocabShard(SOLO, 0, COLUMNS), torch.ones(len(logits)))
    return traffic


def test_bytes_moved_for_each_logit() -> None:
    """The kernel's 4 to 6 are in the test of its compilation: a load and a store of memory, and a load that finds the
    row or part of it in the cache."""
    logits = torch.randn(ROWS, WIDTH).bfloat16()
    assert _traffic_of_a_chunk(logits).bytes / logits.numel() == pytest.approx(28, abs=1)


def test_one_kernel_a_chunk_and_no_other_pass_over_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        calls = 0

        @staticmethod
        def serves(logits: torch.Tensor) -> bool:
            return True

        @classmethod
        def losses_and_gradients(cls, logits: torch.Tensor, *rest: object) -> torch.Tensor:
            cls.calls += 1
            return torch.zeros(len(logits))

    monkeypatch.setattr(loss_chunk, "load_kernels", lambda *which: Kernel)
    with accelerator_side(True):
        traffic = _traffic_of_a_chunk(torch.randn(ROWS, WIDTH).bfloat16())
    assert Kernel.calls == 1 and traffic.bytes < 1000  # losses and weights of the rows


def test_chunks_are_few_equal_and_fit_their_memory() -> None:
    width = 50_304
    for rows in (1, 100, 8192, 10_624, 10_625, 16_384, 65_536):
        for size in (2, 4):
            chunk = loss_chunk.accelerator_rows_per_chunk(rows, width, size)
            assert chunk * width * size <= loss_chunk.ACCELERATOR_CHUNK_BYTES and chunk <= rows
            fewest = -(-rows // loss_chunk.accelerator_rows_per_chunk(10**9, width, size))
            assert -(-rows // chunk) <= fewest + 1 and (chunk == rows or chunk % 128 == 0)
    assert loss_chunk.accelerator_rows_per_chunk(16_384, width, 2) == 8192


class SummaryKernel:
    """In place of the kernels: what they return is of the right shape."""

    @staticmethod
    def serves(logits: torch.Tensor) -> bool:
        return True

    @staticmethod
    def summaries_of(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.ones(3, len(logits))

    @staticmethod
    def gradients_into(*rest: object) -> None:
        """None is needed."""


def _exchanges(rank: int, world: int) -> int:
    """Collectives inside the two chunks of a loss with gradients."""
    tp, calls = build(world).tp, []
    hidden, weight = torch.randn(4096, 16), torch.randn(64, 16, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.int64)
    gather = loss_chunk.all_gather
    with mock.patch.object(loss_chunk, "all_gather", lambda *a, **k: calls.append(1) or gather(*a, **k)), \
            mock.patch.object(loss_chunk, "load_kernels", lambda *which: SummaryKernel), accelerator_side(True):
        linear_cross_entropy(hidden, weight, target, tp, vocab_size=100, loss_weight=torch.ones(4096), chunk_rows=2048)
    return len(calls)


def test_ranks_exchange_once_a_chunk() -> None:
    assert run_ranks(_exchanges, 2) == [2, 2]
