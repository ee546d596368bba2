"""Text generation from a trained GPT-2: loading, KV-cache decoding, continuous batching, sampling, int8 weights.

Start at generation.py (the batching loop) and decoder.py (the forward with a KV cache); load.py builds the model,
cli.py is `python -m megatron.generate`. `init_inference` (api/) is DeepSpeed's call. Names are imported on first
use, so that flags are checked without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.inference.api.engine import InferenceEngine
    from megatron.inference.api.init_inference import init_inference
    from megatron.inference.api.policy import Cut

_MODULE_OF = {"init_inference": "init_inference", "InferenceEngine": "engine", "Cut": "policy"}

__all__ = ["Cut", "InferenceEngine", "init_inference"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron.inference.api.{_MODULE_OF[name]}"), name)
