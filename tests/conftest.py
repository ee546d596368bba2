"""One thread per test process: the machine has few cores, and one thread makes sums repeat bit for bit."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
