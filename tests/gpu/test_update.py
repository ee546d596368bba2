"""The fused kernel of the update on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron.optim import adam

pytestmark = pytest.mark.gpu


def test_the_kernel_is_used_on_a_gpu(device: torch.device) -> None:
    """Else the tests below compare torch with torch. Triton comes with torch for CUDA."""
    kernel = adam._load_kernel(device)
    assert kernel is not None or device.type == "cpu"


if torch.cuda.is_available():
    from tests.megatron.optim.adam_kernel_cases import *  # noqa: F401, F403
