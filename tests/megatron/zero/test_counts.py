"""What a step asks of an accelerator, counted: launches and waits of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.errors import NumericsError
from megatron.optim import adam
from megatron.optim.rule import UpdateSegment
from megatron.zero.engine import ZeroEngine
from mpu import grads
from mpu.groups import Groups
from tests.covering import pairs
from tests.megatron.counting import Calls, Launches
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, master
from tests.wires import accelerator_side

TOKENS = torch.arange(16).view(2, 8)


@pytest.fixture(autouse=True)
def on_accelerator() -> Iterator[None]:
    with accelerator_side():
        yield


def made(layers: int = 2, precision: str = "fp32", stage: int = 0, optimizer: str = "adam") -> ZeroEngine:
    chosen = {} if precision == "fp32" else {precision: True}
    config = configure_gpt2(num_layers=layers, zero_stage=stage, optimizer=optimizer, lr=1e-3, lr_warmup_iters=0,
                            **chosen)
    return gpt2_engine(config, Groups())


def backward(engine: ZeroEngine) -> None:
    engine.backward(engine(TOKENS, TOKENS.clone(), grad_scale=engine.backward_scale))


def counted_step(engine: ZeroEngine, steps: int) -> Launches:
    """The last of so many steps."""
    for step in range(steps):
        backward(engine)
        with Launches() as counted:
            engine.step()
    return counted


@contextmanager
def the_kernel_of_norms() -> Iterator[list[Tensor]]:
    """Plays mpu/kernels.py, which needs Triton, with one launch; tests/mpu/kernel_cases.py has what it computes.
    The rows that it was asked for."""
    asked: list[Tensor] = []

    def norms_into(out: Tensor, rows: Tensor) -> None:
        asked.append(rows)
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, out=out)

    kernel = SimpleNamespace(serves=lambda rows: True, norms_into=norms_into)
    with patch.object(grads, "load_kernels", lambda *which: kernel):
        yield asked


@pytest.mark.parametrize("precision, stage", pairs(["fp32", "bf16", "fp16"], [0, 1, 2, 3], each=1))
def test_a_step_is_a_launch_for_each_bucket_and_a_few_for_all_of_them(precision: str, stage: int) -> None:
    """At 24 layers there are 25 or 26 buckets, and 290 parameters."""
    engine = made(24, precision, stage)
    with the_kernel_of_norms() as asked:
        counted = counted_step(engine, 3)
    assert len(asked) == 3 * len(engine.buckets)
    assert sum(counted.kernels.values()) == len(engine.buckets) + {"fp32": 31, "bf16": 34, "fp16": 24}[precision] < 100
    assert counted.kernels["_fused_adamw_"] == 2, "one call for each hyper-parameter group"
    assert counted.waits <= 1


def calls_of_a_micro_batch(layers: int, stage: int) -> int:
    engine = made(layers, stage=stage)
    for _ in range(3):
        with Calls("megatron/zero") as counted:
            backward(engine)
        engine.step()
    return counted.count


@pytest.mark.parametrize("stage", [0, 3])
def test_the_host_does_as_much_for_each_layer_however_many_there_are(stage: int) -> None:
    few, more, many = (calls_of_a_micro_batch(layers, stage) for layers in (4, 8, 16))
    assert (many - more) == 2 * (more - few), "calls of the engine are linear in the number of layers"


# ---- the update that writes the 16-bit weights too ----------------------------------------------------------------


class Kernel:
    """Plays adam_kernel.py, which needs Triton; tests/megatron/optim/test_adam_kernel.py has what it computes."""

    SegmentTable = object
    groups: list[int] = []

    @staticmethod
    def update(spans: Sequence[UpdateSegment], places: object, hyper: object, at: object, **rule: bool) -> bool:
        if spans[0].group not in Kernel.groups:
            return False
        for span in spans:
            assert span.lp_out is not None and span.lp_out.dtype == torch.bfloat16
            span.master.add_(1)
            span.lp_out.copy_(span.master)
        return True


@pytest.mark.parametrize("groups, copies", [([0, 1], 0), ([0], 2), ([1], 2), ([], 3)])
def test_weights_are_copied_where_the_rule_has_not_written_them(groups: list[int], copies: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16-bit gradients torch's kernel needs a copy of them for each group, and one of the weights for all."""
    monkeypatch.setattr(Kernel, "groups", groups)
    monkeypatch.setattr(adam, "load_kernels", lambda *which: Kernel)
    engine = made(24, "bf16")
    before = [master(bucket) for bucket in engine.buckets]
    kernels = counted_step(engine, 1).kernels
    assert (kernels["_fused_adamw_"], kernels["_foreach_copy_"]) == (2 - len(groups), copies)
    for bucket, old in zip(engine.buckets, before, strict=True):
        assert torch.equal(bucket.device_param_shard,
                           master(bucket).bfloat16()) and not torch.equal(master(bucket), old)


# ---- a step that the host learns of later ------------------------------------------------------------------------


def test_a_report_is_read_when_somebody_asks() -> None:
    engine = made()
    backward(engine)
    with Launches() as counted:
        report = engine.step()
        assert report is not None and "values" not in vars(report._host_scalars) and not counted.waits
        assert report.applied and report.grad_norm > 0 and counted.waits == 1


def test_skipped_steps_do_not_count_for_the_bias_correction() -> None:
    """The count of steps is on the device: it must be that of a run without the bad step."""
    plain, marred = made(), made()
    for engine in (plain, marred):
        backward(engine)
        engine.step()
    backward(marred)
    marred.buckets[0].grads.shard[0] = torch.inf
    marred.step()
    with pytest.raises(NumericsError):
        marred.finish_step()
    for engine in (plain, marred):
        backward(engine)
        engine.step()
    for ours, theirs in zip(plain.buckets, marred.buckets, strict=True):
        assert torch.equal(master(ours), master(theirs))
