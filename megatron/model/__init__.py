"""GPT-2 as tensor-parallel modules; knows mpu and its own config section, never the engine."""

from megatron.model.gpt2 import GPT2

__all__ = ["GPT2"]
