"""Triton kernels without a GPU: where they are used, their numbers in Triton's interpreter, their compilation for
Hopper, and how often the loss calls them and exchanges. Triton comes with requirements-test.txt."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mpu import cross_entropy
from mpu.cross_entropy import VocabShard, linear_cross_entropy
from mpu.device import load_kernels
from mpu.groups import SOLO, build
from tests.distributed import on_ranks
from tests.kernels import compiled, interpreted
from tests.megatron.counting import Launches
from tests.wires import accelerator_side

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def broken(device: torch.device) -> None:
    raise RuntimeError("no C compiler")


def test_kernels_are_used_where_they_work_and_a_gpu_without_them_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    works = SimpleNamespace(try_out=lambda device: None)
    monkeypatch.setitem(sys.modules, "works", works)
    monkeypatch.setitem(sys.modules, "fails", SimpleNamespace(try_out=broken))
    load_kernels.cache_clear()
    assert load_kernels("works", GPU, "slow") is works
    for module, why in (("missing", "No module named 'missing'"), ("fails", "no C compiler")):
        with pytest.warns(UserWarning, match=f"twice the bytes: {why}"):
            assert load_kernels(module, GPU, "twice the bytes") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_kernels("works", CPU, "slow") is None is load_kernels("missing", CPU, "slow")
    load_kernels.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert load_kernels("works", CPU, "slow") is works
    load_kernels.cache_clear()


# ---- interpreted and compiled ------------------------------------------------------------------------------------


@pytest.fixture
def triton() -> Any:
    return pytest.importorskip("triton", reason="Triton is not installed: it comes with requirements-test.txt")


def test_the_kernels_compute_what_they_should_in_the_interpreter(triton: Any) -> None:
    told = interpreted("--accelerator-side", "-rA", "tests/mpu/kernel_cases.py")
    assert "PASSED tests/mpu/kernel_cases.py::test_the_kernels_are_what_runs" in told


@pytest.mark.slow
def test_losses_of_every_layout_and_norms_of_gradients_pass_with_interpreted_kernels(triton: Any) -> None:
    interpreted("--accelerator-side", "tests/mpu/test_cross_entropy.py", "tests/mpu/test_grads.py")


@pytest.mark.parametrize("name, dtype, loads, stores", [
    ("row_summary_kernel", "bf16", 1, 0), ("gradient_kernel", "fp16", 1, 1),
    ("loss_and_gradient_kernel", "bf16", 2, 1), ("loss_and_gradient_kernel", "fp32", 2, 1)])
def test_the_loss_compiles_for_hopper_and_moves_16_bytes_at_once(triton: Any, name: str, dtype: str, loads: int,
                                                                 stores: int) -> None:
    """With what Triton assumes of GPT-2's shapes: addresses and strides by 16."""
    from mpu import kernels
    kernel, constants = getattr(kernels, name), {"WIDTH": 50_304, "BLOCK": kernels._BLOCK}
    kinds = {key: "*fp32" for key in kernel.arg_names} | {
        "logits": f"*{dtype}", "targets": "*i64", "stride": "i32", "first": "i32", "columns": "i32"}
    if "z_loss" in kinds:
        kinds["z_loss"] = "fp32"
    made = compiled(kernel, kinds, constants, set(kernel.arg_names) - {*constants, "columns", "first", "z_loss"},
                    kernels._WARPS)
    assert len(made.asm["cubin"]) > 1000
    rows = [line for line in made.asm["ttir"].splitlines() if f"tensor<{kernels._BLOCK}x!tt.ptr" in line]
    assert (sum("tt.load" in line for line in rows), sum("tt.store" in line for line in rows)) == (loads, stores)
    wide = Counter(re.findall(r"(ld|st)\.global[.\w:]*\.v4\.b32", made.asm["ptx"]))
    assert wide["ld"] >= loads and wide["st"] >= stores


@pytest.mark.parametrize("dtype, loads", [("bf16", 2), ("fp32", 4)])
def test_norms_compile_for_hopper_and_read_16_bytes_at_once_without_fp64(triton: Any, dtype: str, loads: int) -> None:
    from mpu import kernels
    made = compiled(kernels.row_norms_kernel, {"flat": f"*{dtype}", "norms": "*fp32", "count": "i64"},
                    {"WIDTH": 128, "ROWS": kernels._NORM_ROWS}, {"flat", "norms", "count"}, kernels._WARPS)
    assert len(made.asm["cubin"]) > 1000
    wide = Counter(re.findall(r"(ld|st)\.global[.\w:]*\.v4\.b32", made.asm["ptx"]))
    assert wide["ld"] == loads and wide["st"] <= 1, "each element is read once"
    assert ".f64" not in made.asm["ptx"]


# ---- counted -----------------------------------------------------------------------------------------------------


class Kernel:
    """In place of mpu.kernels: what it returns is of the right shape."""

    calls = 0

    @staticmethod
    def serves(logits: torch.Tensor) -> bool:
        return True

    @classmethod
    def losses_and_gradients(cls, logits: torch.Tensor, *rest: object) -> torch.Tensor:
        cls.calls += 1
        return torch.zeros(len(logits))

    @staticmethod
    def summaries_of(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.ones(3, len(logits))

    @staticmethod
    def write_gradients(*rest: object) -> None:
        """None is needed."""


def test_one_kernel_a_chunk_and_no_other_pass_over_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "load_kernels", lambda *which: Kernel)
    target, scale = torch.zeros(64, dtype=torch.int64), torch.ones(64)
    with accelerator_side(), Launches() as launches:
        cross_entropy.losses_of_chunk(torch.empty(64, 4096), target, VocabShard(SOLO, 0, 4000), scale)
    assert Kernel.calls == 1 and launches.kernels == {"zeros": 1}, "of the stand-in"


def test_chunks_are_few_equal_and_fit_their_memory() -> None:
    width = 50_304
    for rows in (1, 100, 8192, 10_624, 10_625, 16_384, 65_536):
        for size in (2, 4):
            chunk = cross_entropy.accelerator_rows_per_chunk(rows, width, size)
            assert chunk * width * size <= cross_entropy.ACCELERATOR_CHUNK_BYTES and chunk <= rows
            fewest = -(-rows // cross_entropy.accelerator_rows_per_chunk(10**9, width, size))
            assert -(-rows // chunk) <= fewest + 1 and (chunk == rows or chunk % 128 == 0)
    assert cross_entropy.accelerator_rows_per_chunk(16_384, width, 2) == 8192


@on_ranks(2)
def test_ranks_exchange_once_a_chunk(rank: int, world: int) -> None:
    tp, calls = build(world).tp, []
    hidden, weight = torch.randn(4096, 16), torch.randn(64, 16, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.int64)
    gather = cross_entropy.all_gather
    with mock.patch.object(cross_entropy, "all_gather", lambda *a, **k: calls.append(1) or gather(*a, **k)), \
            mock.patch.object(cross_entropy, "load_kernels", lambda *which: Kernel), \
            mock.patch.object(cross_entropy, "rows_per_chunk", lambda *sizes: 2048), accelerator_side():
        linear_cross_entropy(hidden, weight, target, tp, vocab_size=100, loss_weight=torch.ones(4096))
    assert len(calls) == 2
