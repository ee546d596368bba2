"""The tests of this folder need a GPU. With --accelerator-side they run on a CPU as well, where they can: every line of
them, on small models, so that the first run on a GPU shows no mistake of Python's.

    python -m pytest -m gpu tests/gpu                       on a GPU
    python -m pytest -m gpu --accelerator-side tests/gpu    on a CPU, by the accelerator's ways (minutes)
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The GPU, or the CPU that plays one."""
    from mpu.device import FORCE_ACCELERATOR_PATH  # not above: this file is read before the option is
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if not FORCE_ACCELERATOR_PATH:
        pytest.skip("needs an NVIDIA GPU (--accelerator-side runs it on a CPU)")
    return torch.device("cpu")
