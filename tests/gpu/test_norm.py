"""The kernel of norms on a GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from tests.mpu.norm_kernel_cases import *  # noqa: F401, F403


def test_the_norms_of_a_large_buffer_need_no_other(device: torch.device) -> None:
    """A copy in fp64 would be twice the buffer."""
    if device.type != "cuda":
        pytest.skip("memory is counted on a GPU")
    from mpu.grads import NORM_ROW, row_norms
    x = torch.randn(1 << 26, device=device)
    out = torch.empty(len(x) // NORM_ROW, device=device)
    row_norms(x[:NORM_ROW], out[:1])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row_norms(x, out)
    assert torch.cuda.max_memory_allocated() == before
    assert torch.linalg.vector_norm(out.double()).item() == pytest.approx(float(1 << 13), rel=1e-3)
