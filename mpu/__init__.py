"""Tensor model parallelism: groups, collectives, split layers, split loss; usable without the rest of the tree.

Begin with groups.py (who communicates with whom) and layers.py, regions.py (split layers and activations). Below them
is collectives.py; cross_entropy.py is the loss of a split vocabulary, random.py and weight_init.py are the random
streams and initial weights, parallel_state.py has Megatron's global names.

The modules are the interface (`mpu.layers`, `mpu.groups`, ...); their functions and classes can also be read from this
file (`mpu.ColumnParallelLinear`), for scripts written against Megatron's `mpu`. They are imported on first use:
mpu.split must not import torch.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_MODULES_WITH_FLAT_NAMES = ("parallel_state", "layers", "cross_entropy", "grads", "random", "regions", "split")


@cache
def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        if find_spec(f"mpu.{name}"):
            return import_module(f"mpu.{name}")
        for module in map(import_module, (f"mpu.{module}" for module in _MODULES_WITH_FLAT_NAMES)):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
