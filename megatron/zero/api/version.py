"""The version of this package, for scripts that print or compare `deepspeed.__version__`. (It is not DeepSpeed's.)"""

from __future__ import annotations

from importlib import metadata

PACKAGE = "megatron-gpt2-trainer"
RUN_IN_PLACE = "0.1.0"
"""The same as in setup.cfg (a test compares), for a tree that is not installed."""


def version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return RUN_IN_PLACE
