"""Name and version of this program: of `megatron`, `mpu` and `data` together, which are one distribution. And the name
of the command that was typed."""

import os
import sys

DISTRIBUTION = "megatron-gpt2-trainer"
"""As pip knows it."""

__version__ = "0.1.0"


def typed(otherwise: str) -> str:
    """The command as it was typed: one of an installation's, or else `otherwise`."""
    name = os.path.basename(sys.argv[0])
    return name if name.startswith("gpt2-") else otherwise
