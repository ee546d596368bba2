"""A backward that comes to parameters while they are away is refused, by the counter that autograd itself keeps.

Autograd saves weights for the backward together with their version, which an operation in place raises, and refuses a
tensor of another version. A parameter that leaves is of another version until it is back: what would have been
computed from memory that is gone, or not filled yet, is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def count_versions(parameters: Sequence[Tensor], by: int) -> None:
    """Add `by` to the counters."""
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple([one._version + by for one in parameters]))


def is_of_old_version(error: BaseException) -> bool:
    """It is what autograd says of such a tensor."""
    return isinstance(error, RuntimeError) and "has been modified by an inplace operation" in str(error)
