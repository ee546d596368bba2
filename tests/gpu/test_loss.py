"""The kernels of the loss, of norms and of the update on a GPU, and the product that adds up in fp32 on CUDA only."""

from __future__ import annotations

import pytest
import torch

from mpu import cross_entropy
from mpu.cross_entropy import linear_cross_entropy
from mpu.device import load_kernels
from mpu.grads import NORM_ROW, row_norms
from mpu.groups import SOLO

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernels", ["mpu.kernels", "megatron.optim.adam_kernel"])
def test_the_kernels_are_used_on_a_gpu(kernels: str, device: torch.device) -> None:
    """Else the tests below compare torch with torch. Triton comes with torch for CUDA."""
    assert load_kernels(kernels, device, "") is not None or device.type == "cpu"


if torch.cuda.is_available():
    from tests.megatron.optim.adam_kernel_cases import *  # noqa: F401, F403
    from tests.mpu.kernel_cases import *  # noqa: F401, F403


@pytest.mark.parametrize("chunk_rows", [None, 256, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_those_of_float64(dtype: torch.dtype, chunk_rows: int | None,
                                                 device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunk_rows is not None:
        monkeypatch.setattr(cross_entropy, "rows_per_chunk", lambda hidden, width: chunk_rows)
    rows, width, vocab, padded = 1024, 64, 5000, 5120
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(padded, width, generator=generator) * 0.2).to(device, dtype).requires_grad_()
    target = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    loss = linear_cross_entropy(hidden, weight, target, SOLO, vocab_size=vocab, grad_scale=256.0,
                                loss_weight=torch.ones(rows, device=device))
    (loss * 256).backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(h @ w[:vocab].t(), target)
    expected.backward()
    # Logits are rounded once to 16 bits: 2**-8 of numbers of order 2 in bf16; and TF32, where it is allowed.
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for ours, exact in ((hidden, h), (weight, w)):
        assert ours.grad is not None and exact.grad is not None
        error = (ours.grad.double() / 256 - exact.grad).norm() / exact.grad.norm()
        assert error < 3 * tolerance
    assert weight.grad is not None and not weight.grad[vocab:].any()


def test_a_sum_of_16_bit_products_is_not_rounded_on_its_way(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    gradient, x = (torch.randn(512, n, generator=generator).to(device).bfloat16() for n in (256, 64))
    total = torch.full((256, 64), torch.nan, device=device)
    for first in (True, False):
        cross_entropy.accumulate_weight_grad(total, gradient, x, first)
    exact = 2 * gradient.double().t() @ x.double()
    # Tensor cores add in fp32; the CPU that plays a GPU rounds each product to bf16.
    tolerance = 1e-4 if device.type == "cuda" else 2.0**-7
    assert ((total - exact).norm() / exact.norm()).item() < tolerance


def test_the_norms_of_a_large_buffer_need_no_other(device: torch.device) -> None:
    """A copy in fp64 would be twice the buffer."""
    if device.type != "cuda":
        pytest.skip("memory is counted on a GPU")
    x = torch.randn(1 << 26, device=device)
    out = torch.empty(len(x) // NORM_ROW, device=device)
    row_norms(x[:NORM_ROW], out[:1])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row_norms(x, out)
    assert torch.cuda.max_memory_allocated() == before
    assert torch.linalg.vector_norm(out.double()).item() == pytest.approx(float(1 << 13), rel=1e-3)
