"""The fused kernel of the update on a GPU."""

from __future__ import annotations

import pytest
import torch

from mpu.device import load_kernels

pytestmark = pytest.mark.gpu


def test_the_kernel_is_used_on_a_gpu(device: torch.device) -> None:
    """Else the tests below compare torch with torch. Triton comes with torch for CUDA."""
    assert load_kernels("megatron.optim.adam_kernel", device, "") is not None or device.type == "cpu"


if torch.cuda.is_available():
    from tests.megatron.optim.adam_kernel_cases import *  # noqa: F401, F403
